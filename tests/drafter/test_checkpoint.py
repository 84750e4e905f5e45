"""Every published variant of a DFlash checkpoint loads, or is refused by the name of what does not
fit.
"""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter import kit
from safetensors.torch import load_file, save_file

from drafter_service import checkpoint
from drafter_service.draft_config import (
    CheckpointError,
    LayerAttention,
    default_target_layers,
    parse,
)

CPU = torch.device("cpu")
PUBLISHED: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "num_target_layers": 36,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "attention_bias": False,
    "layer_types": ["full_attention"] * 5,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
INNER = PUBLISHED["dflash_config"]
SWA5 = ["sliding_attention"] * 4 + ["full_attention"]


def published(**changes: Any) -> dict[str, Any]:
    return {k: v for k, v in (PUBLISHED | changes).items() if v != "absent"}


def test_the_published_config_is_read_whole() -> None:
    config = parse(PUBLISHED)
    assert config.block_size == 16
    assert config.mask_token_id == 151669
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    assert config.layers == (LayerAttention(None, False),) * 5
    assert config.rope.theta == 1e6
    assert config.rope.kind == "default"
    assert config.trained
    assert config.raw_feature_size == 5 * 2560


@pytest.mark.parametrize(
    ("layers", "count", "want"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (24, 5, (1, 6, 11, 16, 21)),
        (32, 5, (1, 8, 15, 22, 29)),
        (30, 1, (15,)),
    ],
)
def test_default_layers_follow_the_published_formula(
    layers: int, count: int, want: tuple[int, ...]
) -> None:
    assert default_target_layers(count, layers) == want


ACCEPTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "block size inside dflash_config": (
        {"block_size": "absent", "dflash_config": INNER | {"block_size": 12}},
        {"block_size": 12},
    ),
    "layer ids by formula": (
        {"dflash_config": {"mask_token_id": 9}},
        {"target_layer_ids": (1, 9, 17, 25, 33)},
    ),
    "both fields beside, no dflash_config": (
        {"dflash_config": "absent", "mask_token_id": 5, "target_layer_ids": [2, 4]},
        {"mask_token_id": 5, "target_layer_ids": (2, 4)},
    ),
    "another name with the fields beside": (
        {
            "architectures": ["SomeAssistantModel"],
            "dflash_config": "absent",
            "mask_token_id": 5,
            "target_layer_ids": [2, 4],
        },
        {"mask_token_id": 5, "target_layer_ids": (2, 4)},
    ),
    "sliding layers are causal": (
        {"layer_types": SWA5, "sliding_window": 2048},
        {"layers": (LayerAttention(2048, True),) * 4 + (LayerAttention(None, False),)},
    ),
    "is_causal overrides": (
        {"layer_types": SWA5, "sliding_window": 2048, "is_causal": False},
        {"layers": (LayerAttention(2048, False),) * 4 + (LayerAttention(None, False),)},
    ),
    "dflash_config.causal overrides": (
        {"dflash_config": INNER | {"causal": True}},
        {"layers": (LayerAttention(None, True),) * 5},
    ),
    "use_swa slides every layer, both ways": (
        {"dflash_config": INNER | {"use_swa": True, "swa_window_size": 512}},
        {"layers": (LayerAttention(512, False),) * 5},
    ),
    "no layer_types": ({"layer_types": "absent"}, {"layers": (LayerAttention(None, False),) * 5}),
    "attention sinks": ({"add_swa_attention_sink_bias": True}, {"attention_sink": True}),
    "sinks named inside": (
        {"dflash_config": INNER | {"attention_sink_bias": True}},
        {"attention_sink": True},
    ),
    "another width of target": ({"target_hidden_size": 4096}, {"target_hidden_size": 4096}),
    "capped logits": (
        {"dflash_config": INNER | {"final_logit_softcapping": 20.0, "output_multiplier": 0.5}},
        {"softcap": 20.0, "output_scale": 0.5},
    ),
    "untrained": ({"draftwire": {"trained": False}}, {"trained": False}),
}


@pytest.mark.parametrize(("changes", "want"), ACCEPTED.values(), ids=ACCEPTED.keys())
def test_a_config_variant_is_understood(changes: dict[str, Any], want: dict[str, Any]) -> None:
    config = parse(published(**changes))
    assert {name: getattr(config, name) for name in want} == want


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {
            "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6},
            "rope_theta": "absent",
        },
    ],
)
def test_yarn_is_understood_under_both_names(changes: dict[str, Any]) -> None:
    rope = parse(published(**changes)).rope
    assert (rope.kind, rope.theta, rope.scaling["factor"]) == ("yarn", 1e6, 4.0)
    assert rope.scaling["original_max_position_embeddings"] == 40960


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown layer type": ({"layer_types": ["mamba"] * 5}, "layer_types"),
    "too few layer types": ({"layer_types": ["full_attention"]}, "layer_types"),
    "sliding without a window": ({"layer_types": SWA5}, "sliding_window"),
    "another architecture": (
        {"architectures": ["Qwen3ForCausalLM"], "dflash_config": "absent"},
        "architectures",
    ),
    "DFlash 2": ({"architectures": ["DFlash2DraftModel"]}, "architectures"),
    "convolutions": (
        {"dflash_config": INNER | {"conv_kernel_size": 2}},
        "dflash_config.conv_kernel_size",
    ),
    "norms before fc": (
        {"dflash_config": INNER | {"fc_layernorm": True}},
        "dflash_config.fc_layernorm",
    ),
    "a vocabulary of its own": ({"draft_vocab_size": 32000}, "draft_vocab_size"),
    "interleaved rope": ({"is_neox_style": False}, "is_neox_style"),
    "partial rope": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "unknown rope": (
        {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
        "rope_scaling.rope_type",
    ),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "no mask token": ({"dflash_config": {"target_layer_ids": [1]}}, "dflash_config.mask_token_id"),
    "no layers to read": (
        {"dflash_config": {"mask_token_id": 1}, "num_target_layers": "absent"},
        "dflash_config.target_layer_ids",
    ),
    "layers past the target": (
        {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [36]}},
        "dflash_config.target_layer_ids",
    ),
    "block of one": ({"block_size": 1}, "block_size"),
    "heads that do not divide": ({"num_key_value_heads": 5}, "num_key_value_heads"),
    "no width": ({"hidden_size": "absent"}, "hidden_size"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act"),
}


@pytest.mark.parametrize(("changes", "field"), REFUSED.values(), ids=REFUSED.keys())
def test_a_config_that_cannot_run_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(published(**changes))
    assert caught.value.field == field
    assert field in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True, "add_swa_attention_sink_bias": True},
        {"draftwire": {"branches": 4}},
    ],
    ids=["plain", "biases and sinks", "branches"],
)
def test_saving_and_loading_gives_the_same_logits(
    tmp_path: Path, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    raw = kit.raw_config(**changes)
    model = kit.lively_model(raw).to(dtype)
    checkpoint.save(tmp_path, model, raw)
    loaded = checkpoint.load(str(tmp_path), device=CPU, dtype=dtype)
    assert loaded.sha256 == checkpoint.sha256_of(model)
    embedding, head = kit.target_matrices(model.config)
    for each in (model, loaded.model):
        each.attach_target(embedding, head, vocab_size=kit.VOCAB)
    rows = kit.features(12).to(dtype)
    want, got = (kit.draft_logits(each, rows, 3, 6) for each in (model, loaded.model))
    assert torch.equal(want, got)
    assert set(load_file(tmp_path / "model.safetensors")) == set(model.state_dict())


def test_the_file_has_the_published_tensor_names_and_no_others(tmp_path: Path) -> None:
    raw = kit.raw_config()
    checkpoint.save(tmp_path, kit.lively_model(raw), raw)
    layer = [
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    ]
    want = {f"layers.{i}.{name}.weight" for i in range(2) for name in layer}
    want |= {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert set(load_file(tmp_path / "model.safetensors")) == want


def _rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors")


def _saved(folder: Path, **changes: Any) -> Path:
    raw = kit.raw_config(**changes)
    checkpoint.save(folder, kit.lively_model(raw), raw)
    return folder


def test_third_party_names_and_fused_projections_load_the_same_model(tmp_path: Path) -> None:
    folder = _saved(tmp_path)
    want = checkpoint.load(str(folder), device=CPU).sha256

    def rename(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        out = dict(tensors)
        qkv = [out.pop(f"layers.0.self_attn.{n}_proj.weight") for n in "qkv"]
        out["midlayer.self_attn.qkv_proj.weight"] = torch.cat(qkv)
        up = [out.pop(f"layers.1.mlp.{n}_proj.weight") for n in ("gate", "up")]
        out["model.layers.1.mlp.gate_up_proj.weight"] = torch.cat(up)
        out["encoder.fc.weight"] = out.pop("fc.weight")
        out["encoder.output_norm_enc.weight"] = out.pop("hidden_norm.weight")
        out["rotary_emb.inv_freq"] = torch.ones(8)
        return out

    _rewrite(folder, rename)
    assert checkpoint.load(str(folder), device=CPU).sha256 == want


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda t: t | {"lm_heads.weight": torch.ones(1)}, "lm_heads.weight"),
        (lambda t: {k: v for k, v in t.items() if k != "norm.weight"}, "norm.weight"),
        (lambda t: t | {"fc.weight": torch.ones(kit.HIDDEN, kit.HIDDEN)}, "fc.weight"),
        (lambda t: t | {"norm.weight": torch.ones(kit.HIDDEN, dtype=torch.int32)}, "norm.weight"),
    ],
    ids=["unknown", "missing", "other shape", "not floating"],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, change: Any, field: str
) -> None:
    folder = _saved(tmp_path)
    _rewrite(folder, change)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(str(folder), device=CPU)
    assert caught.value.field == field


def test_matrices_in_the_file_are_handed_out_and_another_width_needs_them(tmp_path: Path) -> None:
    folder = _saved(tmp_path, target_hidden_size=48)
    with pytest.raises(CheckpointError, match="target_hidden_size"):
        checkpoint.load(str(folder), device=CPU)
    own = torch.randn(kit.VOCAB, kit.HIDDEN)
    _rewrite(folder, lambda t: t | {"embed_tokens.weight": own, "lm_head.weight": own + 1})
    loaded = checkpoint.load(str(folder), device=CPU)
    assert loaded.embedding is not None
    assert loaded.head is not None
    assert torch.equal(loaded.embedding, own)
    assert loaded.model.fc.weight.shape == (kit.HIDDEN, 3 * 48)


def test_random_weights_follow_the_seed_and_say_that_nobody_trained_them(tmp_path: Path) -> None:
    target = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 6,
        "intermediate_size": 64,
        "vocab_size": 50,
    }
    shas = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        folder = checkpoint.write_random(tmp_path / name, target, seed=seed)
        loaded = checkpoint.load(str(folder), device=CPU)
        shas[name] = loaded.sha256
        assert not loaded.config.trained
        assert loaded.config.mask_token_id == 49
    assert shas["a"] == shas["b"] != shas["c"]
    redrawn = checkpoint.load(str(tmp_path / "c"), device=CPU, random_seed=1)
    assert redrawn.sha256 == shas["a"]
    assert not redrawn.config.trained


def test_a_folder_without_what_it_needs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        checkpoint.load(str(tmp_path), device=CPU)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        checkpoint.load(str(tmp_path), device=CPU)
    (tmp_path / "config.json").write_text(json.dumps(kit.raw_config()))
    with pytest.raises(CheckpointError, match="safetensors"):
        checkpoint.load(str(tmp_path), device=CPU)
    with pytest.raises(CheckpointError, match="existing folder"):
        checkpoint.load(str(tmp_path / "nowhere"), device=CPU)


ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**70, 10**400, 1.5, math.nan, math.inf, -math.inf),
    *("", "abc", "3", [], [1], [None], ["x"], {}, {"a": 1}, [math.nan]),
)
FIELDS = sorted({*PUBLISHED, "rms_norm_eps", "rope_theta", "rope_parameters", "num_target_layers"})
FIELDS += ["final_logit_softcapping", "output_multiplier", "logit_scale", "input_embedding_scale"]


def test_whatever_a_field_holds_it_is_read_or_refused_by_a_name() -> None:
    own = ("branches", "prior_temperature", "path_rank", "calibration", "trained")
    for odd in ODD:
        for name in FIELDS:
            with contextlib.suppress(CheckpointError):
                parse(published(**{name: odd}))
        for name in own:
            with contextlib.suppress(CheckpointError):
                parse(published(draftwire={name: odd}))


@pytest.mark.parametrize("odd", [0, -1, math.nan, math.inf, "1", True, None, [1.0]])
def test_a_prior_temperature_that_nothing_can_be_divided_by_is_refused(odd: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(published(draftwire={"prior_temperature": odd}))
    assert caught.value.field == "draftwire.prior_temperature"


@pytest.mark.parametrize("left", [0, 5, 100, -1])
def test_a_file_of_weights_that_is_cut_off_is_named(tmp_path: Path, left: int) -> None:
    folder = _saved(tmp_path / "c")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(str(folder), device=torch.device("cpu"))
    assert caught.value.field == "model.safetensors"


def test_a_description_that_is_no_json_is_named(tmp_path: Path) -> None:
    for text in ("[" * 100_000, "{", "[]", "\xff"):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(CheckpointError) as caught:
            checkpoint.read_config(tmp_path)
        assert caught.value.field == "config.json"

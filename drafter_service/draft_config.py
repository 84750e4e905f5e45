"""What a draft model looks like: a checkpoint's config.json, read once into one typed value.

Knows every published variant of the DFlash config and refuses by name what the model here cannot
run. Does not know tensors, files or devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from drafter_service.calibration import UNCALIBRATED, Calibration
from drafter_service.calibration import parse as parse_calibration
from drafter_service.config_fields import both, number, object_in, positive
from drafter_service.refusal import CheckpointError as CheckpointError

FULL = "full_attention"
SLIDING = "sliding_attention"
ROPE_TYPES = ("default", "linear", "yarn", "llama3")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: base and, for the scaled kinds, the fields of rope_scaling."""

    theta: float = 10000.0
    kind: str = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How the block of one layer sees keys: window in tokens (None: all), causal or both ways."""

    window: int | None
    causal: bool

    @property
    def sees_everything(self) -> bool:
        """Whether no mask is needed."""
        return self.window is None and not self.causal


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Shapes and rules of a draft model. Sizes are in elements, `block_size` counts the anchor;
    `path_rank` 0: no path-conditioned head.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: Rope
    layers: tuple[LayerAttention, ...]
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    target_hidden_size: int
    num_target_layers: int | None = None
    attention_bias: bool = False
    attention_sink: bool = False
    input_scale: float = 1.0
    output_scale: float = 1.0
    softcap: float | None = None
    branches: int = 1
    prior_temperature: float = 1.0
    path_rank: int = 0
    calibration: Calibration = UNCALIBRATED
    trained: bool = True
    tokenizer_sha256: str = ""
    vocabulary_sha256: str = ""

    @property
    def num_layers(self) -> int:
        """Number of draft layers."""
        return len(self.layers)

    @property
    def raw_feature_size(self) -> int:
        """Width of a row of unfused features."""
        return len(self.target_layer_ids) * self.target_hidden_size


def default_target_layers(count: int, num_target_layers: int) -> tuple[int, ...]:
    """The layers the method taps when the config names none: `count` ids spread over 1 ..
    num_target_layers - 3.
    """
    if count == 1:
        return (num_target_layers // 2,)
    start, end = 1, num_target_layers - 3
    return tuple(round(start + i * (end - start) / (count - 1)) for i in range(count))


def parse(raw: Mapping[str, Any]) -> DraftConfig:
    """Read the content of a config.json. Raises CheckpointError naming the field."""
    _refuse_unknown_kinds(raw)
    inner = object_in(raw, "dflash_config")
    hidden = positive(raw, "hidden_size")
    heads = positive(raw, "num_attention_heads")
    kv_heads = positive(raw, "num_key_value_heads", heads)
    head_dim = positive(raw, "head_dim", hidden // heads)
    if heads % kv_heads:
        raise CheckpointError(
            "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads = {heads}"
        )
    if head_dim % 2:
        raise CheckpointError("head_dim", head_dim, "even")
    num_layers = positive(raw, "num_hidden_layers")
    own = object_in(raw, "draftwire")
    softcap = both(raw, inner, "final_logit_softcapping", 0.0)
    scale = both(raw, inner, "output_multiplier", both(raw, inner, "logit_scale", 1.0))
    sink = both(raw, inner, "attention_sink_bias", raw.get("add_swa_attention_sink_bias", False))
    return DraftConfig(
        hidden_size=hidden,
        intermediate_size=positive(raw, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=positive(raw, "vocab_size"),
        rms_norm_eps=number("rms_norm_eps", raw.get("rms_norm_eps", 1e-6), at_least=0.0),
        max_position_embeddings=positive(raw, "max_position_embeddings", 32768),
        rope=_rope(raw),
        layers=_layers(raw, inner, num_layers),
        block_size=_block_size(raw, inner),
        mask_token_id=_mask_token(raw, inner),
        target_layer_ids=_target_layers(raw, inner, num_layers),
        target_hidden_size=positive(raw, "target_hidden_size", hidden),
        num_target_layers=None
        if raw.get("num_target_layers") is None
        else positive(raw, "num_target_layers"),
        attention_bias=bool(raw.get("attention_bias", False)),
        attention_sink=bool(sink),
        input_scale=number("input_embedding_scale", both(raw, inner, "input_embedding_scale", 1.0)),
        output_scale=number("output_multiplier", scale),
        softcap=number("final_logit_softcapping", softcap, at_least=0.0) or None,
        branches=positive(own, "branches", 1),
        prior_temperature=number(
            "draftwire.prior_temperature", own.get("prior_temperature", 1.0), at_least=0.01
        ),
        path_rank=positive(own, "path_rank") if own.get("path_rank") else 0,
        calibration=parse_calibration(own.get("calibration")),
        trained=bool(own.get("trained", True)),
        tokenizer_sha256=str(own.get("tokenizer_sha256", "")),
        vocabulary_sha256=str(own.get("vocabulary_sha256", "")),
    )


def _refuse_unknown_kinds(raw: Mapping[str, Any]) -> None:
    """What would load and then draft nonsense is refused here."""
    names = raw.get("architectures") or ["DFlashDraftModel"]
    if not isinstance(names, list):
        raise CheckpointError("architectures", names, "a list of names")
    # Third-party files of other names are DFlash too if they say what to read and what to mask.
    has_fields = "dflash_config" in raw or {"mask_token_id", "target_layer_ids"} <= raw.keys()
    if names != ["DFlashDraftModel"] and not has_fields:
        raise CheckpointError("architectures", names, "DFlashDraftModel")
    if "DFlash2DraftModel" in names:
        raise CheckpointError(
            "architectures", names, "DFlashDraftModel (DFlash 2's convolutions are not known here)"
        )
    inner = object_in(raw, "dflash_config")
    checks: tuple[tuple[str, Any, Any], ...] = (
        ("hidden_act", raw.get("hidden_act", "silu"), "silu"),
        ("is_neox_style", raw.get("is_neox_style", True), True),
        ("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0), 1.0),
        (
            "draft_vocab_size",
            raw.get("draft_vocab_size") or raw.get("vocab_size"),
            raw.get("vocab_size"),
        ),
        ("quantization_config", raw.get("quantization_config"), None),
        ("dflash_config.fc_layernorm", inner.get("fc_layernorm", False), False),
        ("dflash_config.use_aux_hidden_state", inner.get("use_aux_hidden_state", True), True),
        ("dflash_config.conv_kernel_size", inner.get("conv_kernel_size"), None),
        ("dflash_config.selector_rank", inner.get("selector_rank"), None),
    )
    for name, value, allowed in checks:
        if value != allowed:
            raise CheckpointError(name, value, "absent" if allowed is None else str(allowed))


def _block_size(raw: Mapping[str, Any], inner: Mapping[str, Any]) -> int:
    value = both(raw, inner, "block_size", 16)
    if isinstance(value, bool) or not isinstance(value, int) or not 2 <= value <= 1024:
        raise CheckpointError("block_size", value, "an integer in [2, 1024]")
    return value


def _mask_token(raw: Mapping[str, Any], inner: Mapping[str, Any]) -> int:
    value = both(raw, inner, "mask_token_id")
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CheckpointError("dflash_config.mask_token_id", value, "a token id")
    return value


def _target_layers(
    raw: Mapping[str, Any], inner: Mapping[str, Any], num_layers: int
) -> tuple[int, ...]:
    ids = both(raw, inner, "target_layer_ids")
    total = None
    if raw.get("num_target_layers") is not None:
        total = positive(raw, "num_target_layers")
    if ids is None:
        if total is None:
            raise CheckpointError(
                "dflash_config.target_layer_ids", None, "given, or num_target_layers with it"
            )
        count = num_layers if num_layers > 1 else 1
        ids = default_target_layers(count, total)
    if not isinstance(ids, list | tuple) or not ids:
        raise CheckpointError("dflash_config.target_layer_ids", ids, "a list of layer numbers")
    for layer in ids:
        if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
            raise CheckpointError(
                "dflash_config.target_layer_ids", ids, "a list of layer numbers from 0 on"
            )
        if total is not None and layer >= total:
            raise CheckpointError(
                "dflash_config.target_layer_ids", layer, f"less than num_target_layers = {total}"
            )
    if len(set(ids)) != len(ids):
        raise CheckpointError("dflash_config.target_layer_ids", ids, "without repeats")
    return tuple(ids)


def _layers(
    raw: Mapping[str, Any], inner: Mapping[str, Any], num_layers: int
) -> tuple[LayerAttention, ...]:
    types = raw.get("layer_types")
    use_swa = bool(both(raw, inner, "use_swa", False))
    if types is None:
        types = [FULL] * num_layers
    if not isinstance(types, list):
        raise CheckpointError("layer_types", types, "a list, one a layer")
    if len(types) != num_layers:
        raise CheckpointError(
            "layer_types", f"{len(types)} long", f"num_hidden_layers = {num_layers} long"
        )
    for kind in types:
        if kind not in (FULL, SLIDING):
            raise CheckpointError("layer_types", kind, f"{FULL} or {SLIDING}")
    override = raw.get("is_causal")
    if override is None:
        override = both(raw, inner, "causal")
    every_layer_slides = use_swa and SLIDING not in types
    window = (
        inner.get("swa_window_size") or inner.get("sliding_window") or raw.get("sliding_window")
    )
    result = []
    for kind in types:
        slides = every_layer_slides or kind == SLIDING
        if slides and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
            raise CheckpointError("sliding_window", window, "given for sliding layers, at least 1")
        causal = (kind == SLIDING) if override is None else bool(override)
        result.append(LayerAttention(window=window if slides else None, causal=causal))
    return tuple(result)


def _rope(raw: Mapping[str, Any]) -> Rope:
    params: dict[str, Any] = {
        **object_in(raw, "rope_scaling"),
        **object_in(raw, "rope_parameters"),
    }
    if any(isinstance(value, Mapping) for value in params.values()):
        raise CheckpointError("rope_parameters", sorted(params), "one set for all layers")
    kind = str(params.pop("rope_type", None) or params.pop("type", None) or "default")
    params.pop("type", None)
    theta = params.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0
    theta = number("rope_theta", theta)
    if kind not in ROPE_TYPES:
        raise CheckpointError("rope_scaling.rope_type", kind, f"one of {', '.join(ROPE_TYPES)}")
    if kind != "default" and not isinstance(params.get("factor"), int | float):
        raise CheckpointError("rope_scaling.factor", params.get("factor"), "a number")
    if params.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError("partial_rotary_factor", params["partial_rotary_factor"], "1.0")
    if kind in ("yarn", "llama3"):
        params.setdefault(
            "original_max_position_embeddings", raw.get("max_position_embeddings", 32768)
        )
    if theta <= 1:
        raise CheckpointError("rope_theta", theta, "greater than 1")
    return Rope(theta=theta, kind=kind, scaling=params)

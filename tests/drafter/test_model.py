"""The draft model against DFlash written out naively, and against itself under every way of
batching.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drafter import kit

from drafter_service import attention
from drafter_service.draft_config import LayerAttention, Rope
from drafter_service.model import Block, LogitBias
from drafter_service.rope import inverse_frequencies

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
VARIANTS: dict[str, dict[str, Any]] = {
    "published layout": {},
    "sliding layers are causal inside the block": SLIDING,
    "is_causal overrides sliding layers": {**SLIDING, "is_causal": False},
    "causal everywhere": {"is_causal": True},
    "biases": {"attention_bias": True},
    "attention sinks": {"add_swa_attention_sink_bias": True, **SLIDING},
    "one key head for all": {"num_key_value_heads": 1},
    "scaled and capped logits": {"output_multiplier": 0.7, "final_logit_softcapping": 3.0},
    "scaled embeddings": {"input_embedding_scale": 2.5},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize(("length", "size"), [(0, 2), (1, 6), (13, 6), (40, 3)])
def test_logits_equal_those_of_the_naive_model(
    changes: dict[str, Any], length: int, size: int
) -> None:
    model = kit.lively_model(kit.raw_config(**changes))
    rows = kit.features(length)
    got = kit.draft_logits(model, rows, anchor=7, size=size)
    want = kit.naive_logits(model, rows, anchor=7, size=size)
    torch.testing.assert_close(got.double(), want, atol=2e-4, rtol=2e-4)


def test_fused_features_are_the_norm_of_the_projection_of_the_layers_side_by_side() -> None:
    model = kit.lively_model(kit.raw_config())
    raw = kit.features(5, width=3 * kit.HIDDEN)
    projected = raw @ model.fc.weight.T
    spread = torch.sqrt((projected**2).mean(-1, keepdim=True) + model.config.rms_norm_eps)
    want = projected / spread * model.hidden_norm.weight
    torch.testing.assert_close(model.fuse(raw), want)


@pytest.mark.parametrize("changes", [{}, SLIDING], ids=["full", "sliding"])
def test_features_added_in_pieces_draft_as_features_added_at_once(changes: dict[str, Any]) -> None:
    model = kit.lively_model(kit.raw_config(**changes))
    rows, pool = kit.features(30), None
    want = kit.draft_logits(model, rows, anchor=4, size=5)
    pool = kit.pool_for(model)
    context = kit.open_context(model, pool, rows, pieces=[1, 7, 3])
    got = model.logits(model.draft(pool, [Block(4, context, 5)]))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_drafting_leaves_the_context_as_it_was() -> None:
    model = kit.lively_model(kit.raw_config())
    pool = kit.pool_for(model)
    context = kit.open_context(model, pool, kit.features(20))
    first = model.draft(pool, [Block(4, context, 6)])
    model.draft(pool, [Block(9, context, 6)])
    again = model.draft(pool, [Block(4, context, 6)])
    assert context.length == 20
    torch.testing.assert_close(again, first, atol=0, rtol=0)


def test_a_cropped_context_drafts_as_one_that_never_grew_longer() -> None:
    model = kit.lively_model(kit.raw_config())
    rows = kit.features(25)
    pool = kit.pool_for(model)
    context = kit.open_context(model, pool, rows)
    pool.crop(context, 11)
    model.extend(pool, [(context, rows[11:18])])
    got = model.logits(model.draft(pool, [Block(2, context, 6)]))
    want = kit.draft_logits(model, rows[:18], anchor=2, size=6)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("changes", [{}, SLIDING], ids=["full", "sliding"])
def test_a_batch_of_sessions_drafts_as_each_alone(changes: dict[str, Any]) -> None:
    model = kit.lively_model(kit.raw_config(**changes))
    pool = kit.pool_for(model)
    lengths, sizes = [3, 40, 0, 17, 29], [6, 2, 5, 6, 3]
    rows = [kit.features(length, seed=i) for i, length in enumerate(lengths)]
    contexts = [pool.open(length + 16) for length in lengths]
    model.extend(pool, list(zip(contexts, rows, strict=True)))
    blocks = [Block(i + 1, contexts[i], sizes[i]) for i in range(len(lengths))]
    together = model.logits(model.draft(pool, blocks)).split(sizes)
    for i, got in enumerate(together):
        want = kit.draft_logits(model, rows[i], anchor=i + 1, size=sizes[i])
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "rule",
    [
        LayerAttention(None, False),
        LayerAttention(None, True),
        LayerAttention(4, True),
        LayerAttention(4, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("with_sink", [False, True])
def test_padded_attention_equals_attention_by_views(rule: LayerAttention, with_sink: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(2, 100, 8, generator=generator) for _ in range(2))
    spans = [
        attention.Span(first=0, size=3, start=10, context=20),
        attention.Span(first=3, size=5, start=60, context=2),
        attention.Span(first=8, size=1, start=0, context=0),
    ]
    q = torch.randn(9, 6, 8, generator=generator)
    sink = torch.randn(6, generator=generator) if with_sink else None
    want = attention.by_views(q, keys, values, spans, rule, sink)
    plan = attention.PaddedPlan(spans, q.device)
    got = attention.padded(q, keys, values, plan, rule, sink)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_slots_know_their_own_position() -> None:
    """Slot j predicts position base + j, so the same masks at other positions give other logits."""
    model = kit.lively_model(kit.raw_config())
    logits = kit.draft_logits(model, kit.features(9), anchor=5, size=6)
    assert not torch.allclose(logits[1], logits[2], atol=1e-3)


def test_candidates_are_the_top_of_the_logits_and_leave_out_padding() -> None:
    model = kit.lively_model(kit.raw_config())
    model.limit_vocabulary(50)
    hidden = kit.features(7, seed=5)
    logits = model.logits(hidden)
    assert logits.shape == (7, 50)
    found = model.candidates(hidden, 8)
    assert found.logits.shape == (7, 1, 8)
    torch.testing.assert_close(found.logits[:, 0], logits.sort(descending=True).values[:, :8])
    torch.testing.assert_close(logits.gather(1, found.ids), found.logits[:, 0])


def test_candidates_of_branches_are_those_that_some_likely_branch_wants() -> None:
    model = kit.lively_model(kit.raw_config())
    hidden = kit.features(6, seed=5)  # 3 slots of 2 branches
    logits = model.logits(hidden).view(3, 2, -1)
    prior = torch.log_softmax(torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 0.0]]), dim=1)
    found = model.candidates(hidden, 8, prior)
    pooled = (logits + prior[:, :, None]).amax(dim=1)
    assert torch.equal(found.ids, pooled.topk(8, dim=1).indices)
    for branch in range(2):
        want = logits[:, branch].gather(1, found.ids)
        torch.testing.assert_close(found.logits[:, branch], want)
    alone = torch.tensor([[0.0, -torch.inf]]).expand(3, 2)
    first = model.candidates(hidden, 8, alone)
    assert torch.equal(first.ids, model.candidates(hidden[::2], 8).ids)


def test_logit_bias_moves_its_own_rows_only() -> None:
    model = kit.lively_model(kit.raw_config())
    hidden = kit.features(4, seed=5)
    bias = LogitBias(1, 3, torch.tensor([11]), torch.tensor([100.0]))
    plain, biased = model.candidates(hidden, 3), model.candidates(hidden, 3, biases=[bias])
    assert biased.ids[1, 0] == biased.ids[2, 0] == 11
    assert torch.equal(plain.ids[[0, 3]], biased.ids[[0, 3]])


def test_candidates_of_many_rows_are_those_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    model = kit.lively_model(kit.raw_config())
    hidden = kit.features(11, seed=5)
    bias = LogitBias(3, 9, torch.tensor([2]), torch.tensor([4.0]))
    whole = model.candidates(hidden, 5, biases=[bias])
    monkeypatch.setattr("drafter_service.model.HEAD_ROWS", 4)
    parts = model.candidates(hidden, 5, biases=[bias])
    assert torch.equal(whole.ids, parts.ids)
    torch.testing.assert_close(whole.logits, parts.logits)


def test_branches_are_offsets_on_the_slot_and_the_prior_reads_the_anchor() -> None:
    model = kit.lively_model(kit.raw_config(draftwire={"branches": 3, "prior_temperature": 2.0}))
    hidden = kit.features(4, seed=8)
    expanded = model.expand(hidden).view(4, 3, kit.HIDDEN)
    weight = model.branch_expander.weight.view(3, kit.HIDDEN, kit.HIDDEN)
    for z in range(3):
        torch.testing.assert_close(expanded[:, z], hidden + hidden @ weight[z].T)
    prior = model.log_prior(hidden)
    want = torch.log_softmax(hidden @ model.branch_prior.weight.T / 2.0, -1)
    torch.testing.assert_close(prior, want)


def test_a_mask_embedding_of_its_own_takes_the_place_of_the_targets_row() -> None:
    raw = kit.raw_config()
    model = kit.lively_model(raw)
    embedding, head = kit.target_matrices(model.config)
    own = torch.randn(kit.HIDDEN, generator=torch.Generator().manual_seed(4))
    model.attach_target(embedding, head, vocab_size=kit.VOCAB, mask_embedding=own)
    got = kit.draft_logits(model, kit.features(6), anchor=1, size=4)
    changed = embedding.clone()
    changed[kit.MASK] = own
    want = kit.naive_logits(model, kit.features(6), 1, 4, (changed, head))
    torch.testing.assert_close(got.double(), want, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_weights_laid_out_anew_draft_the_same(changes: dict[str, Any]) -> None:
    model = kit.lively_model(kit.raw_config(**changes))
    rows = kit.features(9)
    want = kit.draft_logits(model, rows, anchor=7, size=6)
    model.lay_out()
    torch.testing.assert_close(
        kit.draft_logits(model, rows, anchor=7, size=6), want, atol=1e-4, rtol=1e-4
    )
    assert set(model.state_dict()) == set(kit.lively_model(kit.raw_config(**changes)).state_dict())


def test_a_head_that_is_laid_out_follows_the_vocabulary_and_the_next_target() -> None:
    model = kit.lively_model(kit.raw_config())
    model.lay_out()
    model.lay_out()
    hidden = kit.features(7, seed=5)
    model.limit_vocabulary(50)
    embedding, head = kit.target_matrices(model.config)
    want = model.shaped(hidden @ (embedding if head is None else head)[:50].T)
    torch.testing.assert_close(model.logits(hidden), want, atol=1e-4, rtol=1e-4)
    model.attach_target(2 * embedding, None, vocab_size=kit.VOCAB)
    want = model.shaped(2 * hidden @ embedding[: kit.VOCAB].T)
    torch.testing.assert_close(model.logits(hidden), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        {
            "rope_type": "yarn",
            "factor": 2.0,
            "beta_fast": 16,
            "beta_slow": 2,
            "mscale": 1.2,
            "mscale_all_dim": 0.8,
            "original_max_position_embeddings": 512,
            "truncate": False,
        },
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    ],
    ids=["default", "linear", "yarn", "yarn with all fields", "llama3"],
)
def test_rope_frequencies_are_those_of_transformers(scaling: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theta, head_dim = 50000.0, 64
    config = transformers.Qwen3Config(
        hidden_size=128,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=4096,
        rope_parameters={**scaling, "rope_theta": theta},
    )
    kind = scaling["rope_type"]
    got, factor = inverse_frequencies(
        Rope(theta, kind, {k: v for k, v in scaling.items() if k != "rope_type"}), head_dim
    )
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2).float() / head_dim
        want, want_factor = 1.0 / theta**exponents, 1.0
    else:
        want, want_factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    torch.testing.assert_close(got, want)
    assert factor == pytest.approx(want_factor)

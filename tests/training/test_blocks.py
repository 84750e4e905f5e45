"""Blocks as they are trained against blocks as they are served, one at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drafter import kit as drafter_kit

from drafter_service.draft_config import LayerAttention, parse
from drafter_service.model import Block, DraftModel
from drafter_service.random_weights import random_model
from drafter_service.training import flex
from drafter_service.training.blocks import (
    NO_LABEL,
    collate,
    draw_anchors,
    even_anchors,
    slot_tokens,
    visible,
)
from drafter_service.training.features import Trajectory
from drafter_service.training.network import BlockNetwork
from drafter_service.training.store import Response

FULL = LayerAttention(None, False)
WIDTH = 3 * drafter_kit.HIDDEN
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding and causal": SLIDING,
    "sinks": {"add_swa_attention_sink_bias": True, **SLIDING},
    "scaled embeddings": {"input_embedding_scale": 2.5},
}


def trajectory(length: int, prompt: int, seed: int = 0) -> Trajectory:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, drafter_kit.VOCAB - 1, (length,), generator=generator)
    said = tuple(float(-i) for i in range(length - prompt))
    response = Response(
        f"k{seed}", "made", tuple(tokens[:prompt].tolist()), tuple(tokens[prompt:].tolist()),
        said, 1.0, 0, 1.0, seed, False,
    )  # fmt: skip
    return Trajectory(
        response,
        tokens,
        torch.randn(length, WIDTH, generator=generator),
        torch.arange(length)[:, None].expand(-1, 4).int(),
        torch.full((length, 4), -1.0, dtype=torch.float16),
    )


def served(model: DraftModel, one: Trajectory, anchor: int, size: int) -> torch.Tensor:
    """Hidden states of one block, drafted the way the service does."""
    pool = drafter_kit.pool_for(model)
    context = pool.open(anchor + size)
    assert context is not None
    model.extend(pool, [(context, model.fuse(one.features[:anchor]))])
    return model.draft(pool, [Block(int(one.tokens[anchor]), context, size)])


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_batch_of_blocks_gives_each_block_what_it_gets_alone(changes: dict[str, Any]) -> None:
    model = drafter_kit.lively_model(drafter_kit.raw_config(**changes))
    embedding, _ = drafter_kit.target_matrices(model.config)
    network = BlockNetwork(model, embedding)
    documents = [trajectory(20, 4, 1), trajectory(33, 6, 2), trajectory(9, 3, 3)]
    anchors = [[1, 5, 6, 18], [7, 8, 30, 31], [3]]
    hidden = network(collate(documents, anchors, 5)).view(3, 4, 5, -1)
    for row, (one, found) in enumerate(zip(documents, anchors, strict=True)):
        for column, anchor in enumerate(found):
            want = served(model, one, anchor, 5)
            torch.testing.assert_close(hidden[row, column], want, atol=2e-4, rtol=2e-4)
    assert torch.isfinite(hidden).all()


def test_a_block_sees_context_before_its_anchor_and_itself_only() -> None:
    batch = collate([trajectory(12, 3, 1), trajectory(8, 2, 2)], [[4, 9], [5]], 3)
    mask = visible(batch, FULL)
    assert mask.shape == (2, 6, 12 + 6)
    first = mask[0, :3]
    assert first[:, :4].all()
    assert not first[:, 4:12].any()
    assert first[:, 12:15].all()
    assert not first[:, 15:].any()
    second = mask[0, 3:]
    assert second[:, :9].all()
    assert not second[:, 9:12].any()
    assert second[:, 15:].all()
    assert not second[:, 12:15].any()
    shorter = mask[1, :3]
    assert shorter[:, :5].all()
    assert not shorter[:, 5:12].any()


@pytest.mark.parametrize(
    "rule", [FULL, LayerAttention(None, True), LayerAttention(5, False), LayerAttention(3, True)]
)
def test_the_flex_mask_is_the_dense_mask(rule: LayerAttention) -> None:
    batch = collate([trajectory(12, 3, 1), trajectory(8, 2, 2)], [[4, 9], [5]], 3)
    rows, keys = 6, 12 + 6
    b, q, k = torch.meshgrid(torch.arange(2), torch.arange(rows), torch.arange(keys), indexing="ij")
    seen = flex.mask_mod(batch, rule)(b, torch.zeros_like(b), q, k)
    wanted = visible(batch, rule)
    assert torch.equal(
        seen[batch.anchors.repeat_interleave(3, 1) >= 0],
        wanted[batch.anchors.repeat_interleave(3, 1) >= 0],
    )
    assert seen.any(dim=-1).all()


def test_flex_attention_gives_what_the_dense_mask_gives() -> None:
    # Head sizes under 16 are refused by FlexAttention; the tiny drafters have 16.
    model = drafter_kit.lively_model(drafter_kit.raw_config())
    embedding, _ = drafter_kit.target_matrices(model.config)
    batch = collate([trajectory(12, 3, 1), trajectory(8, 2, 2)], [[4, 9], [3, 5]], 3)
    with torch.no_grad():
        dense = BlockNetwork(model, embedding)(batch)
        flexible = BlockNetwork(model, embedding, use_flex=True)(batch)
    torch.testing.assert_close(flexible, dense, atol=2e-4, rtol=2e-4)


def test_a_block_without_anchor_sees_itself_alone_and_has_no_labels() -> None:
    batch = collate([trajectory(12, 3, 1), trajectory(8, 2, 2)], [[4, 9], [5]], 3)
    empty = visible(batch, FULL)[1, 3:]
    assert not empty[:, :15].any()
    assert empty[:, 15:].all()
    assert (batch.labels[1, 1] == NO_LABEL).all()


def test_labels_stand_at_the_slots_own_positions_and_end_with_the_document() -> None:
    one = trajectory(10, 3)
    batch = collate([one], [[4, 8]], 4)
    assert batch.labels[0, 0].tolist() == one.tokens[5:8].tolist()
    assert batch.labels[0, 1].tolist() == [int(one.tokens[9]), NO_LABEL, NO_LABEL]
    # What the target said of position p + 1 is kept in row p.
    assert batch.top_ids[0, 0, :, 0].tolist() == [4, 5, 6]
    assert batch.label_logprobs[0, 0].tolist() == [-2.0, -3.0, -4.0]
    assert slot_tokens(batch, 96)[0, 0].tolist() == [int(one.tokens[4]), 96, 96, 96]


def test_anchors_are_redrawn_each_epoch_and_are_the_same_in_the_same_epoch() -> None:
    one = trajectory(60, 10)
    draws = [
        draw_anchors(one, 8, seed=1, epoch=epoch, index=3, prompts=False) for epoch in (0, 1, 0)
    ]
    assert draws[0] == draws[2] != draws[1]
    for found in draws:
        assert found == sorted(set(found))
        assert len(found) == 8
        assert min(found) >= 10
        assert max(found) <= 58
    assert draw_anchors(one, 500, seed=1, epoch=0, index=3, prompts=False) == list(range(10, 59))
    everywhere = draw_anchors(one, 500, seed=1, epoch=0, index=3, prompts=True)
    assert everywhere == list(range(1, 59))


def test_validation_anchors_are_spread_over_the_answer_and_always_the_same() -> None:
    one = trajectory(60, 10)
    found = even_anchors(one, 7)
    assert found == even_anchors(one, 7)
    assert len(found) == len(set(found)) == 7
    assert found[0] == 10
    assert found[-1] > 45


def test_gradients_reach_every_weight_of_the_model() -> None:
    raw = drafter_kit.raw_config()
    model = random_model(parse(raw), 0).requires_grad_(True)
    embedding, _ = drafter_kit.target_matrices(model.config)
    hidden = BlockNetwork(model, embedding)(collate([trajectory(20, 4)], [[5, 9]], 5))
    (hidden * torch.randn(hidden.shape)).sum().backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.abs().sum() > 0, name

"""The invariant arithmetic: a row's bits depend on its own past alone."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import tiny_target

from draftwire.models import resolve
from verifier_service.cache import PagedStore, PagePool
from verifier_service.model import TargetHost, load_model
from verifier_service.packing import BLOCK, Feed

LENGTH = 3 * BLOCK


class Target:
    """A hosted model with pages and the bits that plain decoding gives."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.host = TargetHost(load_model(resolve(str(folder)), dtype, "cpu"))
        self.pool = PagePool(512, 16)
        self.store = PagedStore(self.pool, self.host.cache_shape, dtype, torch.device("cpu"))
        self.store.add_feature_layer(2)
        self.host.capture(2)
        self.ids = torch.randint(
            3, 250, (LENGTH,), generator=torch.Generator().manual_seed(1)
        ).tolist()
        slots = self.slots(LENGTH)
        self.plain = [
            self._logits(Feed([t], i, slots, None, (0,)))[0] for i, t in enumerate(self.ids)
        ]
        self.keys = self.store.keys[:, slots].clone()
        self.features = self.store.features[2][slots].clone()

    def slots(self, positions: int) -> np.ndarray:
        pages = self.pool.allocate(self.pool.pages_for(positions))
        return np.concatenate([np.arange(p * 16, p * 16 + 16) for p in pages])[:positions]

    def _logits(self, *feeds: Feed) -> torch.Tensor:
        return self.host.step(feeds, self.store).logits


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tiny_target(tmp_path_factory.mktemp("target"))
    return Target(folder, getattr(torch, request.param))


def test_a_prompt_in_any_pieces_beside_any_neighbour_gives_the_bits_of_plain_decoding(
    target: Target,
) -> None:
    slots, other = target.slots(LENGTH), target.slots(32)
    at = 0
    for size in (7, 64, 1, 30, 90):
        piece = Feed(target.ids[at : at + size], at, slots, None, (size - 1,))
        neighbour = Feed(target.ids[50 : 50 + size % 9 + 1], 0, other, None, (0,))
        output = target.host.step([neighbour, piece], target.store)
        at += size
        assert torch.equal(output.of(1, 1)[0], target.plain[at - 1])
    assert torch.equal(target.store.keys[:, slots], target.keys)
    assert torch.equal(target.store.features[2][slots], target.features)


@pytest.mark.parametrize("base", [1, 5, BLOCK - 3, BLOCK - 1, BLOCK, 2 * BLOCK - 2])
def test_a_path_inside_any_tree_gives_the_bits_of_plain_decoding(target: Target, base: int) -> None:
    rng = random.Random(base)
    slots, other = target.slots(LENGTH + 64), target.slots(64)
    target.host.step([Feed(target.ids[:base], 0, slots, None, (0,))], target.store)
    for nodes in (1, 3, 16, 40, 63):
        tokens, parents, true = [target.ids[base]], [-1], [0]
        while len(tokens) <= nodes:
            if rng.random() < 0.3 and len(true) < 12:
                tokens.append(target.ids[base + len(true)])
                parents.append(true[-1])
                true.append(len(tokens) - 1)
            else:
                tokens.append(rng.randrange(250))
                parents.append(rng.randrange(len(parents)))
        tree = Feed(tokens, base, slots, parents, tuple(range(len(tokens))))
        beside = Feed(target.ids[:3], 0, other, None, (2,))
        logits = target.host.step([tree, beside], target.store).of(0, len(tokens))
        for depth, row in enumerate(true):
            assert torch.equal(logits[row], target.plain[base + depth])
            assert torch.equal(
                target.store.keys[:, slots[base + row]], target.keys[:, base + depth]
            )


def test_rows_with_keys_of_their_own_give_the_same_bits_as_shared_ones(target: Target) -> None:
    """The way out for processors on which the two kinds of sums are not shown to agree."""
    from dataclasses import replace

    slots = target.slots(LENGTH)
    shared = target.host.plan
    target.host.plan = replace(shared, share_attention=False)
    try:
        output = target.host.step([Feed(target.ids, 0, slots, None, (LENGTH - 1,))], target.store)
    finally:
        target.host.plan = shared
    assert torch.equal(output.logits[0], target.plain[-1])


def test_the_fast_arithmetic_agrees_within_rounding(target: Target) -> None:
    slots = target.slots(LENGTH)
    target.host.invariant = False
    try:
        output = target.host.step([Feed(target.ids, 0, slots, None, (LENGTH - 1,))], target.store)
    finally:
        target.host.invariant = True
    tolerance = 1e-3 if target.host.dtype is torch.float32 else 0.5
    assert torch.allclose(output.logits[0].float(), target.plain[-1].float(), atol=tolerance)


def test_products_cut_into_pieces_give_rows_that_do_not_depend_on_their_number() -> None:
    from verifier_service.numerics import cut_products

    model = torch.nn.Sequential(torch.nn.Linear(48, 96), torch.nn.Linear(96, 7, bias=False))
    rows = torch.randn(53, 48)
    with torch.inference_mode():
        before = model(rows)
        cut_products(model, 16, pad=True)
        whole = model(rows)
        assert all(
            torch.equal(model(rows[i : i + n])[0], whole[i]) for i in range(53) for n in (1, 2, 9)
        )
        assert whole.shape == (53, 7)
        assert torch.allclose(whole, before, atol=1e-5)


def test_no_product_sees_more_rows_than_were_certified(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many sessions make steps past the largest count tried; their products are cut to it."""
    from verifier_service import numerics

    honest, seen = numerics.F.linear, []

    def spy(rows: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        seen.append(rows.numel() // rows.shape[-1])
        return honest(rows, *rest)

    slots = [target.slots(150) for _ in range(4)]
    monkeypatch.setattr(numerics.F, "linear", spy)
    feeds = [Feed(target.ids[:150], 0, s, None, (149,)) for s in slots]
    output = target.host.step(feeds, target.store)
    assert len(output.packed.token_ids) > 256
    assert set(seen) <= set(target.host.plan.buckets)
    for index, where in enumerate(slots):
        assert torch.equal(output.of(index, 1)[0], target.plain[149])
        assert torch.equal(target.store.keys[:, where], target.keys[:, :150])


def test_a_prompt_piece_is_never_longer_than_what_attention_was_certified_for(
    tmp_path: Path,
) -> None:
    from verifier_service.config import VerifierConfig
    from verifier_service.service import VerifierService

    model = str(tiny_target(tmp_path / "target"))
    service = VerifierService(VerifierConfig(model=model, kv_tokens=1024, prefill_rows=4096))
    service._load()
    assert service.engine is not None
    plan = service.engine.host.plan
    assert service.engine.scheduler.budgets.prefill_rows == plan.attention_rows[-1]


def test_a_model_whose_attention_was_changed_is_not_stepped_with_it(tmp_path: Path) -> None:
    host = TargetHost(load_model(resolve(str(tiny_target(tmp_path))), torch.float32, "cpu"))
    pool = PagePool(8, 16)
    store = PagedStore(pool, host.cache_shape, torch.float32, torch.device("cpu"))
    feed = Feed([5], 0, np.arange(16, 32), None, (0,))
    host.step([feed], store)
    host.model.set_attn_implementation("sdpa")  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="attention is sdpa"):
        host.step([feed], store)

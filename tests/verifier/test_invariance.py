"""The invariant arithmetic: a row's bits depend on its own past alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import tiny_target

from draftwire.models import resolve
from draftwire_kernels import products
from verifier_service import numerics
from verifier_service.cache import PagedStore, PagePool
from verifier_service.model import TargetHost, load_model, weights_digest
from verifier_service.packing import BLOCK, Feed, Tail, pack

LENGTH = 3 * BLOCK


class Target:
    """A hosted model with pages and the bits that plain decoding gives."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.folder = folder
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
    seen = []

    def watched(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def product_seen(rows: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            seen.append(rows.numel() // rows.shape[-1])
            return product(rows, *rest)

        return product_seen

    onednn = products.onednn
    monkeypatch.setattr(numerics.F, "linear", watched(numerics.F.linear))
    monkeypatch.setattr(products, "onednn", lambda *weights: watched(onednn(*weights)))
    other = Target(target.folder, target.host.dtype)
    assert torch.equal(other.plain[149], target.plain[149])
    slots = [other.slots(150) for _ in range(4)]
    seen.clear()
    feeds = [Feed(other.ids[:150], 0, s, None, (149,)) for s in slots]
    output = other.host.step(feeds, other.store)
    assert len(output.packed.token_ids) > 256
    assert seen
    assert set(seen) <= set(other.host.plan.buckets)
    for index, where in enumerate(slots):
        assert torch.equal(output.of(index, 1)[0], target.plain[149])
        assert torch.equal(other.store.keys[:, where], target.keys[:, :150])


@pytest.mark.parametrize("most_tail", [0, 64, 192])
def test_a_tree_whose_rows_share_its_tail_gives_the_bits_of_rows_with_tails_of_their_own(
    target: Target, most_tail: int
) -> None:
    """Two sessions in one group; tails within a block, across two blocks, and too long."""
    rng = random.Random(most_tail)
    plan = target.host.plan
    if most_tail > plan.most_tail:
        pytest.skip("this processor's products take zeros for something")
    rows = []
    for base in (BLOCK - 2, BLOCK + 5, BLOCK + 9, 2 * BLOCK - 1):
        slots = target.slots(base + 80)
        target.host.step([Feed(target.ids[:base], 0, slots, None, (0,))], target.store)
        parents = [-1, *(rng.randrange(max(0, i - 5), i) for i in range(1, 80))]
        tokens = [rng.randrange(250) for _ in parents]
        rows.append((tokens, base, slots, parents))
    feeds = [
        Feed(tokens[:n], base, slots, parents[:n], tuple(range(n)))
        for n, (tokens, base, slots, parents) in zip((30, 12, 15, 80), rows, strict=True)
    ]
    logits = []
    try:
        for most in (0, most_tail):
            target.host.plan = replace(plan, most_tail=most)
            output = target.host.step(feeds, target.store)
            logits.append(output.logits.clone())
            kinds = {type(group.tail) for group in output.packed.groups}
            assert (Tail in kinds) == (most > 0)
            tails = [g.tail for g in output.packed.groups if isinstance(g.tail, Tail)]
            assert all(tail.slots.shape[1] <= most for tail in tails)
    finally:
        target.host.plan = plan
    assert torch.equal(logits[0], logits[1])


def test_a_shared_tail_names_each_position_of_a_path_once_and_hides_the_rest() -> None:
    parents = [-1, 0, 0, 2, 3, 1, 4, 6]
    feed = Feed([5] * 8, 2 * BLOCK - 3, np.arange(2 * BLOCK + 5), parents, ())
    packed = pack([feed], (8,), (8,), torch.device("cpu"), most_tail=2 * BLOCK)
    tail = packed.groups[0].tail
    assert isinstance(tail, Tail)
    depths = feed.depths()
    for row in range(8):
        path = sorted({row, *_above(parents, row)})
        physical = [*range(BLOCK - 3), *(BLOCK - 3 + node for node in path)]
        assert (~tail.hidden[0, row]).nonzero().flatten().tolist() == physical
        assert tail.order[0, row, ~tail.beyond[0, row]].tolist() == physical
        logical = [*range(BLOCK - 3), *(BLOCK - 3 + depths[node] for node in path)]
        assert (~tail.beyond[0, row]).nonzero().flatten().tolist() == logical
        assert tail.blocks[0, physical].tolist() == [at // BLOCK for at in logical]


def _above(parents: list[int], row: int) -> list[int]:
    above = []
    while (row := parents[row]) >= 0:
        above.append(row)
    return above


def test_weights_laid_out_for_onednn_are_the_same_weights(tmp_path: Path) -> None:
    source = resolve(str(tiny_target(tmp_path)))
    model = load_model(source, torch.float32, "cpu")
    digest, before = weights_digest(model), {k: v.clone() for k, v in model.state_dict().items()}
    for invariant in (False, True):
        model = load_model(source, torch.float32, "cpu")
        host = TargetHost(model, invariant=invariant, keep_weights=False)
        if not host.plan.packed:
            pytest.skip("oneDNN is missing, or its rows depend on each other here")
        assert weights_digest(model) == digest
        packed = [name for name, weight in model.state_dict().items() if weight.is_mkldnn]
        assert any("mlp" in name for name in packed)
        for name, weight in model.state_dict().items():
            dense = weight.to_dense() if weight.is_mkldnn else weight
            assert torch.equal(dense, before[name])
        for name in host.tensor_names():
            assert host.tensor(name).layout is torch.strided
        assert torch.equal(host.tensor("embed_tokens.weight"), before["model.embed_tokens.weight"])
        model = load_model(source, torch.float32, "cpu")
        assert TargetHost(model, invariant=invariant).plan.packed
        assert not any(weight.is_mkldnn for weight in model.state_dict().values())


def test_products_by_onednn_are_the_layers_products() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(48, 96), torch.nn.Linear(96, 7, bias=False))
    rows = torch.randn(2, 53, 48)
    with torch.inference_mode():
        before = model(rows)
        products.pack(model, replaced=True)
        assert torch.allclose(model(rows), before, atol=1e-5)
    assert all(layer.weight.is_mkldnn for layer in model)


def test_where_onednns_rows_depend_on_each_other_its_layout_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onednn = products.onednn

    def depends(*weights: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        product = onednn(*weights)
        return lambda rows: product(rows) * (1 + len(rows) * 2.0**-20)

    monkeypatch.setattr(products, "onednn", depends)
    model = load_model(resolve(str(tiny_target(tmp_path))), torch.float32, "cpu")
    host = TargetHost(model, keep_weights=False)
    assert not host.plan.packed
    assert not any(weight.is_mkldnn for weight in host.model.state_dict().values())


def test_where_zeros_change_sums_trees_keep_tails_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = torch.bmm

    def by_width(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        made = honest(left, right)
        return made * (1 + 2.0**-20) if left.shape[2] == 2 * BLOCK else made

    monkeypatch.setattr(torch, "bmm", by_width)
    host = TargetHost(load_model(resolve(str(tiny_target(tmp_path))), torch.float32, "cpu"))
    assert host.plan.most_tail == BLOCK


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

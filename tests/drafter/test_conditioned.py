"""The path-conditioned head: what it computes, where it is kept, and how proposals use it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from drafter import kit
from drafter.kit import opened
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from drafter_service import checkpoint
from drafter_service.conditioned import PathCondition
from drafter_service.draft_config import CheckpointError
from drafter_service.messages import DraftSampling
from drafter_service.model import DraftModel, LogitBias
from drafter_service.pathhead import PathHead

CPU = torch.device("cpu")


def conditioned_model(branches: int = 1, rank: int = 7) -> DraftModel:
    return kit.lively_model(kit.raw_config(draftwire={"path_rank": rank, "branches": branches}))


def by_hand(model: DraftModel, hidden: torch.Tensor, parent: int, before: int) -> torch.Tensor:
    """Logits over the vocabulary of one row below a path."""
    head = model.path_head
    assert head is not None

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean() + head.eps)

    embedding = model.embed(torch.tensor([parent, before]))
    inner = (
        head.slot.weight @ norm(hidden)
        + head.parent.weight @ norm(embedding[0])
        + head.before.weight @ norm(embedding[1])
    )
    moved = hidden + head.out.weight @ (inner * torch.sigmoid(inner))
    return model.logits(moved[None])[0]


@pytest.mark.parametrize("branches", [1, 3])
def test_logits_below_a_path_are_those_written_out(branches: int) -> None:
    model = conditioned_model(branches)
    slots = 5  # of two sessions: 2 and 3
    hidden = kit.features(slots * branches, seed=1)
    ids = torch.stack([torch.randperm(kit.VOCAB)[:9] for _ in range(slots)])
    bias = LogitBias(2, 5, torch.tensor([int(ids[3, 4])]), torch.tensor([2.5]))
    condition = PathCondition(model, hidden, ids, np.array([0, 2]), [bias])
    parents, before = np.array([4, 5, 6]), np.array([7, 8, 9])
    found = condition(1, np.array([0, 0, 1]), parents, before)
    assert found.shape == (3, branches, 9)
    for row, slot in enumerate((1, 1, 3)):
        for branch in range(branches):
            own = hidden[slot * branches + branch]
            want = by_hand(model, own, int(parents[row]), int(before[row]))[ids[slot]]
            if slot == 3:
                want = want + 2.5 * (ids[3] == ids[3, 4])
            np.testing.assert_allclose(found[row, branch], want, atol=1e-4)


def test_a_new_head_changes_nothing() -> None:
    head = PathHead(8, 4, 1e-6)
    torch.nn.init.zeros_(head.out.weight)
    rows = torch.randn(3, 8)
    moved = head.correction(head.of_slots(rows), head.of_path(rows, rows))
    assert not moved.any()


def test_the_head_lies_in_a_file_of_its_own_and_comes_back(tmp_path: Path) -> None:
    model = conditioned_model()
    raw = kit.raw_config(draftwire={"path_rank": 7})
    checkpoint.save(tmp_path, model, raw)
    with safe_open(tmp_path / checkpoint.WEIGHTS_FILE, framework="pt") as published:
        assert not [name for name in published.keys() if "path_head" in name]  # noqa: SIM118
    again = checkpoint.load(str(tmp_path), device=CPU)
    assert again.sha256 == checkpoint.sha256_of(model)
    # Saved once more without it, nothing of it stays behind.
    plain = kit.lively_model(kit.raw_config())
    checkpoint.save(tmp_path, plain, kit.raw_config())
    assert not (tmp_path / checkpoint.PATH_HEAD_FILE).exists()
    assert checkpoint.load(str(tmp_path), device=CPU).model.path_head is None


def test_a_head_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, conditioned_model(), kit.raw_config(draftwire={"path_rank": 7}))
    path = tmp_path / checkpoint.PATH_HEAD_FILE
    tensors = load_file(path)
    save_file(tensors | {"path_head.parent.weight": torch.zeros(6, kit.HIDDEN)}, path)
    with pytest.raises(CheckpointError, match=r"path_head\.parent\.weight is of shape"):
        checkpoint.load(str(tmp_path), device=CPU)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"path_head\.\w+\.weight is missing"):
        checkpoint.load(str(tmp_path), device=CPU)
    config = json.loads((tmp_path / checkpoint.CONFIG_FILE).read_text())
    config["draftwire"]["path_rank"] = -1
    (tmp_path / checkpoint.CONFIG_FILE).write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="path_rank"):
        checkpoint.load(str(tmp_path), device=CPU)


@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_engine_drafts_with_the_head_unless_told_not_to(
    branches: int, temperature: float
) -> None:
    model = conditioned_model(branches)
    found = []
    for on in (True, False):
        bench = kit.Bench(model, path_head=on)
        lane = bench.lane()
        sampling = DraftSampling(temperature, 5, {3: 1.0})
        (proposal,) = bench.step((lane, opened(1, 20, sampling=sampling)))[lane].proposals
        found.append((proposal.tree.tokens, proposal.tree.parents))
    assert found[0] != found[1]


def test_sessions_drafted_together_get_what_they_get_alone() -> None:
    model = conditioned_model()
    sampling = DraftSampling(1.0, 5)
    bench = kit.Bench(model)
    lanes = [bench.lane() for _ in range(3)]
    said = [opened(n + 1, 12 + 5 * n, sampling=sampling) for n in range(3)]
    together = bench.step(*zip(lanes, said, strict=True))
    for lane, step in zip(lanes, said, strict=True):
        own = kit.Bench(model)
        alone = own.lane()
        (want,) = own.step((alone, step))[alone].proposals
        (got,) = together[lane].proposals
        assert (got.tree.tokens, got.tree.parents) == (want.tree.tokens, want.tree.parents)

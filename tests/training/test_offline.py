"""Replayed rounds against rounds written out, and the command that reports them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from training import kit

from drafter_service import checkpoint
from drafter_service.training.__main__ import main
from drafter_service.training.evaluate import Tally, _interval
from drafter_service.training.features import Trajectory, read_features
from drafter_service.training.network import BlockNetwork
from drafter_service.training.offline import (
    Drafts,
    Mode,
    drafts_of,
    modes_for,
    rankings,
    replay,
    walk,
)
from drafter_service.training.target import Target
from drafter_service.tree import Part, Tree
from draftwire_kernels.noise import gumbel

CHAIN = Mode("argmax chain", frozenset({Part.ARGMAX}), 3)


@pytest.fixture(scope="module")
def counting(tiny: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    answers = [replace(a, temperature=1.0) for a in kit.made_up(8, counting=True)]
    return kit.write_features(tiny, tmp_path_factory.mktemp("counting"), answers)


@pytest.fixture(scope="module")
def drafter(tiny: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny.host.model
    return checkpoint.write_random(
        tmp_path_factory.mktemp("drafter"),
        model.config,
        seed=1,
        block_size=4,
        target_layer_ids=kit.LAYERS,
    )


@pytest.fixture(scope="module")
def network(tiny: Target, drafter: Path) -> BlockNetwork:
    found = checkpoint.load(str(drafter), device=torch.device("cpu"))
    embedding = tiny.host.tensor("embed_tokens.weight")
    found.model.attach_target(embedding, None, vocab_size=tiny.vocab_size)
    return BlockNetwork(found.model, embedding)


def knowing(trajectory: Trajectory, slots: int, right: int) -> Drafts:
    """Drafts whose first `right` slots rank the true token first and whose others rank it last."""
    tokens = trajectory.tokens.tolist()
    first = trajectory.prompt_length
    anchors = len(tokens) - 1 - first
    ids = np.zeros((anchors, 1, slots, 4), dtype=np.int64)
    for index in range(anchors):
        for slot in range(slots):
            place = first + index + 1 + slot
            true = tokens[place] if place < len(tokens) else 0
            wrong = [(true + offset) % 256 for offset in (1, 2, 3)]
            ids[index, 0, slot] = [true, *wrong] if slot < right else [*wrong, true]
    logits = np.broadcast_to(np.array([8.0, 2.0, 1.0, 0.0], dtype=np.float32), ids.shape).copy()
    total = np.full(ids.shape[:3], 8.0, dtype=np.float32)
    return Drafts(first, ids, logits, total, np.zeros((anchors, 1), dtype=np.float32))


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_a_drafter_that_knows_so_many_slots_is_accepted_that_far(
    counting: Path, right: int
) -> None:
    for trajectory in read_features(counting):
        drafts = knowing(trajectory, 3, right)
        ranked = rankings(trajectory, drafts, coupled=False)
        left = len(trajectory.response.answer) - 1
        for one in replay(trajectory, drafts, CHAIN, ranked):
            assert one.accepted == min(right, left - 1)
            left -= one.accepted + 1
        assert left == 0


def test_rounds_cover_the_answer_exactly_once_in_every_mode(
    counting: Path, network: BlockNetwork
) -> None:
    trajectory = next(read_features(counting))
    drafts = drafts_of(network, trajectory, 4)
    for mode in modes_for(3, (4, 8), greedy=False, branches=1):
        ranked = rankings(trajectory, drafts, coupled=mode.coupled)
        rounds = list(replay(trajectory, drafts, mode, ranked))
        made = sum(one.accepted + 1 for one in rounds)
        assert made == len(trajectory.response.answer) - 1, mode
        assert all(one.drafted <= mode.nodes for one in rounds)


def test_drafting_everywhere_at_once_equals_drafting_once_each(
    counting: Path, network: BlockNetwork
) -> None:
    trajectory = next(read_features(counting))
    together = drafts_of(network, trajectory, 4, at_once=32)
    alone = drafts_of(network, trajectory, 4, at_once=1)
    np.testing.assert_allclose(together.logits, alone.logits, atol=1e-4)
    assert (together.ids == alone.ids).mean() > 0.99


def test_coupled_order_uses_the_noise_the_target_draws_with(counting: Path) -> None:
    trajectory = next(read_features(counting))
    drafts = knowing(trajectory, 3, 3)
    (ranked,) = rankings(trajectory, drafts, coupled=True)[2]
    position = drafts.first + 2 + 1 + 1  # anchor 2, slot 2
    ids = drafts.ids[2, 0, 1]
    noise = gumbel(trajectory.response.seed, position, 256)[torch.from_numpy(ids)].numpy()
    order = np.argsort(-(drafts.logits[2, 0, 1] / 0.8 + noise), kind="stable")
    assert ranked.ids[1].tolist() == ids[order].tolist()


def test_a_walk_follows_children_and_leaves_the_last_token_to_the_target() -> None:
    tree = Tree(max_nodes=8, max_depth=4)
    first = tree.add(-1, 5, 0.0, Part.RANK_TREE)
    tree.add(-1, 6, 0.0, Part.RANK_TREE)
    second = tree.add(first, 7, 0.0, Part.RANK_TREE)
    tree.add(second, 8, 0.0, Part.RANK_TREE)
    assert walk(tree, [5, 7, 9, 9]) == 2
    assert walk(tree, [6, 7, 8]) == 1
    assert walk(tree, [5, 7, 8]) == 2
    assert walk(tree, [4, 7]) == 0


def test_intervals_hold_the_mean_and_shrink_with_more_answers() -> None:
    few = Tally(answers=[(10, 5), (10, 15)] * 4)
    many = Tally(answers=[(10, 5), (10, 15)] * 100)
    wide, narrow = (_interval([tally], 200, 0) for tally in (few, many))
    assert wide[0] < 2.0 < wide[1]
    assert narrow[1] - narrow[0] < 0.5 * (wide[1] - wide[0])


def test_the_command_reports_every_mode_and_regime(
    counting: Path, drafter: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "results.json"
    words = [
        "evaluate", "--features", str(counting), "--checkpoint", str(drafter), "--out", str(out),
        "--target", str(tiny_folder), "--budgets", "4,8", "--resamples", "20",
    ]  # fmt: skip
    assert main(words) == 0
    report = json.loads(out.read_text())
    modes = {(row["mode"], row["nodes"]) for row in report["results"]}
    assert ("argmax chain", 3) in modes
    assert {("coupled rank tree + n-gram", n) for n in (4, 8)} <= modes
    for row in report["results"]:
        assert row["regime"] == "T=1"
        low, high = row["interval_95"]
        assert low <= row["acceptance_length"] <= high
        assert row["acceptance_length"] == pytest.approx(row["accepted_drafts"] + 1)
    assert report["answers"] == 8
    assert str(tmp_path) not in out.read_text()

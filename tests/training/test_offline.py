"""Replayed rounds against rounds written out, and the command that reports them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from training import kit

from drafter_service import checkpoint
from drafter_service.training import offline
from drafter_service.training.__main__ import main
from drafter_service.training.choice import best, read_on
from drafter_service.training.errors import TrainingError
from drafter_service.training.features import Trajectory, read_features
from drafter_service.training.network import BlockNetwork
from drafter_service.training.offline import Drafts, Mode, drafts_of, modes_for, replay, walk
from drafter_service.training.order import held_out
from drafter_service.training.statistics import Tally, interval
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
    ids = np.zeros((anchors, slots, 4), dtype=np.int64)
    for index in range(anchors):
        for slot in range(slots):
            place = first + index + 1 + slot
            true = tokens[place] if place < len(tokens) else 0
            wrong = [(true + offset) % 256 for offset in (1, 2, 3)]
            ids[index, slot] = [true, *wrong] if slot < right else [*wrong, true]
    scores = np.array([8.0, 2.0, 1.0, 0.0], dtype=np.float32)
    logits = np.broadcast_to(scores, (anchors, slots, 1, 4)).copy()
    hidden = torch.zeros(anchors, slots, 1, 8)
    return Drafts(first, hidden, ids, logits, np.zeros((anchors, 1), dtype=np.float32))


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_a_drafter_that_knows_so_many_slots_is_accepted_that_far(
    counting: Path, network: BlockNetwork, right: int
) -> None:
    answers = [(t, knowing(t, 3, right)) for t in read_features(counting)]
    runs = replay(network.model, answers, CHAIN)
    for (trajectory, _), rounds in zip(answers, runs, strict=True):
        left = len(trajectory.response.answer) - 1
        for one in rounds:
            assert one.accepted == min(right, left - 1)
            left -= one.accepted + 1
        assert left == 0


def test_rounds_cover_every_answer_exactly_once_in_every_mode(
    counting: Path, network: BlockNetwork
) -> None:
    answers = [(t, drafts_of(network, t, 4)) for t in list(read_features(counting))[:3]]
    for mode in modes_for(3, (4, 8), greedy=False, branches=1, deepest=9):
        for (trajectory, _), rounds in zip(
            answers, replay(network.model, answers, mode), strict=True
        ):
            made = sum(one.accepted + 1 for one in rounds)
            assert made == len(trajectory.response.answer) - 1, mode
            assert all(one.drafted <= mode.nodes for one in rounds)


def test_answers_side_by_side_go_as_they_go_alone(counting: Path, network: BlockNetwork) -> None:
    answers = [(t, drafts_of(network, t, 4)) for t in list(read_features(counting))[:4]]
    mode = Mode("both", frozenset({Part.RANK_TREE, Part.NGRAM}), 8, coupled=True)
    together = replay(network.model, answers, mode)
    alone = [replay(network.model, [answer], mode)[0] for answer in answers]
    assert together == alone


def test_drafting_everywhere_at_once_equals_drafting_once_each(
    counting: Path, network: BlockNetwork
) -> None:
    trajectory = next(read_features(counting))
    together = drafts_of(network, trajectory, 4, at_once=32)
    alone = drafts_of(network, trajectory, 4, at_once=1)
    np.testing.assert_allclose(together.logits, alone.logits, atol=1e-4)
    assert (together.ids == alone.ids).mean() > 0.99


def test_coupled_order_uses_the_noise_the_target_draws_with(
    counting: Path, network: BlockNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    trajectory = next(read_features(counting))
    drafts = knowing(trajectory, 3, 3)
    seen: list[Tree] = []

    def spy(tree: Tree, truth: Sequence[int]) -> int:
        seen.append(tree)
        return walk(tree, truth)

    monkeypatch.setattr(offline, "walk", spy)
    tree = frozenset({Part.RANK_TREE})
    (rounds,) = replay(network.model, [(trajectory, drafts)], Mode("x", tree, 4, coupled=True))
    ratio = network.model.config.calibration.regime(1.0, filtered=False, coupled=True).ratio
    for one, found in zip(rounds, seen, strict=True):
        ids = drafts.ids[one.anchor - drafts.first, 0]
        noise = gumbel(trajectory.response.seed, one.anchor + 1, 256)[torch.from_numpy(ids)]
        scores = drafts.logits[0, 0, 0] / ratio + noise.numpy()
        assert found.tokens[0] == ids[scores.argmax()]


def test_a_walk_follows_children_and_leaves_the_last_token_to_the_target() -> None:
    tree = Tree()
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
    wide, narrow = (interval([tally], 200, 0) for tally in (few, many))
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


def test_the_mode_is_chosen_on_held_out_answers_and_read_on_others(
    counting: Path, drafter: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    words = [
        "evaluate", "--features", str(counting), "--checkpoint", str(drafter),
        "--target", str(tiny_folder), "--budgets", "4,8", "--resamples", "20", "--within", "4",
    ]  # fmt: skip
    validation, test = tmp_path / "validation.json", tmp_path / "test.json"
    held = ["--held-out", "0.5", "--held-out-seed", "3"]
    assert main([*words, *held, "--out", str(validation)]) == 0
    there = json.loads(validation.read_text())
    keys = [t.response.key for t in read_features(counting)]
    assert there["answers"] == len(held_out(keys, 0.5, 3)[1]) < len(keys)
    # Another mode is made the best one there: the choice must not look at the answers here.
    for row in there["results"]:
        row["acceptance_length"] = 9.0 if (row["mode"], row["nodes"]) == ("rank tree", 4) else 1.0
    validation.write_text(json.dumps(there))
    assert main([*words, "--chosen-on", str(validation), "--out", str(test)]) == 0
    (chosen,) = json.loads(test.read_text())["chosen_on_validation"]
    assert (chosen["mode"], chosen["nodes"], chosen["on_validation"][0]) == ("rank tree", 4, 9.0)
    rows = json.loads(test.read_text())["results"]
    (here,) = [r for r in rows if (r["mode"], r["nodes"]) == ("rank tree", 4)]
    assert chosen["acceptance_length"] == here["acceptance_length"] < 9.0
    test.unlink()
    for bad in (json.dumps(there | {"weights_sha256": "another drafter's"}), "[]", "no report"):
        validation.write_text(bad)
        assert main([*words, "--chosen-on", str(validation), "--out", str(test)]) == 2
    assert main([*words, "--chosen-on", str(tmp_path / "none"), "--out", str(test)]) == 2
    assert not test.exists()


def row(mode: str, nodes: int, length: float) -> dict[str, object]:
    return {
        "regime": "T=1", "mode": mode, "nodes": nodes, "acceptance_length": length,
        "interval_95": [1.0, 9.0],
    }  # fmt: skip


def test_the_best_mode_keeps_to_the_nodes_and_prefers_fewer() -> None:
    rows = [row("a", 16, 2.0), row("a", 32, 2.0), row("b", 32, 1.9), row("b", 64, 5.0)]
    (found,) = best(rows, 32)
    assert (found["mode"], found["nodes"], found["modes"]) == ("a", 16, 3)
    assert (found["second"]["mode"], found["second"]["nodes"]) == ("a", 32)


def test_a_choice_that_was_not_replayed_is_an_error() -> None:
    with pytest.raises(TrainingError, match="was not replayed here"):
        read_on({"results": [row("a", 16, 2.0)]}, [row("b", 16, 2.0)], 32)
    with pytest.raises(TrainingError, match="nothing for T=1"):
        read_on({"results": []}, [row("b", 16, 2.0)], 32)

"""Training the path-conditioned head and measuring chances: on a target whose next token hangs on
the last one alone, which a block's marginals cannot know.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from training import kit

from drafter_service import checkpoint
from drafter_service.calibration import NGRAM_LENGTHS, Regime
from drafter_service.draft_config import parse
from drafter_service.training import calibrate, evaluate, order, pathhead, train
from drafter_service.training.__main__ import main
from drafter_service.training.calibration_fit import (
    Draws,
    Sampling,
    Sites,
    draws,
    fit,
    model_chances,
    reliability,
)
from drafter_service.training.pathhead import HeadTrainer, PathHeadConfig, Rows, rows_of, started
from drafter_service.training.target import Target
from draftwire_kernels.noise import gumbel


@pytest.fixture(scope="module")
def features(tiny: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kit.write_features(tiny, tmp_path_factory.mktemp("path"), kit.made_up(30))


@pytest.fixture(scope="module")
def drafter(tiny: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.write_random(
        tmp_path_factory.mktemp("drafter"),
        tiny.host.model.config,
        seed=1,
        block_size=4,
        target_layer_ids=kit.LAYERS,
    )


def settings(**changes: object) -> PathHeadConfig:
    values = {"features": ("x",), "checkpoint": "x", "out": Path("x"), "rows": 64, "dropout": 0.0}
    return PathHeadConfig(**values | changes)  # type: ignore[arg-type]


def test_a_head_learns_what_follows_what(drafter: Path) -> None:
    """Rows whose slot says nothing and whose label is the parent plus one."""
    model = checkpoint.load(str(drafter), device=torch.device("cpu")).model
    model.requires_grad_(True)
    draw = torch.Generator().manual_seed(3)
    size = model.config.hidden_size
    embedding = torch.randn(40, size, generator=draw)
    model.path_head = started(model, 32, 0)
    parent = torch.randint(0, 30, (400,), generator=draw)
    rows = Rows(
        hidden=torch.randn(1, size, generator=draw).expand(400, -1).half(),
        parent=parent,
        before=torch.randint(0, 30, (400,), generator=draw),
        slot=torch.zeros(400, dtype=torch.int64),
        top_ids=torch.stack([parent + 1, parent + 2], 1),
        top_logprobs=torch.log(torch.tensor([[0.9, 0.1]])).expand(400, -1),
    )
    trainer = HeadTrainer(model, rows, embedding, embedding, settings(steps=150, lr=5e-3))
    before = trainer.mean_loss(rows)
    assert before == pytest.approx(trainer.mean_loss(rows, corrected=False), abs=1e-5)
    for number in range(150):
        trainer.step(number)
    assert trainer.mean_loss(rows) < 0.05 < 1.0 < before


def test_the_same_seed_trains_the_same_head(drafter: Path) -> None:
    found = []
    for _ in range(2):
        model = checkpoint.load(str(drafter), device=torch.device("cpu")).model
        model.path_head = started(model, 8, 4)
        size = model.config.hidden_size
        draw = torch.Generator().manual_seed(3)
        rows = Rows(
            torch.randn(50, size, generator=draw).half(),
            *(torch.randint(0, 30, (50,), generator=draw) for _ in range(2)),
            torch.arange(50) % 3,
            torch.randint(0, 30, (50, 2), generator=draw),
            torch.log(torch.tensor([[0.6, 0.4]])).expand(50, -1),
        )
        embedding = torch.randn(40, size, generator=draw)
        trainer = HeadTrainer(model, rows, embedding, embedding, settings(dropout=0.3, steps=5))
        for number in range(5):
            trainer.step(number)
        found.append(checkpoint.sha256_of(model))
    assert found[0] == found[1]


def test_rows_stand_below_the_true_path(
    features: Path, tiny: Target, drafter: Path, trajectories: list
) -> None:
    from drafter_service.training.network import BlockNetwork

    model = checkpoint.load(str(drafter), device=torch.device("cpu")).model
    network = BlockNetwork(model, tiny.host.tensor("embed_tokens.weight"))
    trajectory = trajectories[0]
    config = settings(anchors=100, prompt_anchors=False, top=4)
    rows = rows_of(network, [trajectory], 4, config)
    tokens = trajectory.tokens
    want = []
    for anchor in range(trajectory.prompt_length, len(tokens) - 1):
        for slot in range(3):
            at = anchor + 1 + slot
            if at < len(tokens):
                want.append((slot, int(tokens[at - 1]), int(tokens[at - 2])))
    assert (
        list(zip(*(x.tolist() for x in (rows.slot, rows.parent, rows.before)), strict=True)) == want
    )
    at = [trajectory.prompt_length + 1, trajectory.prompt_length + 2]
    assert torch.equal(rows.top_ids[:2], trajectory.top_ids[[i - 1 for i in at], :4].long())


def test_the_commands_make_a_drafter_with_a_head_and_calibrate_it(
    features: Path, drafter: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "conditioned"
    words = ["--features", str(features), "--target", str(tiny_folder), "--threads", "1"]
    assert main([
        "path-head", *words, "--checkpoint", str(drafter), "--out", str(out), "--rank", "8",
        "--steps", "20", "--anchors", "6", "--rows", "32", "--validation", "0.2",
        "--validation-answers", "2",
    ]) == 0  # fmt: skip
    made = checkpoint.load(str(out), device=torch.device("cpu"))
    assert made.config.path_rank == 8
    assert made.model.path_head is not None
    assert (out / checkpoint.PATH_HEAD_FILE).exists()
    base = checkpoint.load(str(drafter), device=torch.device("cpu"))
    same = {k: v.bfloat16() for k, v in base.model.state_dict().items()}
    assert all(torch.equal(made.model.state_dict()[k], v) for k, v in same.items())
    assert main([
        "calibrate", *words, "--checkpoint", str(out), "--anchors", "6", "--validation", "0.5",
    ]) == 0  # fmt: skip
    config = parse(json.loads((out / checkpoint.CONFIG_FILE).read_text()))
    kinds = {(r.temperature, r.filtered, r.coupled) for r in config.calibration.regimes}
    assert {(0.0, False, False), (1.0, False, True), (1.5, True, True)} <= kinds
    assert all(len(r.reach) == 3 for r in config.calibration.regimes)
    again = checkpoint.load(str(out), device=torch.device("cpu"))
    assert again.sha256 == made.sha256, "weights are as they were"


def test_head_and_calibration_use_the_prompts_that_training_held_out(
    features: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--features", str(features), "--target", str(tiny_folder), "--threads", "1"]
    run, head = tmp_path / "run", tmp_path / "head"
    assert main([
        "train", *words, "--out", str(run), "--layers", "1", "--block-size", "4", "--steps", "1",
        "--validation", "0.3", "--seed", "4",
    ]) == 0  # fmt: skip
    raw = json.loads((run / "last" / checkpoint.CONFIG_FILE).read_text())
    assert raw["draftwire"]["held_out"] == {"share": 0.3, "seed": 4}
    asked: list[tuple[float, int]] = []

    def spy(keys: Sequence[str], share: float, seed: int) -> tuple[list[int], list[int]]:
        asked.append((share, seed))
        return order.held_out(keys, share, seed)

    for module in (pathhead, calibrate, evaluate, train):
        monkeypatch.setattr(module, "held_out", spy)
    assert main([
        "path-head", *words, "--checkpoint", str(run / "last"), "--out", str(head), "--rank", "8",
        "--steps", "2", "--anchors", "2", "--validation-answers", "1",
    ]) == 0  # fmt: skip
    assert main(["calibrate", *words, "--checkpoint", str(head), "--anchors", "6"]) == 0
    assert main([
        "evaluate", *words, "--checkpoint", str(head), "--out", str(tmp_path / "report.json"),
        "--held-out", "0.1", "--resamples", "10", "--budgets", "4",
    ]) == 0  # fmt: skip
    # So does a training that goes on from it, whatever its own seed.
    assert main([
        "train", *words, "--out", str(tmp_path / "on"), "--base", str(run / "last"),
        "--block-size", "4", "--steps", "1", "--seed", "9",
    ]) == 0  # fmt: skip
    assert asked == [(0.3, 4)] * 4


def made_up_sites(n: int, noise: float, seed: int = 0, width: int = 12) -> Sites:
    """Candidates whose logits are the target's, give or take `noise`."""
    draw = np.random.default_rng(seed)
    ids = np.stack([draw.permutation(30)[:width] for _ in range(n)]).astype(np.int64)
    logs = np.sort(draw.normal(0, 1.5, (n, width)))[:, ::-1]
    logs = logs - np.log(np.exp(logs).sum(1, keepdims=True))
    return Sites(
        ids=ids,
        logits=(logs + draw.normal(0, noise, logs.shape)).astype(np.float32),
        top_ids=ids,
        top_logprobs=logs.astype(np.float32),
        slot=np.arange(n) % 3,
        temperature=np.ones(n, dtype=np.float32),
        matched_tokens=np.full((n, 2), -1),
        matched_lengths=np.zeros((n, 2), dtype=np.int64),
    )


def test_draws_are_the_targets_own_at_any_temperature() -> None:
    sites = made_up_sites(4000, 0.0)
    found = draws(sites, Sampling(0.5), coupled=True)
    noise = gumbel(20_251, 7, 30).numpy()[sites.ids[7]]
    np.testing.assert_allclose(found.noise[7], noise, rtol=1e-5)
    assert found.tokens[7] == sites.ids[7][np.argmax(sites.top_logprobs[7] / 0.5 + noise)]
    scaled = np.exp(sites.top_logprobs / 0.5)
    want = (scaled / scaled.sum(1, keepdims=True))[:, 0].mean()
    assert (found.column == 0).mean() == pytest.approx(want, abs=0.03)
    cut = draws(sites, Sampling(1.0, 3, 1.0), coupled=True)
    assert set(np.unique(cut.column)) == {0, 1, 2}
    greedy = draws(sites, Sampling(0.0), coupled=False)
    assert not greedy.column.any()
    assert not greedy.noise.any()


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0), Sampling(0.7, 8, 0.9)])
def test_fitted_chances_are_the_rates_that_come_true(sampling: Sampling) -> None:
    sites = made_up_sites(3000, 0.8)
    coupled = sampling.temperature > 0
    regime = fit(sites, sampling, coupled=coupled)
    fresh = made_up_sites(3000, 0.8, seed=1)
    for row in reliability(fresh, sampling, regime):
        if row["nodes"] > 200:
            assert row["claimed"] == pytest.approx(row["drawn"], abs=0.06)
    other = replace(regime, spread=(0.5,), ratio=0.5)

    def likelihood(tried: Regime) -> float:
        drawn: Draws = draws(fresh, sampling, coupled=coupled)
        chances = model_chances(fresh, drawn, tried)
        return float(np.log(chances[np.arange(len(fresh)), drawn.column]).mean())

    assert likelihood(regime) > likelihood(other)


def test_chances_of_repetition_are_found_by_length_of_the_match() -> None:
    sites, draw = made_up_sites(4000, 0.8), np.random.default_rng(5)
    lengths = np.array([2, 7])[draw.integers(0, 2, len(sites))]
    repeats = draw.random(len(sites)) < np.where(lengths == 2, 0.2, 0.8)
    # Where the text repeats itself the target is sure of the matched token, and no model knew it.
    sure = np.where(np.arange(sites.ids.shape[1]) == 6, 0.0, -20.0)
    matched = replace(
        sites,
        top_logprobs=np.where(repeats[:, None], sure, sites.top_logprobs).astype(np.float32),
        matched_tokens=np.stack([sites.ids[:, 6], np.full(len(sites), -1)], 1),
        matched_lengths=np.stack([lengths, np.zeros_like(lengths)], 1),
    )
    regime = fit(matched, Sampling(1.0), coupled=True)
    assert regime.ngram[NGRAM_LENGTHS.index(2)] == pytest.approx(0.2, abs=0.06)
    assert regime.ngram[NGRAM_LENGTHS.index(7)] == pytest.approx(0.8, abs=0.06)
    for row in reliability(matched, Sampling(1.0), regime):
        assert math.isclose(row["claimed"], row["drawn"], abs_tol=0.08) or row["nodes"] < 200

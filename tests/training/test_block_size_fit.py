"""Labels, splits, the fit and the verdicts, on made-up sweeps whose truth is known."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drafter_service import predictor
from drafter_service.training import block_size_policies as policies
from drafter_service.training.__main__ import main
from drafter_service.training.block_size_cases import (
    Case,
    best_fixed,
    cases_of,
    enough_seeds,
    is_validation,
    label,
    majority,
)
from drafter_service.training.block_size_costs import CostTable, write_costs
from drafter_service.training.block_size_table import Regime, Run, SweepWriter, read_sweep, visited

SIZES = (4, 6, 8)
SHA = "a" * 64
COSTS = CostTable({4: 1.0, 8: 3.0}, {1: 10.0, 9: 14.0})
Truth = Any


def facts(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "way": "replay", "drafter": "tiny", "drafter_sha256": SHA, "hidden_size": 6,
        "block_size": 6, "candidates": list(SIZES), "parts": ["argmax"], "max_nodes": 8,
        "vocab_size": 9,
    }  # fmt: skip
    return values | changes


def a_run(
    prompt: str, source: str, size: int, seed: int, steps: tuple[tuple[int, int], ...], t: float
) -> Run:
    accepted = sum(one for one, _ in steps)
    return Run(
        f"{prompt}|t{t:g}|{seed}", prompt, source, t, 0, 1.0, seed, size, accepted + len(steps),
        len(steps), accepted, sum(drafted for _, drafted in steps), None, steps,
    )  # fmt: skip


def write(
    folder: Path,
    name: str,
    prompts: int,
    chance: Any,
    *,
    seeds: int = 4,
    temperature: float = 1.0,
    rounds: int = 40,
    **changes: Any,
) -> Path:
    """A sweep of made-up prompts. `chance(kind, size)`: of each drafted token to be accepted; the
    prompt's kind is the sign of its input, and nothing else in the input tells.
    """
    draw = random.Random(f"{name} {prompts}")
    writer = SweepWriter(folder / name, facts(**changes))
    for number in range(prompts):
        kind = draw.choice((-1.0, 1.0))
        inputs = torch.tensor([kind * (1 + draw.random()), *(draw.gauss(0, 1) for _ in range(5))])
        writer.add_inputs(f"{name}{number}", {"context": inputs})
        for seed, size in itertools.product(range(seeds), SIZES):
            steps = []
            for _ in range(rounds):
                accepted = 0
                while accepted < size - 1 and draw.random() < chance(kind, size):
                    accepted += 1
                steps.append((accepted, size - 1))
            writer.add(a_run(f"{name}{number}", name, size, seed, tuple(steps), temperature))
    writer.close()
    return folder / name


def distinct(kind: float, size: int) -> float:
    """Long blocks pay for one kind of prompt and lose for the other."""
    return 0.98 if kind > 0 else 0.3


def alike(kind: float, size: int) -> float:
    """All prompts are alike, and only luck differs."""
    return 0.6


def fit_words(sweep: Path, out: Path, costs: Path | None, *more: str) -> list[str]:
    words = [
        "block-size", "fit", "--sweep", str(sweep), "--out", str(out), "--hidden", "32", "--lr",
        "3e-3", "--batch", "16", "--epochs", "60", *more,
    ]  # fmt: skip
    return words if costs is None else [*words, "--costs", str(costs)]


def evaluated(
    sweep: Path, folder: Path, out: Path, costs: Path | None, *more: str
) -> dict[str, Any]:
    words = [
        "block-size", "evaluate", "--sweep", str(sweep), "--predictor", str(folder), "--out",
        str(out), "--resamples", "400", *more,
    ]  # fmt: skip
    assert main(words if costs is None else [*words, "--costs", str(costs)]) == 0
    return json.loads(out.read_text())  # type: ignore[no-any-return]


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    write_costs(tmp_path / "costs.json", COSTS)
    return tmp_path / "costs.json"


def made_case(lengths: Any, times: Any, temperature: float = 1.0) -> Case:
    return Case(
        "p", "s", Regime(temperature), SIZES, {}, torch.zeros(1), np.array(lengths), np.array(times)
    )


def test_labels_follow_their_objective_and_ties_go_to_the_smallest_size() -> None:
    case = made_case([[2.0], [3.0], [3.0]], [[5.0], [7.0], [4.0]])
    assert label(case, "acceptance").tolist() == [0, 1, 0]
    assert label(case, "cost").tolist() == [0, 0, 1]
    even = made_case([[2.0]] * 3, [[5.0]] * 3)
    assert label(even, "acceptance").tolist() == label(even, "cost").tolist() == [1, 0, 0]


def test_labels_are_means_over_the_seeds() -> None:
    case = made_case([[9.0, 1.0], [4.0, 4.0], [6.0, 6.0]], np.ones((3, 2)))
    assert label(case, "acceptance").tolist() == [0, 0, 1]


def test_soft_labels_are_a_distribution_that_sharpens_towards_the_hard_one() -> None:
    case = made_case(np.ones((3, 1)), [[5.0], [5.5], [4.0]])
    soft, sharp = label(case, "cost", 0.2), label(case, "cost", 0.01)
    assert float(soft.sum()) == pytest.approx(1.0)
    assert soft.argsort(descending=True).tolist() == [2, 0, 1]
    torch.testing.assert_close(sharp, label(case, "cost"), atol=1e-4, rtol=0)


def test_single_answers_count_at_temperature_zero_only() -> None:
    assert enough_seeds(made_case(np.ones((3, 1)), np.ones((3, 1)), 0.0), 4)
    assert not enough_seeds(made_case(np.ones((3, 3)), np.ones((3, 3))), 4)
    assert enough_seeds(made_case(np.ones((3, 4)), np.ones((3, 4))), 4)


def test_the_split_goes_by_prompt_and_keeps_its_share() -> None:
    there = [is_validation(f"p{n}", 0.25, 0) for n in range(2000)]
    assert 0.2 < sum(there) / len(there) < 0.3
    assert there == [is_validation(f"p{n}", 0.25, 0) for n in range(2000)]
    assert there != [is_validation(f"p{n}", 0.25, 1) for n in range(2000)]


def test_the_best_fixed_size_is_named_for_each_regime_and_over_all() -> None:
    cold = made_case([[1.0], [2.0], [6.0]], np.ones((3, 1)), 0.0)
    warm = made_case([[2.2], [2.0], [1.0]], np.ones((3, 1)), 1.0)
    assert best_fixed([cold, warm, warm, warm], "acceptance") == {"all": 4, "T=0": 8, "T=1": 4}
    assert majority([label(c, "acceptance") for c in (cold, warm, warm)], SIZES) == 4


def test_answers_that_lack_a_size_are_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path, "one", 2, alike)
    path = folder / "runs.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    cases = cases_of([read_sweep(folder)], None, COSTS.per_token)
    assert sorted(case.seeds for case in cases) == [3, 4]


def test_the_oracle_per_round_is_the_best_way_through_the_answer() -> None:
    draw = random.Random(4)
    everywhere = {
        size: tuple((min(draw.randrange(size), 8 - at), size - 1) for at in range(9))
        for size in SIZES
    }
    runs = {
        size: (replace(a_run("p", "s", size, 1, visited(e), 1.0), everywhere=e),)
        for size, e in everywhere.items()
    }
    case = replace(made_case(np.ones((3, 1)), np.ones((3, 1))), runs=runs)

    def ways(at: int) -> list[tuple[float, int]]:
        """(milliseconds, rounds) of every way from a position on."""
        if at >= 9:
            return [(0.0, 0)]
        return [
            (COSTS.round(size, size - 1) + ms, rounds + 1)
            for size in SIZES
            for ms, rounds in ways(at + everywhere[size][at][0] + 1)
        ]

    every = ways(0)
    assert policies.oracle_per_round(case, "cost", 6, COSTS.per_token, COSTS.round)[
        0
    ] == pytest.approx(min(ms for ms, _ in every) / 9)
    assert policies.oracle_per_round(case, "acceptance", 6, COSTS.per_token, COSTS.round)[
        0
    ] == pytest.approx(9 / min(rounds for _, rounds in every))


def test_picking_on_one_half_and_measuring_on_the_other_does_not_gain_from_luck() -> None:
    draw = np.random.default_rng(0)
    gains, honest = [], []
    for _ in range(400):
        lengths = 3 + draw.normal(0, 0.5, size=(3, 4))
        case = made_case(lengths, np.ones((3, 4)))
        picked, fixed = policies.oracle_other_half(case, "acceptance", 6, COSTS.per_token)
        honest.append(picked - fixed)
        gains.append(policies.oracle_same_runs(case, "acceptance") - lengths[1].mean())
    assert abs(np.mean(honest)) < 0.04
    assert np.mean(gains) > 0.15


def test_single_answers_are_halved_by_their_rounds() -> None:
    steps = {size: tuple([(3, size - 1)] * 4 + [(0, size - 1)] * 16) for size in SIZES}
    runs = {size: (a_run("p", "s", size, 1, some, 0.0),) for size, some in steps.items()}
    lengths = np.array([[runs[size][0].acceptance_length] for size in SIZES])
    case = replace(made_case(lengths, np.ones((3, 1)), 0.0), runs=runs)
    picked, fixed = policies.oracle_other_half(case, "acceptance", 6, COSTS.per_token)
    assert picked == fixed == pytest.approx((4.0 + 1.0) / 2)


def test_a_predictor_learns_what_the_input_tells_and_the_verdict_says_so(
    tmp_path: Path, costs: Path
) -> None:
    train = write(tmp_path, "train", 120, distinct)
    held_out = write(tmp_path, "other", 60, distinct)
    out = tmp_path / "drafter"
    assert main(fit_words(train, out, costs, "--held-out", str(held_out))) == 0
    notes = json.loads((out / predictor.CONFIG_FILE).read_text())["training"]
    assert notes["validation_accuracy"] > 0.9
    report = evaluated(held_out, out, tmp_path / "report.json", costs)
    (row,) = [row for row in report["results"] if row["objective"] == "cost"]
    low, _ = row["policies"]["predictor"]["gain_interval_95"]
    assert low > 0
    assert any("it excludes zero." in said for said in report["verdicts"])
    assert any("prompts do differ" in said for said in report["verdicts"])
    assert row["policies"]["oracle, same runs"]["gain_percent"] >= low
    assert str(tmp_path) not in (tmp_path / "report.json").read_text()


def test_where_only_luck_differs_the_verdict_says_no(tmp_path: Path, costs: Path) -> None:
    train = write(tmp_path, "train", 80, alike)
    held_out = write(tmp_path, "other", 40, alike)
    out = tmp_path / "drafter"
    assert main(fit_words(train, out, costs)) == 0
    report = evaluated(held_out, out, tmp_path / "report.json", costs)
    for row in report["results"]:
        found = row["policies"]
        assert found["oracle, same runs"]["gain_interval_95"][0] > 0
        assert found["oracle, independent runs"]["gain_percent"] > 0
        assert found["predictor"]["gain_interval_95"][0] <= 0
        mine, oracle, *_ = row["verdicts"]
        assert "does not exclude zero." in mine or "is a loss." in mine
        assert oracle.endswith("the same-run oracle is just the best of several noisy runs.")


def test_the_predictors_own_time_counts(tmp_path: Path, costs: Path) -> None:
    train, held_out = write(tmp_path, "train", 60, alike), write(tmp_path, "other", 10, alike)
    assert main(fit_words(train, tmp_path / "drafter", costs)) == 0
    free, paid = (
        evaluated(held_out, tmp_path / "drafter", tmp_path / "r.json", costs, *more)["results"][0]
        for more in ([], ["--predictor-ms", "50"])
    )
    more = paid["policies"]["predictor"]["mean"] - free["policies"]["predictor"]["mean"]
    assert 0 < more < 50 / 40  # an answer has 40 rounds, and each a token at least
    assert paid["policies"]["best fixed"]["mean"] == free["policies"]["best fixed"]["mean"]


def test_prompts_and_benchmarks_that_were_trained_on_are_refused(
    tmp_path: Path, costs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = write(tmp_path, "train", 40, alike)
    out = tmp_path / "drafter"
    assert main(fit_words(train, out, costs, "--held-out", str(train))) == 2
    assert "a prompt that is not trained on" in capsys.readouterr().err
    assert main(fit_words(train, out, costs)) == 0
    words = ["--sweep", str(train), "--predictor", str(out), "--out", str(tmp_path / "r.json")]
    assert main(["block-size", "evaluate", *words, "--costs", str(costs)]) == 2
    assert "a prompt that the predictor never saw" in capsys.readouterr().err


def test_without_costs_only_acceptance_can_be_learned_and_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, held_out = write(tmp_path, "train", 40, alike), write(tmp_path, "other", 10, alike)
    out = tmp_path / "drafter"
    assert main(fit_words(train, out, None)) == 2
    assert "--costs" in capsys.readouterr().err
    assert main(fit_words(train, out, None, "--labels", "acceptance")) == 0
    report = evaluated(held_out, out, tmp_path / "report.json", None)
    assert {row["objective"] for row in report["results"]} == {"acceptance"}


def test_too_few_seeds_are_left_out_unless_labels_are_soft(
    tmp_path: Path, costs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = write(tmp_path, "train", 40, alike, seeds=2)
    out = tmp_path / "drafter"
    assert main(fit_words(train, out, costs)) == 1
    assert "too few" in capsys.readouterr().err
    assert main(fit_words(train, out, costs, "--soft", "0.05")) == 0
    notes = json.loads((out / predictor.CONFIG_FILE).read_text())["training"]
    assert 0 < notes["label_entropy"] < math.log(3) + 1e-6


def test_the_same_settings_make_the_same_predictor(tmp_path: Path, costs: Path) -> None:
    train = write(tmp_path, "train", 40, distinct)
    for name in ("one", "two"):
        assert main(fit_words(train, tmp_path / name, costs, "--seed", "3")) == 0
    one, two = ((tmp_path / name / predictor.WEIGHTS_FILE).read_bytes() for name in ("one", "two"))
    assert one == two


def test_sweeps_of_two_drafters_do_not_mix(
    tmp_path: Path, costs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write(tmp_path, "one", 4, alike)
    two = write(tmp_path, "two", 4, alike, drafter_sha256="b" * 64)
    words = fit_words(one, tmp_path / "drafter", costs)
    words[words.index("--sweep") + 1] = f"{one},{two}"
    assert main(words) == 2
    assert "drafter_sha256" in capsys.readouterr().err

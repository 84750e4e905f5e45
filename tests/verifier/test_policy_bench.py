"""What `tests/bench/policy_grid.py` counts and concludes, on made-up turns."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCH)])
    import policy_grid

    return policy_grid


def test_a_window_is_not_cut_within_a_step(grid: ModuleType) -> None:
    """Steps of 0.3 s with four sessions, whose tokens come within a millisecond or so."""
    chunks = [(0.3 * step + 0.001 * who, 1) for step in range(40) for who in range(4)]
    for end in (5.0, 5.1, 5.3):
        tokens, seconds = grid.counted(chunks, 0.0, end)
        assert tokens / seconds == pytest.approx(4 / 0.3, rel=0.001)


def test_a_turn_without_a_token_is_slow_and_no_error(grid: ModuleType) -> None:
    tokens, seconds = grid.counted([], 1.0, 6.0)
    assert grid.speed(grid.Run(tokens, seconds)) == pytest.approx(0.1)


def test_the_interval_holds_the_ratio_as_often_as_it_says(grid: ModuleType) -> None:
    """The machine's mood is shared by both arms of a turn; 15 % of noise is each one's own."""
    rng, inside = random.Random(7), 0
    for _ in range(400):
        moods = [rng.lognormvariate(0, 0.3) for _ in range(4)]
        one, other = (
            [
                grid.Run(round(1e6 * ratio * mood * rng.lognormvariate(0, 0.15)), 1.0)
                for mood in moods
            ]
            for ratio in (1.2, 1.0)
        )
        low, high = grid.against(one, other)["interval"]
        inside += low <= 1.2 <= high
    assert 0.92 < inside / 400 < 0.98


def test_the_verdict_names_the_best_other_arm_and_what_is_below(grid: ModuleType) -> None:
    def cell(fixed: float, adaptive: float, high: float) -> dict[str, object]:
        of_plain = {name: {"ratio": 0.5} for name in grid.ARMS}
        of_plain |= {"plain": {"ratio": 1.0}, "fixed 4": {"ratio": fixed}}
        of_plain["adaptive"] = {"ratio": adaptive}
        return {
            "arms": {name: {"of_plain": ratio} for name, ratio in of_plain.items()},
            "adaptive_of": {
                name: {"ratio": adaptive / ratio["ratio"], "interval": [0.1, high]}
                for name, ratio in of_plain.items()
                if name != "adaptive"
            },
        }

    verdict = grid.judged({"good": cell(1.5, 1.6, 2.0), "bad": cell(1.4, 0.9, 0.95)})
    assert verdict["best_other_arm"] == {"good": "fixed 4", "bad": "fixed 4"}
    assert verdict["cells_adaptive_below_floor_of_plain"] == ["bad"]
    assert verdict["cells_adaptive_surely_below_floor_of_plain"] == ["bad"]
    assert verdict["cells_adaptive_below_floor_of_best"] == ["bad"]
    assert verdict["mean_of_plain"]["adaptive"] == pytest.approx(1.2, rel=1e-3)

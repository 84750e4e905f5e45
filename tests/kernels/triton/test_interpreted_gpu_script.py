"""The prepared GPU script runs from end to end, so that a machine with a GPU does not meet it
first."""

import json
from pathlib import Path

import pytest
from bench import gpu_engine, gpu_kernels


def test_the_dry_run_agrees_and_writes_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.json"
    assert gpu_kernels.main(["--dry-run", "--out", str(out)]) == 0
    assert "0 disagreements" in capsys.readouterr().out
    figures = json.loads(out.read_text())
    assert [aim["found"] is not None for aim in figures["aims"]] == [True] * 4
    assert {"whole acceptance step, no filter", "statistics pass"} <= {
        case["case"] for case in figures["cases"]
    }


def test_a_disagreement_is_said_and_ends_the_script_with_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_kernels, "failures", lambda *_: ["follow session 3"])
    monkeypatch.setattr(gpu_kernels, "speed", lambda *_: {})
    assert gpu_kernels.main(["--dry-run"]) == 1
    assert "DISAGREES follow session 3" in capsys.readouterr().out


def test_the_engines_dry_run_gives_the_same_tokens_with_trees(tmp_path: Path) -> None:
    out = tmp_path / "engine.json"
    assert gpu_engine.main(["--dry-run", "--out", str(out)]) == 0
    (run,) = json.loads(out.read_text())["runs"]
    assert run["same_tokens"] == run["sessions"] == 2

"""The commands as README and model card write them: every one parses, and the recipe of the block
size predictor runs from its first line to its last, with a tiny target in the big one's place.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from training import kit

from drafter_service import checkpoint, predictor
from drafter_service.training import recipe
from drafter_service.training.__main__ import COMMANDS, GROUP, main
from drafter_service.training.prompts import Prompt, parse_recipe, plan_all
from drafter_service.training.target import Target
from draftwire.config import load

ROOT = Path(__file__).parents[2]
WRITTEN = (ROOT / "README.md", ROOT / "drafter_service/checkpoints/smollm2-135m-demo/README.md")
PREDICTOR = "### Training a block size predictor"


def commands(text: str) -> list[list[str]]:
    """The words after `draftwire-train` of every command in the text's code blocks."""
    found = []
    for block in re.findall(r"^```\w*\n(.*?)^```", text, flags=re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            if "draftwire-train" not in line and "drafter_service.training" not in line:
                continue
            words = shlex.split(line, comments=True)
            if "drafter_service.training" in words:
                found.append(words[words.index("drafter_service.training") + 1 :])
            elif words[:1] == ["draftwire-train"] and "|" not in words:
                found.append(words[1:])
    return found


def split(words: list[str]) -> tuple[str, list[str]]:
    """The command's name, and its settings."""
    count = 2 if words[0] == GROUP else 1
    return " ".join(words[:count]), words[count:]


@pytest.mark.parametrize("path", WRITTEN, ids=("readme", "model card"))
def test_every_written_command_parses(path: Path) -> None:
    found = commands(path.read_text(encoding="utf-8"))
    assert len(found) >= 4
    for words in found:
        name, settings = split(words)
        config_cls, _ = COMMANDS[name][0]()
        load(config_cls, [word.replace("$seed", "1") for word in settings], {}, name)


def test_the_recipe_is_what_the_model_card_says_made_the_drafter() -> None:
    config = recipe.DemoConfig(prompts=Path("prompts"), out=Path("out"))
    at = Path("features")
    made = [
        ("train", recipe.training(config, at)), ("train", recipe.further(config, at)),
        ("path-head", recipe.head(config, at)), ("calibrate", recipe.calibration(config, at)),
    ]  # fmt: skip
    # Where files lie, what the base or the drafter says by itself.
    apart = {"features", "checkpoint", "out", "base", "layers", "threads", "seed", "validation"}
    told = [split(words) for words in commands(WRITTEN[1].read_text(encoding="utf-8"))]
    told = [one for one in told if one[0] in dict(made)][-len(made) :]
    for (name, mine), (theirs_name, settings) in zip(made, told, strict=True):
        assert name == theirs_name
        theirs = load(type(mine), settings, {}, name)
        for field in fields(mine):
            if field.name not in apart:
                assert getattr(mine, field.name) == getattr(theirs, field.name), (name, field.name)


def test_a_greedy_answer_is_made_once_whatever_the_seed() -> None:
    recipes = [parse_recipe("1:0"), parse_recipe("1:1")]
    one, two = (plan_all([Prompt("a", "s", "text")], recipes, seed=seed) for seed in (1, 2))
    assert one[0].key == two[0].key, "at temperature 0 the seed changes nothing"
    assert one[1].key != two[1].key


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_predictors_recipe_runs_as_written(
    tiny: Target, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Published in bfloat16, as Qwen3 is: the same values in whichever type they are loaded.
    folder = tmp_path / "target"
    shutil.copytree(tiny_folder, folder)
    weights = folder / "model.safetensors"
    save_file(
        {name: value.bfloat16() for name, value in load_file(weights).items()},
        weights, metadata={"format": "pt"},
    )  # fmt: skip
    drafter = checkpoint.write_random(
        tmp_path / "drafter", tiny.host.model.config, seed=1, block_size=16,
        target_layer_ids=kit.LAYERS,
    )  # fmt: skip
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"id": str(n), "turns": [f"Count to {n}."]}) + "\n" for n in range(10))
    )
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition(PREDICTOR)[2]
    text = text.partition("\n## ")[0].partition("For Qwen3-4B on GPUs")[2]
    found = commands(text)
    assert [split(words)[0] for words in found] == [
        "generate", "features", "block-size costs", "block-size sweep", "block-size fit",
        "block-size fit",
    ]  # fmt: skip
    here = {
        "Qwen/Qwen3-4B": str(folder), "z-lab/Qwen3-4B-DFlash-b16": str(drafter),
        "cuda": "cpu", "2048": "20", "1,9,17,25,33": ",".join(map(str, kit.LAYERS)),
    }  # fmt: skip
    for words in found:
        mine = [here.get(word, word) for word in words] + ["--threads", "1"]
        mine = [word if mine[i - 1] != "--max-prompt" else "200" for i, word in enumerate(mine)]
        for seed in "1234" if "$seed" in mine else "1":
            assert main([seed if word == "$seed" else word for word in mine]) == 0, mine
    for name in ("predictor-context", "predictor-paper"):
        assert (tmp_path / name / predictor.CONFIG_FILE).is_file()

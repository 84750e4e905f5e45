"""The predictor's network against its formula, its files, and the drafters it refuses."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter import kit, peer

from drafter_service import checkpoint, predictor
from drafter_service.config import Config
from drafter_service.draft_config import CheckpointError
from drafter_service.predictor import (
    BlockSizePredictor,
    InputKind,
    PredictorConfig,
    around,
    expected_embedding,
    log_probabilities,
)
from drafter_service.service import DrafterService
from draftwire.config import ConfigError

CPU = torch.device("cpu")


def config(**changes: Any) -> PredictorConfig:
    values: dict[str, Any] = {
        "input": InputKind.CONTEXT,
        "input_size": kit.HIDDEN,
        "candidates": (4, 5, 6, 7, 8),
        "drafter_sha256": "d" * 64,
        "hidden_size": 24,
    }
    return PredictorConfig(**values | changes)


def network(seed: int = 1, **changes: Any) -> BlockSizePredictor:
    model = BlockSizePredictor(config(**changes))
    model.initialise(seed)
    return model.eval()


def load(folder: Path, sha256: str = "d" * 64, hidden_size: int = kit.HIDDEN) -> BlockSizePredictor:
    return predictor.load(folder, drafter_sha256=sha256, hidden_size=hidden_size, device=CPU)


def test_the_second_layer_is_residual_and_inputs_are_shifted_and_scaled() -> None:
    model = network(takes_temperature=True)
    with torch.no_grad():
        model.shift.uniform_(-1, 1)
        model.scale.uniform_(0.5, 2)
        for layer in (model.first, model.second, model.output):
            layer.bias.uniform_(-1, 1)
    rows, temperatures = torch.randn(3, kit.HIDDEN), torch.tensor([0.0, 0.7, 1.5])
    for row, temperature, got in zip(rows, temperatures, model(rows, temperatures), strict=True):
        x = torch.cat([(row - model.shift) * model.scale, temperature[None]]).double()
        w = {name: tensor.double() for name, tensor in model.state_dict().items()}
        first = (w["first.weight"] @ x + w["first.bias"]).clamp(min=0)
        second = (w["second.weight"] @ first + w["second.bias"]).clamp(min=0)
        want = w["output.weight"] @ (first + second) + w["output.bias"]
        torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-4)


def test_first_weights_are_kaiming_uniform_then_xavier_uniform_with_zero_biases() -> None:
    model = network(hidden_size=512)
    for layer, bound in (
        (model.first, math.sqrt(6 / kit.HIDDEN)),
        (model.second, math.sqrt(6 / 512)),
        (model.output, math.sqrt(6 / (512 + 5))),
    ):
        largest = float(layer.weight.detach().abs().max())
        assert 0.95 * bound < largest <= bound
        assert not layer.bias.any()


def test_dropout_is_for_training_alone() -> None:
    model = network(hidden_size=256)
    rows, none = torch.randn(4, kit.HIDDEN), torch.zeros(4)
    assert torch.equal(model(rows, none), model(rows, none))
    model.train()
    assert not torch.equal(model(rows, none), model(rows, none))


def test_of_equal_scores_the_smaller_size_is_chosen() -> None:
    model = network()
    torch.nn.init.zeros_(model.output.weight)
    assert model.sizes(torch.randn(2, kit.HIDDEN), [0.0, 1.0]) == [4, 4]


@pytest.mark.parametrize(
    ("size", "reach", "want"),
    [(16, 2, (14, 15, 16, 17, 18)), (16, 3, tuple(range(13, 20))), (3, 2, (2, 3, 4, 5))],
)
def test_candidates_lie_around_the_trained_size(
    size: int, reach: int, want: tuple[int, ...]
) -> None:
    assert around(size, reach) == want


def test_log_probabilities_leave_the_padding_of_the_head_out() -> None:
    logits = torch.randn(2, 12)
    logits[:, 10:] = 50.0  # what lies past the vocabulary must not take part
    found = log_probabilities(logits, 10)
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(2))
    torch.testing.assert_close(log_probabilities(logits + 7, 10), found, atol=1e-5, rtol=1e-5)


def test_the_expected_embedding_is_the_mean_row_under_the_distribution() -> None:
    logits, matrix = torch.randn(3, 9), torch.randn(11, 4)
    found = expected_embedding(logits, matrix)
    for row, got in zip(logits, found, strict=True):
        want = sum(p * matrix[token] for token, p in enumerate(row.softmax(-1)))
        torch.testing.assert_close(got, want)


def test_files_round_trip(tmp_path: Path) -> None:
    model = network(takes_temperature=True, training={"labels": "cost"})
    predictor.save(tmp_path, model, torch.float32)
    again = load(tmp_path)
    assert again.config == model.config
    rows, temperatures = torch.randn(5, kit.HIDDEN), torch.rand(5)
    assert torch.equal(again(rows, temperatures), model(rows, temperatures))


def test_a_predictor_made_for_another_drafter_is_refused(tmp_path: Path) -> None:
    predictor.save(tmp_path, network())
    with pytest.raises(CheckpointError, match=r"drafter_sha256 is d+; .*the drafter's e+"):
        load(tmp_path, "e" * 64)
    with pytest.raises(CheckpointError, match=r"input_size is 32; .*hidden_size = 48"):
        load(tmp_path, hidden_size=48)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("format", "draftwire-predictor/9", "format"),
        ("input", "hidden", "input"),
        ("candidates", [6, 5], "candidates"),
        ("candidates", [1, 2], "candidates"),
        ("candidates", [5], "candidates"),
        ("hidden_size", 25, "first.bias"),
        ("hidden_size", "wide", "predictor.json"),
        ("dropout", 1.0, "dropout"),
        ("drafter_sha256", None, "drafter_sha256"),
    ],
)
def test_a_damaged_description_is_refused_by_name(
    tmp_path: Path, field: str, value: Any, named: str
) -> None:
    predictor.save(tmp_path, network())
    path = tmp_path / predictor.CONFIG_FILE
    content = json.loads(path.read_text())
    content[field] = value
    if value is None:
        del content[field]
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError) as refused:
        load(tmp_path)
    assert named in refused.value.field


def test_missing_weights_are_named(tmp_path: Path) -> None:
    predictor.save(tmp_path, network())
    (tmp_path / predictor.WEIGHTS_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"predictor.safetensors is missing"):
        load(tmp_path)


def test_the_drafter_is_loaded_without_the_predictor_beside_it(tmp_path: Path) -> None:
    peer.write_checkpoint(tmp_path)
    alone = checkpoint.load(str(tmp_path), device=CPU)
    predictor.save(tmp_path, network(drafter_sha256=alone.base_sha256))
    both = checkpoint.load(str(tmp_path), device=CPU)
    assert both.sha256 == alone.sha256
    assert both.folder == tmp_path


async def started(folder: Path, **settings: Any) -> DrafterService:
    values: dict[str, Any] = {"checkpoint": str(folder), "cache_rows": 512, "log_level": "error"}
    service = DrafterService(Config(**values | settings))
    try:
        await service.start()
    finally:
        await service.close()
    return service


def start(folder: Path, **settings: Any) -> DrafterService:
    return asyncio.run(started(folder, **settings))


def test_the_service_refuses_at_start_a_predictor_of_another_drafter(tmp_path: Path) -> None:
    peer.write_checkpoint(tmp_path)
    predictor.save(tmp_path, network())
    with pytest.raises(ConfigError, match=r"--predictor.*drafter_sha256"):
        start(tmp_path)
    service = start(tmp_path, predictor="off")
    assert service._engine is not None
    assert service._engine.predictor.predictor is None


def test_a_folder_that_was_named_must_hold_a_predictor(tmp_path: Path) -> None:
    peer.write_checkpoint(tmp_path / "drafter")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"--predictor.*predictor.json is missing"):
        start(tmp_path / "drafter", predictor=str(tmp_path / "empty"))


def test_a_predictor_elsewhere_is_taken_if_it_was_made_for_the_drafter(
    tmp_path: Path,
) -> None:
    peer.write_checkpoint(tmp_path / "drafter")
    sha256 = checkpoint.load(str(tmp_path / "drafter"), device=CPU).base_sha256
    made = network()
    made.config = replace(made.config, drafter_sha256=sha256)
    predictor.save(tmp_path / "predictor", made)
    service = start(tmp_path / "drafter", predictor=str(tmp_path / "predictor"))
    assert service._engine is not None
    assert service._engine.predictor.largest == 8


def test_cut_off_weights_of_a_predictor_are_named(tmp_path: Path) -> None:
    predictor.save(tmp_path, network())
    path = tmp_path / "predictor.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert caught.value.field == "predictor.safetensors"


@pytest.mark.parametrize("text", ["Infinity", "-Infinity", "1" + "0" * 400])
def test_numbers_that_are_no_sizes_are_refused(tmp_path: Path, text: str) -> None:
    predictor.save(tmp_path, network())
    path = tmp_path / "predictor.json"
    for name in ("input_size", "hidden_size", "dropout"):
        content = json.loads(path.read_text()) | {name: "HERE"}
        other = tmp_path / name
        other.mkdir()
        (other / "predictor.json").write_text(json.dumps(content).replace('"HERE"', text))
        with pytest.raises(CheckpointError):
            load(other)

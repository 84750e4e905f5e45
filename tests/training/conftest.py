"""A tiny target and what it says about made-up sequences, shared by the tests of training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fakes import tiny_target
from training import kit

from drafter_service.training.features import Trajectory, read_features
from drafter_service.training.target import Target, load_target


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Target:
    return load_target(str(tiny_folder), invariant=False)


@pytest.fixture(scope="session")
def made_features(tiny: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kit.write_features(tiny, tmp_path_factory.mktemp("features"), kit.made_up(40))


@pytest.fixture(scope="session")
def trajectories(made_features: Path) -> list[Trajectory]:
    return list(read_features(made_features))

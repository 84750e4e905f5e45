"""The category temperature: found where it is known, kept in the checkpoint, used by the prior."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from drafter import kit as drafter_kit

from drafter_service.calibration import DEFAULTS, Calibration, Regime, parse
from drafter_service.training.categories import category_temperatures, with_categories
from drafter_service.training.features import Trajectory
from drafter_service.training.offline import Drafts


def drafts(trajectory: Trajectory, log_prior: list[float]) -> Drafts:
    """A branch that knows the answer's next tokens and one that knows nothing."""
    tokens = trajectory.tokens.numpy()
    first, slots = trajectory.prompt_length, 3
    anchors = len(tokens) - 1 - first
    ids = np.zeros((anchors, slots, 2), dtype=np.int64)
    for a in range(anchors):
        for s in range(slots):
            ids[a, s] = (tokens[min(first + 1 + a + s, len(tokens) - 1)], 255)
    logits = np.zeros((anchors, slots, 2, 2), dtype=np.float32)
    logits[:, :, 0, 0] = logits[:, :, 1, 1] = 9.0
    prior = np.tile(np.array(log_prior, dtype=np.float32), (anchors, 1))
    return Drafts(first, torch.zeros(anchors, slots, 2, 1), ids, logits, prior)


def with_chances(trajectory: Trajectory, chance: float) -> Trajectory:
    answer = trajectory.response
    logprobs = tuple(float(np.log(chance)) for _ in answer.logprobs)
    return replace(trajectory, response=replace(answer, logprobs=logprobs))


def test_a_prior_that_is_right_is_sharpened_and_one_that_is_wrong_is_flattened(
    trajectories: list[Trajectory],
) -> None:
    sure = with_chances(trajectories[0], 1.0)
    right, wrong = np.log([0.7, 0.3]).tolist(), np.log([0.2, 0.8]).tolist()
    assert category_temperatures([(sure, drafts(sure, right))]) == {(1.0, False): 0.25}
    assert category_temperatures([(sure, drafts(sure, wrong))]) == {(1.0, False): 4.0}


def test_a_prior_is_left_alone_where_its_temperature_changes_nothing(
    trajectories: list[Trajectory],
) -> None:
    # The target draws the token with a chance below the prior of the branch that has it, always.
    unsure = with_chances(trajectories[0], 1e-6)
    found = category_temperatures([(unsure, drafts(unsure, np.log([0.5, 0.5]).tolist()))])
    assert found == {(1.0, False): 1.0}


def test_regimes_take_what_was_measured_nearest_and_keep_it_in_the_checkpoint() -> None:
    found = {(0.0, False): 0.5, (0.7, True): 1.4, (1.5, True): 2.0}
    regimes = with_categories([*DEFAULTS, Regime(1.5, True, True)], found)
    assert [r.category for r in regimes] == [0.5, 1.4, 1.4, 2.0]
    kept = parse(Calibration(regimes).to_json())
    assert [r.category for r in kept.regimes] == [0.5, 1.4, 1.4, 2.0]
    # Between two measured temperatures lies what lies between their Z.
    between = kept.regime(1.25, filtered=True, coupled=True)
    assert between.category == pytest.approx(2.0)
    assert with_categories(DEFAULTS, {}) == DEFAULTS


def test_the_prior_is_divided_by_each_requests_own_temperature() -> None:
    model = drafter_kit.lively_model(drafter_kit.raw_config(draftwire={"branches": 3}))
    anchors = torch.randn(2, model.config.hidden_size)
    plain = model.log_prior(anchors)
    tempered = model.log_prior(anchors, torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(tempered[0], plain[0])
    torch.testing.assert_close(tempered[1], torch.log_softmax(plain[1] / 2, dim=-1))

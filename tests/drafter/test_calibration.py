"""Calibrations as they are kept: read, refused, and looked up between what was measured."""

from __future__ import annotations

from typing import Any

import pytest
from drafter import kit

from drafter_service.calibration import DEFAULTS, NGRAM_LENGTHS, Calibration, Regime, parse
from drafter_service.draft_config import CheckpointError
from drafter_service.draft_config import parse as parse_config


def measured() -> Calibration:
    chances = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
    return Calibration(
        (
            Regime(0.0, False, False, 1.0, (1.1,), (0.9,), chances),
            Regime(0.5, False, True, 0.6, (1.0, 2.0), (0.9, 0.8), chances),
            Regime(1.0, False, True, 0.8, (2.0,), (0.7,), (0.0,) * 7),
            Regime(1.0, True, True, 0.7, (3.0,), (0.6,), (0.0,) * 7),
        )
    )


def test_what_is_kept_is_what_is_read() -> None:
    own = measured()
    raw = kit.raw_config(draftwire={"calibration": own.to_json()})
    assert parse_config(raw).calibration == own
    assert parse_config(kit.raw_config()).calibration.regimes == DEFAULTS


def test_a_temperature_between_two_measured_ones_lies_between_them() -> None:
    found = measured().regime(0.75, filtered=False, coupled=True)
    assert found.temperature == 0.75
    assert found.ratio == pytest.approx(0.7)
    assert found.spread == pytest.approx((1.5, 2.0))
    assert found.ngram[6] == pytest.approx(0.35)
    assert found.scale() == pytest.approx(0.7 * 0.75)


@pytest.mark.parametrize(("temperature", "spread"), [(0.1, 1.0), (9.0, 2.0)])
def test_outside_the_nearest_one_counts(temperature: float, spread: float) -> None:
    found = measured().regime(temperature, filtered=False, coupled=True)
    assert found.spread[0] == spread
    assert found.temperature == temperature


def test_filters_and_noise_have_regimes_of_their_own() -> None:
    own = measured()
    assert own.regime(1.0, filtered=True, coupled=True).spread == (3.0,)
    assert own.regime(0.0, filtered=True, coupled=True).spread == (1.1,)
    plain = own.regime(1.0, filtered=False, coupled=False)
    assert plain.spread == DEFAULTS[1].spread, "not measured here: the default"


def test_a_match_counts_as_the_longest_kept_that_is_not_longer() -> None:
    regime = measured().regimes[0]
    found = {n: regime.ngram_chance(n) for n in (0, 1, 2, 6, 9, 16)}
    index = NGRAM_LENGTHS.index
    assert found[0] == found[1] == 0.0
    assert found[2] == regime.ngram[0]
    assert found[6] == regime.ngram[index(5)]
    assert found[9] == regime.ngram[index(7)]
    assert found[16] == regime.ngram[6]


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"draft_temperature_ratio": 0}, "draft_temperature_ratio"),
        ({"spread": []}, "spread"),
        ({"spread": [float("nan")]}, "spread"),
        ({"reach": [1.5]}, "reach"),
        ({"ngram": [0.1, 0.2]}, "ngram"),
        ({"ngram": [1.0] * 7}, "ngram"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changed: dict[str, Any], field: str) -> None:
    raw = measured().to_json()
    raw["regimes"][1] |= changed
    with pytest.raises(CheckpointError) as caught:
        parse(raw)
    assert caught.value.field == f"draftwire.calibration.regimes[1].{field}"


@pytest.mark.parametrize("raw", [[], {}, {"ngram_lengths": [2], "regimes": []}, "none"])
def test_other_forms_are_refused(raw: object) -> None:
    with pytest.raises(CheckpointError):
        parse(raw)

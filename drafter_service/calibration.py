"""How a drafter's scores become chances: read from `draftwire.calibration` in config.json.

One regime for each way of sampling that was measured; a request uses the regime of its temperature,
or what lies between two of them. A checkpoint without calibration gets the defaults here, which
were measured with a weak drafter. Knows numbers only; `training.calibrate` measures them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drafter_service.refusal import CheckpointError

NGRAM_LENGTHS = (2, 3, 4, 5, 7, 10, 16)
"""The matches whose chances are kept: one of length n counts as the longest kept that is not
longer."""
HIGHEST = 0.99
GREEDY_CANDIDATES = 64
SAMPLED_CANDIDATES = 256


def candidates(temperature: float) -> int:
    """Candidates looked at in each slot. Where the target draws, its token is often one of many
    unlikely ones, and the shared noise finds it: measured for the demo, 256 give 3 % more accepted
    tokens than 64 at temperature 1 and nothing at 0.
    """
    return SAMPLED_CANDIDATES if temperature > 0 else GREEDY_CANDIDATES


@dataclass(frozen=True, slots=True)
class Regime:
    """One way of sampling. `temperature` is the target's; `filtered`: top-k or top-p is on;
    `coupled`: the order uses the target's noise.

    ratio: draft temperature as a multiple of the target's (at temperature 0: divides the logits).
    spread, reach: one value a slot, the last one for all further slots. A candidate's chance is
    reach times softmax(score / spread) over the slot's candidates; reach is the share of rounds in
    which the target's token is one of them.
    ngram: chance, by NGRAM_LENGTHS, that the target's token follows its match whatever the model
    says; the model keeps the rest.
    category: what the branches' log prior is divided by.
    """

    temperature: float
    filtered: bool = False
    coupled: bool = True
    ratio: float = 0.8
    spread: tuple[float, ...] = (1.5,)
    reach: tuple[float, ...] = (1.0,)
    ngram: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
    category: float = 1.0

    def scale(self) -> float:
        """What logits are divided by."""
        return self.ratio * self.temperature if self.temperature > 0 else self.ratio

    def ngram_chance(self, length: int) -> float:
        """Chance that a match of `length` tokens tells the next one."""
        chance = 0.0
        for kept, value in zip(NGRAM_LENGTHS, self.ngram, strict=True):
            if length >= kept:
                chance = value
        return chance


DEFAULTS = (
    Regime(0.0, False, False, 1.0, (1.0,), (0.97,), (0.15, 0.3, 0.45, 0.55, 0.7, 0.8, 0.95)),
    Regime(1.0, False, False, 1.0, (1.0,), (0.97,)),
    Regime(1.0, False, True, 0.8, (1.5,), (0.97,)),
)


@dataclass(frozen=True, slots=True)
class Calibration:
    """The regimes of a drafter."""

    regimes: tuple[Regime, ...] = DEFAULTS

    def regime(self, temperature: float, *, filtered: bool, coupled: bool) -> Regime:
        """The regime of a request. Where none was measured for this temperature, between the two
        nearest, or the nearest one; those with the same kind of filter are preferred.
        """
        greedy = temperature <= 0

        def fits(regime: Regime) -> bool:
            return (regime.temperature <= 0) == greedy and (greedy or regime.coupled == coupled)

        alike = [r for r in self.regimes if fits(r)] or [r for r in DEFAULTS if fits(r)]
        alike = [r for r in alike if greedy or r.filtered == filtered] or alike
        alike.sort(key=lambda r: r.temperature)
        below = [r for r in alike if r.temperature <= temperature]
        above = [r for r in alike if r.temperature >= temperature]
        low = below[-1] if below else above[0]
        high = above[0] if above else below[-1]
        width = high.temperature - low.temperature
        share = (temperature - low.temperature) / width if width > 0 else 0.0
        return Regime(
            0.0 if greedy else temperature,
            filtered,
            coupled and not greedy,
            low.ratio + share * (high.ratio - low.ratio),
            _between(low.spread, high.spread, share),
            _between(low.reach, high.reach, share),
            _between(low.ngram, high.ngram, share),
            low.category + share * (high.category - low.category),
        )

    def to_json(self) -> dict[str, Any]:
        """What config.json keeps."""
        return {
            "ngram_lengths": list(NGRAM_LENGTHS),
            "regimes": [
                {
                    "temperature": r.temperature,
                    "filtered": r.filtered,
                    "coupled": r.coupled,
                    "draft_temperature_ratio": _rounded([r.ratio])[0],
                    "spread": _rounded(r.spread),
                    "reach": _rounded(r.reach),
                    "ngram": _rounded(r.ngram),
                    "category_temperature": _rounded([r.category])[0],
                }
                for r in self.regimes
            ],
        }


UNCALIBRATED = Calibration()


def parse(raw: object) -> Calibration:
    """The content of `draftwire.calibration`; None gives the defaults. Raises CheckpointError."""
    if raw is None:
        return UNCALIBRATED
    if not isinstance(raw, Mapping):
        raise CheckpointError("draftwire.calibration", raw, "an object")
    lengths = raw.get("ngram_lengths")
    if lengths != list(NGRAM_LENGTHS):
        raise CheckpointError(
            "draftwire.calibration.ngram_lengths", lengths, f"{list(NGRAM_LENGTHS)}"
        )
    entries = raw.get("regimes")
    if not isinstance(entries, list) or not entries:
        raise CheckpointError("draftwire.calibration.regimes", entries, "a list of regimes")
    return Calibration(tuple(_regime(entry, number) for number, entry in enumerate(entries)))


def _regime(entry: object, number: int) -> Regime:
    where = f"draftwire.calibration.regimes[{number}]"
    if not isinstance(entry, Mapping):
        raise CheckpointError(where, entry, "an object")
    return Regime(
        temperature=_numbers(entry, where, "temperature", 0.0, 100.0)[0],
        filtered=bool(entry.get("filtered", False)),
        coupled=bool(entry.get("coupled", False)),
        ratio=_numbers(entry, where, "draft_temperature_ratio", 0.01, 100.0)[0],
        spread=_numbers(entry, where, "spread", 0.01, 100.0),
        reach=_numbers(entry, where, "reach", 1e-6, 1.0),
        ngram=_numbers(entry, where, "ngram", 0.0, HIGHEST, len(NGRAM_LENGTHS)),
        category=_numbers(entry, where, "category_temperature", 0.01, 100.0)[0]
        if "category_temperature" in entry
        else 1.0,
    )


def _numbers(
    entry: Mapping[str, Any], where: str, name: str, low: float, high: float, count: int = 0
) -> tuple[float, ...]:
    """The number or the numbers of a field, all in [low, high]; `count` 0: at least one."""
    value = entry.get(name)
    values: list[Any] = value if isinstance(value, list) else [value]
    fits = bool(values) and (count == 0 or len(values) == count)
    for one in values:
        number = not isinstance(one, bool) and isinstance(one, int | float)
        if not number or not low <= one <= high:
            fits = False
    if not fits:
        many = f"{count} numbers" if count else "numbers"
        raise CheckpointError(f"{where}.{name}", value, f"{many} in [{low:g}, {high:g}]")
    return tuple(float(one) for one in values)


def _between(low: Sequence[float], high: Sequence[float], share: float) -> tuple[float, ...]:
    longest = max(len(low), len(high))
    pairs = zip(_stretched(low, longest), _stretched(high, longest), strict=True)
    return tuple(a + share * (b - a) for a, b in pairs)


def _stretched(values: Sequence[float], count: int) -> list[float]:
    return [values[min(i, len(values) - 1)] for i in range(count)]


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]

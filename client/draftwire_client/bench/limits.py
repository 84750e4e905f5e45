"""What a run must keep: SLOs of each request (goodput), constraints on the figures.

Knows both notations and judges. Does not know how figures come about.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from draftwire_client.bench.summary import SLO_METRICS
from draftwire_client.errors import InvalidArgument

_COMPARE = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_CONSTRAINT = re.compile(rf"\s*(?:(.+)\.)?([a-z][a-z0-9_.]*?)\s*(<=|>=|==|<|>)\s*({_NUMBER})\s*")


@dataclass(frozen=True, slots=True)
class Constraint:
    """`[ARM.]KEY OP NUMBER`, on a key of the JSON result."""

    text: str
    arm: str
    key: str
    compare: str
    limit: float

    def met_by(self, value: float | None) -> bool:
        """Whether the value keeps it; nothing measured does not."""
        return value is not None and bool(_COMPARE[self.compare](value, self.limit))


@dataclass(frozen=True, slots=True)
class Verdict:
    """A constraint with what was measured."""

    text: str
    value: float | None
    met: bool


def parse_goodput(items: Iterable[str]) -> dict[str, float]:
    """`ttft:500 tpot:50 e2el:5000`, limits in milliseconds. Raises InvalidArgument."""
    found: dict[str, float] = {}
    for item in " ".join(items).replace(",", " ").split():
        name, _, value = item.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in SLO_METRICS or not limit >= 0:
            form = f"NAME:MILLISECONDS with NAME of {', '.join(SLO_METRICS)}"
            raise InvalidArgument("--goodput", item, form)
        found[name] = limit
    return found


def parse_constraints(items: Iterable[str], arms: Iterable[str]) -> tuple[Constraint, ...]:
    """`p99_ttft_ms<500`, `adaptive.speedup_decode>=0.95`. Raises InvalidArgument."""
    names = set(arms)
    found = []
    for item in items:
        match = _CONSTRAINT.fullmatch(item)
        if match is None:
            raise InvalidArgument("--require", item, "[ARM.]KEY OP NUMBER, OP of < <= > >= ==")
        arm, key, compare, limit = match.groups(default="")
        if arm and arm not in names:
            raise InvalidArgument("--require", item, f"an arm of {', '.join(sorted(names))}")
        found.append(Constraint(item.strip(), arm, key, compare, float(limit)))
    return tuple(found)


def check_names(constraints: Iterable[Constraint], results: Mapping[str, Any]) -> None:
    """Refuse keys that a result does not have, before anything is measured.

    Raises InvalidArgument.
    """
    for constraint in constraints:
        place = _place(constraint, results)
        if constraint.key not in place or not _numeric(place[constraint.key]):
            known = sorted(key for key, value in place.items() if _numeric(value))
            raise InvalidArgument("--require", constraint.text, f"a key of {', '.join(known)}")


def judge(constraints: Iterable[Constraint], results: Mapping[str, Any]) -> list[Verdict]:
    """Every constraint with its value."""
    found = []
    for constraint in constraints:
        value = _place(constraint, results).get(constraint.key)
        measured = float(value) if isinstance(value, int | float) else None
        found.append(Verdict(constraint.text, measured, constraint.met_by(measured)))
    return found


def _place(constraint: Constraint, results: Mapping[str, Any]) -> Mapping[str, Any]:
    if not constraint.arm:
        return results
    arms: Mapping[str, Mapping[str, Any]] = results["arms"]
    if constraint.arm not in arms:
        raise InvalidArgument("--require", constraint.text, f"an arm served: {', '.join(arms)}")
    return arms[constraint.arm]


def _numeric(value: object) -> bool:
    # None: nothing was measured yet.
    return value is None or isinstance(value, int | float)

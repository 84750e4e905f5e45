"""Which way of drafting is best, chosen on one set of answers and read on another.

Knows rows of reports of `draftwire-train evaluate`. Does not know answers or drafters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drafter_service.training.errors import TrainingError

Row = Mapping[str, Any]


def best(results: Sequence[Row], within: int) -> list[dict[str, Any]]:
    """Of each regime the mode with the largest mean acceptance length within `within` nodes, and
    how far the second one is behind. Of equal ones that of fewer nodes.
    """
    found = []
    for regime in sorted({row["regime"] for row in results}):
        own = [row for row in results if row["regime"] == regime and row["nodes"] <= within]
        ranked = sorted(own, key=lambda row: (-row["acceptance_length"], row["nodes"], row["mode"]))
        if not ranked:
            continue
        second = ranked[1] if len(ranked) > 1 else None
        found.append(
            _named(ranked[0])
            | {"second": None if second is None else _named(second), "modes": len(ranked)}
        )
    return found


def read_on(
    validation: Mapping[str, Any], results: Sequence[Row], within: int
) -> list[dict[str, Any]]:
    """Of each regime of `results` the mode that is best in the report `validation`, with what it
    reached there and here. Raises TrainingError if that report has nothing for a regime, or this
    one has not that mode.
    """
    rows = {(row["regime"], row["mode"], row["nodes"]): row for row in results}
    picked = {row["regime"]: row for row in best(validation["results"], within)}
    found = []
    for regime in sorted({row["regime"] for row in results}):
        if regime not in picked:
            raise TrainingError(f"chosen_on: nothing for {regime} within {within} nodes")
        choice = picked[regime]
        here = rows.get((regime, choice["mode"], choice["nodes"]))
        if here is None:
            raise TrainingError(
                f"chosen_on: {choice['mode']} of {choice['nodes']} nodes was not replayed here"
            )
        found.append(
            _named(here) | {"on_validation": [choice["acceptance_length"], *choice["interval_95"]]}
        )
    return found


def _named(row: Row) -> dict[str, Any]:
    kept = ("regime", "mode", "nodes", "acceptance_length", "interval_95")
    return {name: row[name] for name in kept}

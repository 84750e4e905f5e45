"""The results as a table on the terminal, a column an arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftwire_client.bench.summary import percentile_key

_PLAIN = (
    ("completed", "Completed", "d"),
    ("failed", "Failed", "d"),
    ("request_throughput", "Requests/s", ".2f"),
    ("request_goodput", "Goodput/s", ".2f"),
    ("output_throughput", "Output tokens/s", ".1f"),
    ("total_input_tokens", "Input tokens", "d"),
    ("total_output_tokens", "Output tokens", "d"),
)
_SPECULATION = (
    ("spec_decode_acceptance_length", "Acceptance length", ".2f"),
    ("spec_decode_acceptance_rate", "Accepted, %", ".1f"),
    ("spec_decode_num_drafts", "Rounds drafted", "d"),
    ("plain_rounds", "Plain rounds", "d"),
)
_AGAINST = (
    ("same_tokens", "Same tokens", "d"),
    ("different_tokens", "Different tokens", "d"),
)
_SPEEDUPS = (("decode", "Speed-up, decode"), ("e2el", "Speed-up, E2EL"), ("ttft", "Speed-up, TTFT"))
NAMES = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "chunk_gap": "Chunk gap",
    "e2el": "E2EL",
    "queue": "Client queue",
}
Row = tuple[str, list[str]]


def columns(results: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Heading to figures: each arm, or the run if there is one arm."""
    arms: dict[str, Mapping[str, Any]] = dict(results["arms"])
    return {**arms, "all": results} if len(arms) > 1 else arms


def rows(
    results: Mapping[str, Any], shown: Sequence[str], percentiles: Sequence[float]
) -> list[Row]:
    """Label and one cell a column; rows without any figure are left out."""
    places = list(columns(results).values())
    found = [_row(label, [_cell(p.get(key), form) for p in places]) for key, label, form in _PLAIN]
    for metric in shown:
        middle = () if 50 in percentiles else ("median",)
        for prefix in ("mean", *middle, *map(percentile_key, percentiles)):
            cells = [_milliseconds(place.get(f"{prefix}_{metric}_ms")) for place in places]
            found.append(_row(f"{NAMES[metric]} {prefix}, ms", cells))
    for key, label, form in (*_SPECULATION, *_AGAINST):
        found.append(_row(label, [_cell(place.get(key), form) for place in places]))
    for metric, label in _SPEEDUPS:
        found.append(_row(label, [_interval(place, f"speedup_{metric}") for place in places]))
    energy = [_cell(place.get("energy_per_token_j"), ".3f") for place in places]
    found.append(_row("Energy, J a token", energy))
    return [row for row in found if any(row[1])]


def notes(results: Mapping[str, Any]) -> list[str]:
    """What has to be said besides the figures."""
    found = [f"client was a bottleneck: {text}" for text in results["client"]["troubles"]]
    if found:
        found.append("more --workers, or a machine of its own, would measure the server alone")
    if results["clipped_prompts"]:
        found.append(f"{results['clipped_prompts']} prompts were cut to what the target allows")
    for text, count in results["errors_by_text"].items():
        found.append(f"{count} x {text}")
    if results["energy_note"]:
        what = "no energy figure" if results["energy_j"] is None else "energy"
        found.append(f"{what}: {results['energy_note']}")
    for verdict in results["constraints"]:
        value = verdict["value"]
        shown = "nothing measured" if value is None else f"{value:.6g}"
        found.append(f"{'met' if verdict['met'] else 'NOT MET'}: {verdict['text']} ({shown})")
    counters = results.get("counters")
    if counters is not None and counters["agree"]:
        found.append("acceptance: answers and server counters agree")
    for failure in results["failures"]:
        if failure["kind"] != "constraint":
            found.append(f"FAILED: {failure['text']}")
    return found


def show(results: Mapping[str, Any], shown: Sequence[str], percentiles: Sequence[float]) -> None:
    """Print table and notes to stdout."""
    from rich.console import Console
    from rich.table import Table

    model = results["model_id"] or "a model without a name"
    title = f"{model}, {results['dataset_name']}, {results['duration']:.1f} s"
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for name in columns(results):
        table.add_column(name, justify="right", no_wrap=True)
    for label, cells in rows(results, shown, percentiles):
        table.add_row(label, *cells)
    console = Console()
    if not console.is_terminal:
        # Nothing is cut where the text goes to a file.
        console = Console(width=60 + 22 * len(results["arms"]))
    console.print(table)
    for note in notes(results):
        console.print(note, highlight=False, markup=False)


def _row(label: str, cells: list[str]) -> Row:
    return label, cells


def _cell(value: object, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else ""


def _milliseconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if value < 100 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _interval(place: Mapping[str, Any], key: str) -> str:
    cell = [place.get(f"{key}{end}") for end in ("", "_low", "_high")]
    if None in cell:
        return ""
    value, low, high = cell
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"

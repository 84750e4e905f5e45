"""One HTML file that says everything about a run and fetches nothing.

Knows the page's order and its style for light and dark. What the plots show is `charts`.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from draftwire_client.bench import charts
from draftwire_client.bench.charts import Chart
from draftwire_client.bench.measure import Record
from draftwire_client.bench.table import columns, notes, rows

# Eight colours that differ in lightness too; s9 is a failure. Contrast 3:1 on both grounds.
_LIGHT = ("#1f5fbf", "#c2510c", "#1c7c54", "#8a3ffc", "#b02a5b", "#007d8a", "#7a6200", "#5a5f66")
_DARK = ("#79aef5", "#f0995c", "#5fc79a", "#c29bff", "#f08ab0", "#4cc3d0", "#d6bd4d", "#aeb4bb")


def _colours(values: Sequence[str], failed: str) -> str:
    rows = [f"--s{i}:{value};" for i, value in enumerate(values)]
    return "".join(rows) + f"--s9:{failed};"


_STYLE = f"""
:root{{color-scheme:light dark;--ground:#fff;--ink:#1b1f24;--soft:#5b636d;--rule:#d9dde2;
--panel:#f6f7f9;--good:#1c7c54;--bad:#b3261e;{_colours(_LIGHT, "#b3261e")}}}
@media (prefers-color-scheme:dark){{:root{{--ground:#14171b;--ink:#e8eaed;--soft:#a2aab4;
--rule:#343a42;--panel:#1c2026;--good:#5fc79a;--bad:#ff8a80;{_colours(_DARK, "#ff8a80")}}}}}
*{{box-sizing:border-box}}
body{{margin:0 auto;max-width:1200px;padding:28px 24px 60px;background:var(--ground);
color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}}
h1{{font-size:24px;margin:0 0 4px}}h2{{font-size:18px;margin:36px 0 12px}}
h3{{font-size:15px;margin:0}}p{{margin:4px 0}}.soft,figcaption span{{color:var(--soft)}}
.tiles{{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:12px;
margin:18px 0}}.tile{{background:var(--panel);border-radius:8px;padding:12px 14px}}
.tile b{{display:block;font-size:22px;font-variant-numeric:tabular-nums}}
.grid{{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:18px}}
figure{{margin:0;padding:12px 14px;background:var(--panel);border-radius:8px;min-width:0}}
figure.wide{{grid-column:1/-1}}svg{{display:block;width:100%;height:auto;margin-top:6px}}
.legend{{display:flex;flex-wrap:wrap;gap:4px 14px;font-size:13px;margin-top:4px}}
.legend i{{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:5px}}
.scroll{{overflow-x:auto}}table{{border-collapse:collapse;width:100%;
font-variant-numeric:tabular-nums}}th,td{{padding:4px 10px;text-align:right;
border-bottom:1px solid var(--rule);white-space:nowrap}}th:first-child,td:first-child
{{text-align:left}}th{{font-weight:600}}ul{{margin:6px 0;padding-left:20px}}
.bad{{color:var(--bad)}}.good{{color:var(--good)}}details{{margin-top:10px}}
pre{{overflow:auto;max-height:420px;background:var(--panel);padding:12px;border-radius:8px;
font-size:12px}}
svg text{{fill:var(--soft);font-size:12px;font-family:inherit}}svg .label{{fill:var(--ink)}}
svg .value{{fill:var(--ink);text-anchor:middle}}svg .event{{fill:var(--ink);font-size:11px}}
svg path{{fill:none}}.axis{{stroke:var(--soft)}}svg .grid{{display:inline;stroke:var(--rule)}}
.mark{{stroke:var(--ink);stroke-dasharray:4 3;stroke-width:1.2}}
.whisker{{stroke:var(--ink);stroke-width:1.5}}.line{{fill:none;stroke-width:2}}
.dot{{fill-opacity:.75}}
""" + "".join(
    f".line.s{i}{{stroke:var(--s{i})}}.bar.s{i},.dot.s{i}{{fill:var(--s{i})}}"
    for i in (*range(8), 9)
)


def render(
    results: Mapping[str, Any],
    records: Sequence[Record],
    *,
    shown: Sequence[str],
    percentiles: Sequence[float],
) -> str:
    """The page."""
    arms = list(results["arms"])
    title = results["label"] or f"{results['model_id'] or 'load test'}: {', '.join(arms)}"
    sections = [
        _head(title, results),
        _tiles(charts.headline(results, records)),
        _verdict(results),
        _section("Arms" if len(arms) > 1 else "Figures", [_table(results, shown, percentiles)]),
        _plots("Speed-up and acceptance", [*charts.speedups(results), *charts.acceptance(results)]),
        _plots("Over time", charts.timeline(records, results, arms)),
        _plots("Latency", charts.latency_cdfs(records, arms)),
        _section("Events", [_events(results["events"])] if results["events"] else []),
        _section("Conditions", [_conditions(results)]),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(sections)}</body></html>\n"
    )


def _head(title: str, results: Mapping[str, Any]) -> str:
    load = f"{results['load']} loop"
    if results["load"] == "open":
        rate = results["offered_rate"]
        load += f", {rate:.3g} requests/s offered" if rate else ", all at once"
    if results["max_concurrency"]:
        load += f", at most {results['max_concurrency']} at a time"
    words = [
        f"{results['date']} UTC",
        f"data: {results['dataset_file'] or results['dataset_name']}",
        load,
        f"{results['duration']:.1f} s",
        f"seed {results['seed']}",
    ]
    return f"<h1>{_text(title)}</h1><p class=soft>draftwire bench · {_text(' · '.join(words))}</p>"


def _tiles(figures: Mapping[str, str]) -> str:
    tiles = (f"<div class=tile>{_text(k)}<b>{_text(v)}</b></div>" for k, v in figures.items())
    return f"<div class=tiles>{''.join(tiles)}</div>"


def _verdict(results: Mapping[str, Any]) -> str:
    failures = results["failures"]
    head = (
        f"<p class=bad><b>{len(failures)} check(s) failed</b></p>"
        if failures
        else "<p class=good><b>All checks passed</b></p>"
    )
    items = [
        *(f"<li class=bad>{_text(failure['text'])}</li>" for failure in failures),
        *(f"<li>{_text(note)}</li>" for note in notes(results) if not note.startswith("FAILED")),
    ]
    return head + (f"<ul>{''.join(items)}</ul>" if items else "")


def _table(results: Mapping[str, Any], shown: Sequence[str], percentiles: Sequence[float]) -> str:
    heads = "".join(f"<th>{_text(name)}</th>" for name in ("", *columns(results)))
    body = "".join(
        f"<tr><td>{_text(label)}</td>{''.join(f'<td>{_text(cell)}</td>' for cell in cells)}</tr>"
        for label, cells in rows(results, shown, percentiles)
    )
    return (
        f"<div class=scroll><table><thead><tr>{heads}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _plots(title: str, drawn: Sequence[Chart]) -> str:
    figures = []
    for chart in drawn:
        legend = "".join(
            f'<span><i style="background:var(--s{i})"></i>{_text(name)}</span>'
            for i, name in enumerate(chart.series)
        )
        figures.append(
            f"<figure{' class=wide' if chart.wide else ''}><figcaption><h3>{_text(chart.title)}"
            f"</h3><span>{_text(chart.note)}</span><div class=legend>{legend}</div></figcaption>"
            f"{chart.svg}</figure>"
        )
    return _section(title, [f"<div class=grid>{''.join(figures)}</div>"] if figures else [])


def _events(events: Iterable[Mapping[str, Any]]) -> str:
    items = (
        f"<li>{event['at']:.2f} s: {_text(event['name'])} {_text(event['detail'])}</li>"
        for event in events
    )
    return f"<ul>{''.join(items)}</ul>"


_LONGEST = 30


def _conditions(results: Mapping[str, Any]) -> str:
    kept = {
        key: value
        for key, value in results.items()
        if key != "arms" and not (isinstance(value, list) and len(value) > _LONGEST)
    }
    text = json.dumps(kept, indent=1, ensure_ascii=False, default=str)
    summary = "The result as JSON, without lists"
    return f"<details><summary>{summary}</summary><pre>{_text(text)}</pre></details>"


def _section(title: str, parts: Sequence[str]) -> str:
    return f"<h2>{_text(title)}</h2>{''.join(parts)}" if parts else ""


def _text(value: str) -> str:
    return html.escape(value)

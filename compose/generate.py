"""Writes what operators look at from the code: METRICS.md and the Grafana dashboard.

`python compose/generate.py` rewrites both files; a test makes them again and compares. Knows the
metric table and Grafana's model (grafana-foundation-sdk). Does not know the services.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from panels import ROWS

from draftwire.metric_table import LABELS, TABLE, Metric, of_service

HERE = Path(__file__).resolve().parent
METRICS = HERE / "METRICS.md"
DASHBOARD = HERE / "grafana" / "dashboards" / "draftwire.json"
RULES = HERE / "prometheus" / "rules.yml"


def dashboard() -> str:
    """The dashboard as Grafana imports it."""
    from grafana_foundation_sdk.builders import common, prometheus, timeseries
    from grafana_foundation_sdk.builders import dashboard as build
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.common import (
        LegendDisplayMode,
        LegendPlacement,
        StackingMode,
    )
    from grafana_foundation_sdk.models.dashboard import DataSourceRef

    source = DataSourceRef(type_val="prometheus", uid="${datasource}")
    instances = build.QueryVariable("instance").query("label_values(draftwire_serving, instance)")
    board = (
        build.Dashboard("Draftwire")
        .uid("draftwire")
        .tags(["draftwire"])
        .refresh("15s")
        .time("now-30m", "now")
        .with_variable(build.DatasourceVariable("datasource").type("prometheus"))
        .with_variable(instances.datasource(source).multi(True).include_all(True))
    )
    number = 0
    for name, row in ROWS.items():
        number += 1
        board = board.with_row(build.Row(name).id(number))
        for panel in row:
            number += 1
            plot = (
                timeseries.Panel()
                .id(number)
                .title(panel.title)
                .unit(panel.unit)
                .min(0)
                .datasource(source)
                .span(panel.width)
                .height(7)
                .fill_opacity(20 if panel.stacked else 0)
                .legend(
                    common.VizLegendOptions()
                    .display_mode(LegendDisplayMode.LIST)
                    .placement(LegendPlacement.BOTTOM)
                    .show_legend(True)
                )
            )
            if panel.stacked:
                plot = plot.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
            for index, (query, legend) in enumerate(panel.queries):
                target = prometheus.Dataquery().ref_id(chr(ord("A") + index))
                plot = plot.with_target(target.expr(query).legend_format(legend))
            board = board.with_panel(plot)
    return JSONEncoder(sort_keys=True, indent=2).encode(board.build()) + "\n"


def markdown() -> str:
    """METRICS.md: the table of metrics, the values of labels, the alerts."""
    lines = [
        "# Metrics and alerts",
        "",
        "Written by `compose/generate.py` from `protos/draftwire/metric_table.py` and",
        "`compose/prometheus/rules.yml`; tests hold it against the code and against a live scrape.",
        "Both services serve their metrics at `/metrics` of `--metrics-listen` (off by default;",
        "9464 and 9465 in `compose/`).",
        "",
        "Every value of every label is listed, so no label grows without bound. Series are there",
        "as 0 from the start but for those marked *: they appear with their first value. A",
        "histogram `x` gives `x_bucket`, `x_sum` and `x_count`.",
        "",
    ]
    for title, service, other in (
        ("Verifier", "verifier", "drafter"),
        ("Drafter", "drafter", "verifier"),
    ):
        lines += _section(title, [m for m in of_service(service) if other not in m.services])
    lines += _section("Both", [m for m in TABLE.values() if len(m.services) > 1])
    lines += ["## Values of labels", "", "| values | are |", "|---|---|"]
    for name, values in LABELS.items():
        numbers = values == tuple(str(n) for n in range(len(values)))
        shown = f"{values[0]} to {values[-1]}" if numbers else ", ".join(values)
        lines.append(f"| {name} | {shown} |")
    lines += ["", "## Alerts", "", "| alert | when | what to do |", "|---|---|---|"]
    for alert in alerts():
        held = f", for {alert['for']}" if "for" in alert else ""
        when = " ".join(alert["expr"].split()).replace("|", "\\|")
        what = " ".join(alert["annotations"]["runbook"].split())
        lines.append(f"| {alert['alert']} | `{when}`{held} | {what} |")
    return "\n".join(lines) + "\n"


def alerts() -> list[dict[str, Any]]:
    """The alerts of rules.yml."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def _section(title: str, rows: list[Metric]) -> list[str]:
    lines = [f"## {title}", "", "| metric | kind | labels | what |", "|---|---|---|---|"]
    for metric in rows:
        labels = ", ".join(
            shown if shown == values else f"{shown} ({values})" for shown, values in metric.labels
        )
        notes = " Needs a GPU and nvidia-ml-py." if metric.gpu else ""
        star = "*" if metric.sparse else ""
        lines.append(f"| `{metric.name}`{star} | {metric.kind} | {labels} | {metric.help}{notes} |")
    return [*lines, ""]


def main() -> None:
    """Write both files."""
    METRICS.write_text(markdown(), encoding="utf-8")
    DASHBOARD.parent.mkdir(parents=True, exist_ok=True)
    DASHBOARD.write_text(dashboard(), encoding="utf-8")
    sys.stdout.write(f"{METRICS}\n{DASHBOARD}\n")


if __name__ == "__main__":
    main()

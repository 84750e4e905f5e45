"""Results on disk: JSON, a line of JSON a request, and the page."""

from __future__ import annotations

import json
from pathlib import Path

from draftwire_client.bench import page
from draftwire_client.bench.measure import line
from draftwire_client.bench.session import Outcome
from draftwire_client.bench.settings import Reporting


def save(outcome: Outcome, reporting: Reporting) -> list[Path]:
    """Write what is asked for; the files."""
    results, records = outcome.results, outcome.records
    reporting.folder.mkdir(parents=True, exist_ok=True)
    path = reporting.folder / (reporting.filename or _name(outcome))
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    written = [path]
    if reporting.request_log:
        log = path.with_suffix(".jsonl")
        rows = (json.dumps(line(record), ensure_ascii=False) for record in records)
        log.write_text("".join(f"{row}\n" for row in rows))
        written.append(log)
    if reporting.html:
        html = path.with_suffix(".html")
        html.write_text(
            page.render(results, records, shown=reporting.shown, percentiles=reporting.percentiles)
        )
        written.append(html)
    return written


def _name(outcome: Outcome) -> str:
    results = outcome.results
    rate, label = results["request_rate"], results["label"] or "draftwire"
    model = str(results["model_id"]).replace("/", "-").replace(":", "-")
    most = results["max_concurrency"]
    concurrency = f"-concurrency{most}" if most else ""
    return f"{label}-{rate}qps{concurrency}-{model}-{results['date']}.json"

"""Results on disk: JSON, a line of JSON a request, and the page."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

from draftwire_client.bench import page
from draftwire_client.bench.measure import line
from draftwire_client.bench.session import Outcome
from draftwire_client.bench.settings import Reporting
from draftwire_client.errors import InvalidArgument


def prepare(reporting: Reporting) -> None:
    """Make the folder, before anything is measured. Raises InvalidArgument if nothing could be
    written there."""
    try:
        reporting.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=reporting.folder):
            pass
    except OSError as error:
        limit = f"a folder that can be written to ({error})"
        raise InvalidArgument("--result-dir", str(reporting.folder), limit) from error


def save(outcome: Outcome, reporting: Reporting) -> list[Path]:
    """Write what is asked for; the files."""
    results, records = outcome.results, outcome.records
    path = reporting.folder / (reporting.filename or _name(outcome))
    text = json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")
    written = [path]
    if reporting.request_log:
        log = path.with_suffix(".jsonl")
        rows = (json.dumps(line(record), ensure_ascii=False) for record in records)
        log.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
        written.append(log)
    if reporting.html:
        html = path.with_suffix(".html")
        html.write_text(
            page.render(results, records, shown=reporting.shown, percentiles=reporting.percentiles),
            encoding="utf-8",
        )
        written.append(html)
    return written


def _name(outcome: Outcome) -> str:
    results = outcome.results
    rate, label = results["request_rate"], results["label"] or "draftwire"
    model = str(results["model_id"])
    most = results["max_concurrency"]
    concurrency = f"-concurrency{most}" if most else ""
    name = re.sub(r"[^\w.+ -]", "-", f"{label}-{rate}qps{concurrency}-{model}")
    return f"{name[:150]}-{results['date']}.json"

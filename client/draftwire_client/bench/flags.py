"""The flags of `draftwire bench`, with vLLM's names where vLLM has the same thing.

Knows names, types and help. What they become is `cli`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from draftwire_client.bench.arrivals import RAMPS
from draftwire_client.bench.datasets import NAMES
from draftwire_client.bench.summary import METRICS

Command = TypeVar("Command", bound=Callable[..., Any])

# Flags that take words until the next flag, as vLLM's do.
_MANY = ("--goodput", "--metadata", "--require", "--fault")


class ManyValues(click.Command):
    """A command some of whose flags take several words: `--goodput ttft:500 tpot:50`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        flag, spread = "", []
        for word in args:
            if word.startswith("--") or word == "-h":
                flag = word
                spread.append(word)
            elif flag in _MANY and spread[-1] != flag:
                spread += [flag, word]
            else:
                spread.append(word)
        return super().parse_args(ctx, spread)


def _file(**about: Any) -> click.Path:
    return click.Path(path_type=Path, **about)


_DATA = (
    click.option(
        "--dataset-name",
        type=click.Choice(NAMES),
        default="builtin",
        show_default=True,
        help="builtin: prompts of ours; custom: JSON lines; azure: an Azure LLM trace.",
    ),
    click.option(
        "--dataset-path", "path", type=_file(exists=True, dir_okay=False), help="File of the data."
    ),
    click.option(
        "--num-prompts",
        type=click.IntRange(min=1),
        help="Prompts, each asked once for each arm; default 100, or what the data has.",
    ),
    click.option(
        "--oversample/--no-oversample",
        default=False,
        help="Repeat prompts where the data has too few; otherwise that is an error.",
    ),
    click.option("--disable-shuffle", is_flag=True, help="Keep the order of the data."),
    click.option(
        "--skip-chat-template", is_flag=True, help="Send texts as they are, not as a chat."
    ),
    click.option(
        "--random-input-len",
        "--input-len",
        "input_len",
        type=click.IntRange(min=1),
        default=256,
        show_default=True,
        help="random: prompt tokens.",
    ),
    click.option(
        "--output-len",
        "--random-output-len",
        "--custom-output-len",
        "--sharegpt-output-len",
        "output_len",
        type=click.IntRange(min=1),
        help="Tokens to make; default: what the data says, else 128.",
    ),
    click.option(
        "--random-range-ratio",
        "range_ratio",
        type=float,
        default=0.0,
        show_default=True,
        help="random: lengths are drawn from length x [1 - r, 1 + r].",
    ),
    click.option(
        "--input-len-scale", "input_scale", type=float, default=1.0, help="azure: times prompts."
    ),
    click.option(
        "--output-len-scale", "output_scale", type=float, default=1.0, help="Times tokens to make."
    ),
    click.option("--max-input-len", type=click.IntRange(min=1), help="azure: cut prompts at."),
    click.option("--max-output-len", type=click.IntRange(min=1), help="Cut answers at."),
)
_LOAD = (
    click.option(
        "--request-rate",
        type=float,
        default=math.inf,
        show_default=True,
        help="Requests/s over all arms. azure: the trace is scaled to it.",
    ),
    click.option(
        "--burstiness",
        type=float,
        default=1.0,
        show_default=True,
        help="Shape of the gamma gaps: 1 is Poisson, below burstier, above steadier, inf fixed.",
    ),
    click.option(
        "--max-concurrency",
        type=click.IntRange(min=1),
        help="Requests in flight at most; without a rate this is a closed loop.",
    ),
    click.option("--ramp-up-strategy", type=click.Choice(RAMPS), help="How the rate moves."),
    click.option("--ramp-up-start-rps", type=float, help="Rate at the start."),
    click.option("--ramp-up-end-rps", type=float, help="Rate at the end."),
    click.option(
        "--time-scale",
        type=float,
        default=1.0,
        show_default=True,
        help="azure: seconds of replay for one of the trace; 0.1 is ten times as fast.",
    ),
    click.option(
        "--num-warmups",
        type=click.IntRange(min=0),
        help="Requests before the run, not counted; at least one an arm.",
    ),
    click.option(
        "--workers",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        help="Processes that send.",
    ),
    click.option(
        "--seed",
        type=click.IntRange(0, 2**63),
        default=0,
        show_default=True,
        help="Of all that is drawn.",
    ),
)
_ASKED = (
    click.option(
        "--arms",
        default="default",
        show_default=True,
        help="Ways to ask, compared in one run, the first is the baseline: plain, fixed:8, "
        "adaptive, predicted, default, fixed:8+nodes=7, fixed+parts=ngram/rank_tree.",
    ),
    click.option(
        "--skip-refused-arms", is_flag=True, help="Leave out arms that the server refuses."
    ),
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy."),
    click.option("--top-p", type=float, help="Nucleus."),
    click.option("--top-k", type=int, help="Only the k likeliest tokens."),
    click.option("--min-p", type=float, help="Least share of the likeliest token's probability."),
    click.option("--repetition-penalty", type=float, help="Above 1 avoids tokens already seen."),
    click.option("--presence-penalty", type=float, help="Subtracted for tokens of the output."),
    click.option("--frequency-penalty", type=float, help="Subtracted for each occurrence."),
    click.option("--ignore-eos", is_flag=True, default=None, help="Go on past the model's end."),
)
_CHECKS = (
    click.option(
        "--goodput",
        multiple=True,
        metavar="NAME:MS…",
        help="SLOs of a request, ms: ttft:500 tpot:50 e2el:5000 queue:10.",
    ),
    click.option(
        "--require",
        multiple=True,
        metavar="CONSTRAINT…",
        help="On a key of the result: 'p99_ttft_ms<500' 'adaptive.speedup_decode>=0.95'.",
    ),
    click.option(
        "--check-counters/--no-check-counters",
        default=True,
        help="Fail when answers and server counters disagree on acceptance.",
    ),
    click.option(
        "--check-equal/--no-check-equal", default=True, help="Fail when arms differ in tokens."
    ),
)
_FAULTS = (
    click.option(
        "--fault",
        multiple=True,
        metavar="FAULT…",
        help="drafter:kill@30s,restart@45s; also term, stop, cont.",
    ),
    click.option(
        "--drafter-pid",
        type=click.IntRange(min=2),  # 0 and below are process groups, 1 is nobody's drafter
        help="The drafter's process, for --fault.",
    ),
    click.option("--drafter-command", help="Starts the drafter and owns it; give it a fixed port."),
    click.option("--drafter-log", type=_file(dir_okay=False), help="File for its log."),
    click.option(
        "--poll-interval",
        "poll_s",
        type=click.FloatRange(min=0),
        default=1.0,
        show_default=True,
        help="Seconds between readings of the server's load for the timeline; 0 is off.",
    ),
)
_OUTPUT = (
    click.option(
        "--percentile-metrics",
        default="ttft,tpot,itl,e2el,queue",
        show_default=True,
        help=f"Shown in the table; of {', '.join(METRICS)}.",
    ),
    click.option(
        "--metric-percentiles", default="50,90,99", show_default=True, help="Percentiles."
    ),
    click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object."),
    click.option("--quiet", "--disable-tqdm", "quiet", is_flag=True, help="No progress."),
    click.option(
        "--save-result", is_flag=True, help="Write NAME.json, NAME.jsonl (requests), NAME.html."
    ),
    click.option("--save-detailed", is_flag=True, help="With lists of every request in the JSON."),
    click.option("--request-log/--no-request-log", default=True, help="Write NAME.jsonl."),
    click.option("--html/--no-html", default=True, help="Write NAME.html."),
    click.option(
        "--result-dir", "folder", type=_file(file_okay=False), default=".", help="Where to."
    ),
    click.option("--result-filename", "filename", help="NAME.json."),
    click.option("--label", help="Title of the result."),
    click.option("--metadata", multiple=True, metavar="KEY=VALUE…", help="Kept in the JSON."),
)


def bench_options(command: Command) -> Command:
    """Add every flag but those of the connection."""
    for option in reversed((*_DATA, *_LOAD, *_ASKED, *_CHECKS, *_FAULTS, *_OUTPUT)):
        command = option(command)
    return command

"""Everything a run is told. Knows names and defaults; the flags are in `cli`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftwire_client.bench.arms import Arm
from draftwire_client.bench.faults import Fault
from draftwire_client.bench.limits import Constraint
from draftwire_client.bench.plan import Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What is asked."""

    name: str = "builtin"
    path: Path | None = None
    num_prompts: int | None = None
    output_len: int | None = None
    input_len: int = 256
    range_ratio: float = 0.0
    shuffle: bool = True
    oversample: bool = False
    chat: bool = True
    input_scale: float = 1.0
    output_scale: float = 1.0
    max_input_len: int | None = None
    max_output_len: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporting:
    """What comes out, and where it goes."""

    percentiles: tuple[float, ...] = (50.0, 90.0, 99.0)
    shown: tuple[str, ...] = ("ttft", "tpot", "itl", "e2el", "queue")
    json: bool = False
    quiet: bool = False
    save_result: bool = False
    save_detailed: bool = False
    request_log: bool = True
    html: bool = True
    folder: Path = Path()
    filename: str | None = None
    label: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run."""

    connect: Mapping[str, Any]
    data: Data
    arms: Sequence[Arm]
    timing: Timing
    sampling: Mapping[str, Any]
    reporting: Reporting = field(default_factory=Reporting)
    seed: int = 0
    num_warmups: int | None = None
    workers: int = 1
    goodput: Mapping[str, float] = field(default_factory=dict)
    constraints: Sequence[Constraint] = ()
    check_counters: bool = True
    check_equal: bool = True
    skip_refused_arms: bool = False
    poll_s: float = 1.0
    faults: Sequence[Fault] = ()
    drafter_command: str | None = None
    drafter_pid: int | None = None
    drafter_log: Path | None = None

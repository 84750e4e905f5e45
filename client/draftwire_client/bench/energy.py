"""Energy of GPUs, where NVML answers: the server's as it says itself, else this machine's.

Knows NVML's total-energy counter. The server tells of the target's GPUs, wherever it is; where it
does not, this machine's are read, which means something only on the machine that serves. Without a
library, a driver or the counter there is no figure, and why is said.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from draftwire_client.info import Info


@dataclass(frozen=True, slots=True)
class Meter:
    """Joules that each GPU has used since its driver was loaded; None with why there is none."""

    joules: tuple[float, ...] | None
    note: str


def read(info: Info) -> Meter:
    """All GPUs' counters now; `info` is the server's, just asked for."""
    told = [device.energy_joules for device in info.devices]
    known = tuple(joules for joules in told if joules is not None)
    if known and len(known) == len(told):
        return Meter(known, f"{len(known)} GPU(s) of the target, as the server says")
    return _of_this_machine()


def _of_this_machine() -> Meter:
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return Meter(None, "the server tells none, and nvidia-ml-py is not installed here")
    try:
        nvml.nvmlInit()
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            used = tuple(nvml.nvmlDeviceGetTotalEnergyConsumption(h) / 1000 for h in handles)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        return Meter(None, f"the server tells none, and here NVML says: {error}")
    if not used:
        return Meter(None, "the server tells none, and NVML sees no GPU here")
    return Meter(used, f"{len(used)} GPU(s) of this machine, the whole of each")


def used(before: Meter, after: Meter, tokens: int) -> dict[str, Any]:
    """`energy_j` and `energy_per_token_j` (of output tokens) between two readings, as JSON."""
    note = before.note if before.joules is None else after.note
    if before.joules is None or after.joules is None or before.note != after.note:
        return {"energy_j": None, "energy_per_token_j": None, "energy_note": note}
    joules = sum(after.joules) - sum(before.joules)
    return {
        "energy_j": joules,
        "energy_per_token_j": joules / tokens if tokens else None,
        "energy_note": note,
    }

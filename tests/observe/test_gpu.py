"""What NVML says, as metrics. No machine of ours has a GPU: a stand-in answers for the driver's
library, with its units and its errors."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from observe.kit import scrape, total

from draftwire import gpu
from draftwire.exporter import Exporter

UUID = "GPU-0a1b2c3d-0000-0000-0000-000000000000"


class NVMLError(Exception):
    """As pynvml's."""


def stand_in(**changes: Any) -> ModuleType:
    """pynvml as far as it is used."""

    def handle(uuid: str) -> str:
        if uuid != UUID:
            raise NVMLError("Not Found")
        return "handle"

    module: Any = ModuleType("pynvml")
    calls = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": handle,
        "nvmlDeviceGetUtilizationRates": lambda h: SimpleNamespace(gpu=75, memory=10),
        "nvmlDeviceGetMemoryInfo": lambda h: SimpleNamespace(used=3 << 30, total=80 << 30),
        "nvmlDeviceGetPowerUsage": lambda h: 350_500,
        "nvmlDeviceGetTotalEnergyConsumption": lambda h: 12_345_678,
    }
    for name, call in (calls | changes).items():
        setattr(module, name, call)
    module.NVMLError = NVMLError
    return module


def scraped(meter: gpu.GpuMeter) -> dict[str, Any]:
    """The readings through the exporter."""
    with Exporter("verifier", [meter.readings]) as exporter:
        return scrape(exporter.open("127.0.0.1:0"))


def test_readings_have_the_units_of_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", stand_in())
    found = scraped(gpu.GpuMeter(UUID, "1"))
    assert total(found, "draftwire_gpu_utilization_ratio", gpu="1") == 0.75
    assert total(found, "draftwire_gpu_memory_bytes", gpu="1", state="used") == 3 << 30
    assert total(found, "draftwire_gpu_memory_bytes", gpu="1", state="total") == 80 << 30
    assert total(found, "draftwire_gpu_power_watts") == 350.5
    assert total(found, "draftwire_gpu_energy_joules_total") == 12345.678


def test_what_a_device_does_not_support_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(handle: str) -> int:
        raise NVMLError("Not Supported")

    without = stand_in(nvmlDeviceGetTotalEnergyConsumption=unsupported)
    monkeypatch.setitem(sys.modules, "pynvml", without)
    found = scraped(gpu.GpuMeter(UUID, "0"))
    assert "draftwire_gpu_energy_joules_total" not in found
    assert total(found, "draftwire_gpu_power_watts") == 350.5


def test_without_the_library_or_the_device_there_are_no_readings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu.GpuMeter(UUID, "0").readings() == []
    monkeypatch.setitem(sys.modules, "pynvml", stand_in())
    assert gpu.GpuMeter("GPU-unknown", "0").readings() == []


def test_a_cpu_has_no_meter() -> None:
    assert gpu.meter_of(torch.device("cpu")) is None
    assert gpu.meter_of("cpu") is None


@pytest.mark.gpu
def test_a_real_gpu_draws_power_and_has_memory() -> None:
    meter = gpu.meter_of(torch.device("cuda", 0))
    assert meter is not None
    found = scraped(meter)
    used = total(found, "draftwire_gpu_memory_bytes", state="used")
    assert 0 < used < total(found, "draftwire_gpu_memory_bytes", state="total")
    assert total(found, "draftwire_gpu_power_watts") > 0

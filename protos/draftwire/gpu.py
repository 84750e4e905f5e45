"""What NVML says of the GPU a service runs on: utilisation, memory, power, energy.

Knows nvidia-ml-py (the `gpu` extra), loaded lazily; a machine without it or without a driver gives
no readings. Does not know torch: the device is named by its UUID.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from draftwire import logs
from draftwire.meters import Reading
from draftwire.v1 import types_pb2

_FIELDS = {
    ("draftwire_gpu_utilization_ratio",): "utilization",
    ("draftwire_gpu_memory_bytes", "used"): "memory_used_bytes",
    ("draftwire_gpu_memory_bytes", "total"): "memory_total_bytes",
    ("draftwire_gpu_power_watts",): "power_watts",
    ("draftwire_gpu_energy_joules_total",): "energy_joules",
}


class GpuMeter:
    """Readings of one device; `uuid` like "GPU-…", `label` its number in the metrics."""

    def __init__(self, uuid: str, label: str) -> None:
        self._label = label
        self._nvml: Any = None
        self._handle: Any = None
        log = logs.get_logger("draftwire.gpu")
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            self._nvml = pynvml
        except ImportError:
            log.info("no GPU metrics: nvidia-ml-py is not installed (draftwire[gpu])")
        except pynvml.NVMLError as error:
            log.warning("no GPU metrics", uuid=uuid, error=str(error))

    def readings(self) -> Iterable[Reading]:
        """What the device supports; what it does not is left out."""
        if self._nvml is None:
            return []
        return list(self._read(self._nvml, self._handle))

    def describe(self) -> types_pb2.DeviceInfo | None:
        """The readings as GetInfo carries them; None if there are none."""
        readings = list(self.readings())
        if not readings:
            return None
        info = types_pb2.DeviceInfo(index=int(self._label))
        for reading in readings:
            setattr(info, _FIELDS[reading.name, *reading.labels[1:]], reading.value)
        return info

    def _read(self, nvml: Any, handle: Any) -> Iterator[Reading]:
        gpu = (self._label,)

        def ask(query: Callable[[Any], Any]) -> Any:
            try:
                return query(handle)
            except nvml.NVMLError:
                return None

        if (rates := ask(nvml.nvmlDeviceGetUtilizationRates)) is not None:
            yield Reading("draftwire_gpu_utilization_ratio", rates.gpu / 100, gpu)
        if (memory := ask(nvml.nvmlDeviceGetMemoryInfo)) is not None:
            yield Reading("draftwire_gpu_memory_bytes", memory.used, (*gpu, "used"))
            yield Reading("draftwire_gpu_memory_bytes", memory.total, (*gpu, "total"))
        if (milliwatts := ask(nvml.nvmlDeviceGetPowerUsage)) is not None:
            yield Reading("draftwire_gpu_power_watts", milliwatts / 1e3, gpu)
        if (millijoules := ask(nvml.nvmlDeviceGetTotalEnergyConsumption)) is not None:
            yield Reading("draftwire_gpu_energy_joules_total", millijoules / 1e3, gpu)


def meter_of(device: Any) -> GpuMeter | None:
    """The meter of a torch device; None for anything but a CUDA device."""
    if getattr(device, "type", "") != "cuda":
        return None
    import torch

    index = device.index if device.index is not None else torch.cuda.current_device()
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return GpuMeter(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}", str(index))

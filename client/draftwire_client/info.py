"""What a verifier says about itself: frozen dataclasses, times in seconds.

Knows the shape only; `responses` reads it from the contract.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from draftwire_client.enums import ElementType, LaneState
from draftwire_client.types import Acceptance


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The target model."""

    name: str
    dtype: ElementType
    vocab_size: int
    embedding_rows: int
    hidden_size: int
    num_layers: int
    max_context: int
    tokenizer_sha256: str
    vocabulary_sha256: str
    template_sha256: str
    weights_sha256: str


@dataclass(frozen=True, slots=True)
class LaneInfo:
    """A drafter lane as the verifier sees it; times in seconds."""

    target: str
    state: LaneState
    drafter_name: str
    trained: bool
    sessions: int
    round_trip_s: float
    model_time_s: float
    block_size: int
    losses: int
    last_error: str
    steps_sent: int
    steps_received: int


@dataclass(frozen=True, slots=True)
class LoadInfo:
    """Load of a verifier."""

    running: int
    waiting: int
    free_pages: int
    total_pages: int
    page_size: int
    steps: int
    tokens: int


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A GPU as NVML tells it on the server; None: the device does not tell."""

    index: int
    utilization: float | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    power_watts: float | None
    energy_joules: float | None


@dataclass(frozen=True, slots=True)
class Info:
    """What a verifier is and does; `config` is its effective configuration by flag name."""

    package_version: str
    protocol_minor: int
    instance_id: str
    uptime_s: float
    draining: bool
    model: ModelInfo
    config: Mapping[str, str]
    lanes: tuple[LaneInfo, ...]
    load: LoadInfo
    totals: Acceptance
    devices: tuple[DeviceInfo, ...] = ()

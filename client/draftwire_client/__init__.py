"""Draftwire's client: text from a verifier, streamed or whole, from threads or asyncio.

`Client` and `AsyncClient` are made by `connect`. Everything a user needs is a name of this package;
the command line is in `draftwire_client.cli`, a scripted server for tests in
`draftwire_client.testing`.
"""

from draftwire_client.aio import AsyncClient, AsyncStream
from draftwire_client.batch import BatchItem, BatchProgress, BatchRequest
from draftwire_client.client import Client, Stream
from draftwire_client.config import (
    KeepAliveConfig,
    LoadBalancingConfig,
    RetryConfig,
    TLSConfig,
)
from draftwire_client.enums import (
    AcceptanceRule,
    BlockSizeReason,
    DraftPart,
    ElementType,
    FinishReason,
    HealthStatus,
    LaneState,
    SpeculationMode,
)
from draftwire_client.errors import (
    Cancelled,
    DeadlineExceeded,
    DraftwireError,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    describe,
    partial_of,
)
from draftwire_client.info import DeviceInfo, Info, LaneInfo, LoadInfo, ModelInfo
from draftwire_client.pools import AsyncBatch
from draftwire_client.trace import TraceContext
from draftwire_client.types import (
    Acceptance,
    BlockSizeCount,
    ChatMessage,
    Chunk,
    PartCount,
    Partial,
    RequestOptions,
    Result,
    Settings,
    Timing,
    TokenLogprob,
    TopLogprob,
    Usage,
)

__all__ = [
    "Acceptance",
    "AcceptanceRule",
    "AsyncBatch",
    "AsyncClient",
    "AsyncStream",
    "BatchItem",
    "BatchProgress",
    "BatchRequest",
    "BlockSizeCount",
    "BlockSizeReason",
    "Cancelled",
    "ChatMessage",
    "Chunk",
    "Client",
    "DeadlineExceeded",
    "DeviceInfo",
    "DraftPart",
    "DraftwireError",
    "ElementType",
    "FailedPrecondition",
    "FinishReason",
    "HealthStatus",
    "Info",
    "Internal",
    "InvalidArgument",
    "KeepAliveConfig",
    "LaneInfo",
    "LaneState",
    "LoadBalancingConfig",
    "LoadInfo",
    "ModelInfo",
    "NotFound",
    "PartCount",
    "Partial",
    "RequestOptions",
    "ResourceExhausted",
    "Result",
    "RetryConfig",
    "Settings",
    "SpeculationMode",
    "Stream",
    "TLSConfig",
    "Timing",
    "TokenLogprob",
    "TopLogprob",
    "TraceContext",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "describe",
    "partial_of",
]

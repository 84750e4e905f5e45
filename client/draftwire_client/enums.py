"""The words of the client: names of the contract's enums as strings.

Knows the values a user may pass or read. Does not know their numbers: `requests` and `responses`
find those by name, and a number this version has no name for reads as UNSPECIFIED.
"""

from __future__ import annotations

from enum import StrEnum


class FinishReason(StrEnum):
    """Why generation ended."""

    UNSPECIFIED = "unspecified"
    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    MAX_TOKENS = "max_tokens"
    CONTEXT = "context"
    DEADLINE = "deadline"
    SHUTDOWN = "shutdown"


class SpeculationMode(StrEnum):
    """How the block length is decided."""

    UNSPECIFIED = "unspecified"
    OFF = "off"
    FIXED = "fixed"
    PREDICTED = "predicted"
    ADAPTIVE = "adaptive"


class AcceptanceRule(StrEnum):
    """How a proposal is accepted."""

    UNSPECIFIED = "unspecified"
    FOLLOW = "follow"
    CHAIN = "chain"
    MIXTURE = "mixture"
    BLOCK = "block"


class DraftPart(StrEnum):
    """How the drafter chooses tokens."""

    UNSPECIFIED = "unspecified"
    ARGMAX = "argmax"
    RANK_TREE = "rank_tree"
    BRANCHES = "branches"
    NGRAM = "ngram"
    SAMPLED = "sampled"


class BlockSizeReason(StrEnum):
    """Why a block has the size it has."""

    UNSPECIFIED = "unspecified"
    FIXED = "fixed"
    PREDICTED = "predicted"
    LOAD = "load"
    SURVIVAL = "survival"
    REQUEST = "request"
    MAX_TOKENS = "max_tokens"
    CONTEXT = "context"
    OFF = "off"
    NO_DRAFTER = "no_drafter"
    NO_MODEL = "no_model"
    EMPTY = "empty"
    NOT_WORTH = "not_worth"
    PROBE = "probe"


class LaneState(StrEnum):
    """State of a drafter lane."""

    UNSPECIFIED = "unspecified"
    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"
    REFUSED = "refused"


class ElementType(StrEnum):
    """Type of a model's weights in memory."""

    UNSPECIFIED = "unspecified"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT32 = "int32"
    INT64 = "int64"
    UINT8 = "uint8"


class HealthStatus(StrEnum):
    """Answer of the standard gRPC health service."""

    UNKNOWN = "unknown"
    SERVING = "serving"
    NOT_SERVING = "not_serving"
    SERVICE_UNKNOWN = "service_unknown"

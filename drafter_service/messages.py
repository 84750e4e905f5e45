"""What verifier and drafter tell each other about sessions, as plain values.

The servicer translates these from and to the wire; session and engine know only these. Does not
know protobuf or grpc.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from drafter_service.tree import Part, Tree


class FaultKind(IntEnum):
    """Why the drafter cannot go on with a session; numbered as on the wire."""

    OUT_OF_SYNC = 1
    UNKNOWN_SESSION = 2
    NO_ROOM = 3
    BAD_TENSOR = 4
    INTERNAL = 5


class Reason(IntEnum):
    """Why a block has its size; numbered as on the wire."""

    FIXED = 1
    PREDICTED = 2
    REQUEST = 5
    MAX_TOKENS = 6
    CONTEXT = 7
    OFF = 8
    NO_MODEL = 10


@dataclass(frozen=True, slots=True)
class Budget:
    """What the next proposal may be; 0 is no limit but the lane's."""

    want_proposal: bool = True
    max_nodes: int = 0
    max_depth: int = 0


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """What of the target's sampling the drafter makes use of; without a seed the target's noise is
    not known. `filtered`: top-k, top-p or min-p cuts the target's tail.
    """

    temperature: float = 1.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    filtered: bool = False


@dataclass(frozen=True, slots=True)
class Speculation:
    """The request's own wishes; None and empty mean the drafter's choice. `predict`: with the
    predictor's size, in the mode `adaptive` as a cap and else as it is.
    """

    off: bool = False
    predict: bool = False
    adaptive: bool = False
    max_block_size: int | None = None
    max_nodes: int | None = None
    parts: frozenset[Part] = frozenset()


@dataclass(frozen=True, slots=True)
class Open:
    """A session begins, or begins again; the last token is the anchor, at position `base`."""

    session_id: int
    epoch: int
    base: int
    token_ids: list[int]
    prompt_tokens: int
    sampling: DraftSampling = DraftSampling()
    speculation: Speculation = Speculation()
    budget: Budget = Budget()
    last_logits: torch.Tensor | None = None
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Features:
    """Feature rows [n, feature_size] of positions from `first_position` on."""

    session_id: int
    epoch: int
    first_position: int
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round committed: tokens at previous_base + 1 .. base, features of previous_base ..
    base - 1.
    """

    session_id: int
    epoch: int
    base: int
    previous_base: int
    token_ids: list[int]
    features: torch.Tensor | None
    accepted: int = 0
    had_proposal: bool = False
    budget: Budget = Budget()


@dataclass(frozen=True, slots=True)
class End:
    """A session is over."""

    session_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Malformed:
    """A message whose tensor could not be read; the session it was for cannot go on."""

    session_id: int
    epoch: int
    detail: str


@dataclass(frozen=True, slots=True)
class Step:
    """All that one lane says in one step, in this order."""

    sequence: int
    ends: list[End] = field(default_factory=list)
    opens: list[Open] = field(default_factory=list)
    features: list[Features | Malformed] = field(default_factory=list)
    outcomes: list[Outcome | Malformed] = field(default_factory=list)
    received_ns: int = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """The drafter cannot go on with a session and has let go of it."""

    session_id: int
    epoch: int
    base: int
    kind: FaultKind
    detail: str


@dataclass(frozen=True, slots=True)
class Proposal:
    """A drafted tree for the session at `base`."""

    session_id: int
    epoch: int
    base: int
    tree: Tree
    block_size: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class StepResult:
    """All that the drafter answers to one lane in one step; acknowledges every Step up to
    `ack_sequence`.
    """

    ack_sequence: int
    proposals: list[Proposal]
    faults: list[Fault]
    model_ns: int
    received_ns: int
    predictor_ns: int = 0

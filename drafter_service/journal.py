"""What one lane's sessions did, for people: a log line and a span each, and the bytes that came.

Reads the messages of the lane as they pass; the engine does not know that it is watched. Knows
request ids and trace contexts; does not know tokens' meaning, the model or the wire.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

import structlog
import torch

from drafter_service.messages import Malformed, Step, StepResult
from draftwire import tracing
from draftwire.meters import REQUEST_S, Distribution, Reading
from draftwire.v1 import drafter_pb2 as pb
from draftwire.v1 import types_pb2

log = structlog.get_logger("drafter.session")
_REASONS = {
    number: name.removeprefix("END_REASON_").lower() for name, number in pb.EndReason.items()
}


@dataclass(slots=True)
class LaneTotals:
    """Of all lanes of a drafter; written on the event loop only."""

    carried: Counter[str] = field(default_factory=Counter)
    service: Distribution = field(default_factory=lambda: Distribution(REQUEST_S))

    def readings(self) -> list[Reading]:
        """For the metrics."""
        carried = dict(self.carried).items()
        return [
            Reading("draftwire_drafter_service_seconds", self.service),
            *(Reading("draftwire_carrier_bytes_total", n, (kind,)) for kind, n in carried),
        ]


@dataclass(slots=True)
class _Entry:
    """A session since it was opened."""

    epoch: int
    request_id: str
    prompt_tokens: int
    trace_id: str
    span: tracing.Span | None
    begun: float
    proposals: int = 0
    drafted: int = 0
    rounds: int = 0
    accepted: int = 0


class LaneJournal:
    """One lane's. Every opened session gets exactly one line, however it ends."""

    def __init__(
        self,
        totals: LaneTotals,
        traces: tracing.Tracing | None,
        *,
        lane: int,
        verifier: str,
    ) -> None:
        self._totals = totals
        self._traces = traces
        self._lane = lane
        self._verifier = verifier
        self._entries: dict[int, _Entry] = {}
        self._span = None
        if traces is not None:
            self._span = traces.span("draftwire lane", "server", lane=lane, verifier=verifier)

    def heard(self, step: pb.StepRequest, read: Step) -> None:
        """A message of the verifier, and what was read from it."""
        for end in step.ends:
            self._end(end.key, _REASONS.get(end.reason, "other"))  # of a newer verifier
        for opening, opened in zip(step.opens, read.opens, strict=True):
            self._open(opening)
            self._carry(opening.last_logits, opened.last_logits)
        for features, rows in zip(step.features, read.features, strict=True):
            if not isinstance(rows, Malformed):
                self._carry(features.rows, rows.rows)
        for outcome, taken in zip(step.outcomes, read.outcomes, strict=True):
            if not isinstance(taken, Malformed):
                self._carry(outcome.features, taken.features)
            entry = self._entries.get(outcome.key.session_id)
            if entry is not None and outcome.had_proposal:
                entry.rounds += 1
                entry.accepted += outcome.accepted

    def answered(self, result: StepResult) -> None:
        """What the engine answers."""
        self._totals.service.add((time.perf_counter_ns() - result.received_ns) / 1e9)
        for proposal in result.proposals:
            entry = self._entries.get(proposal.session_id)
            if entry is None or entry.epoch != proposal.epoch:
                continue
            nodes = len(proposal.tree.tokens)
            entry.proposals += 1
            entry.drafted += nodes
            if entry.span is not None:
                entry.span.event(
                    "proposal",
                    base=proposal.base,
                    nodes=nodes,
                    block_size=proposal.block_size,
                    reason=proposal.reason.name.lower(),
                    model_ms=result.model_ns / 1e6,
                )
        for fault in result.faults:
            entry = self._entries.get(fault.session_id)
            if entry is not None and entry.epoch == fault.epoch:
                self._close(fault.session_id, f"fault_{fault.kind.name.lower()}", fault.detail)

    def close(self) -> None:
        """The lane is over, and with it its sessions."""
        for session_id in list(self._entries):
            self._close(session_id, "lane_ended")
        if self._span is not None:
            self._span.end()

    def _open(self, opening: pb.OpenSession) -> None:
        key = opening.key
        if key.session_id in self._entries:
            if self._entries[key.session_id].epoch >= key.epoch:
                return  # an old message
            self._close(key.session_id, "reopened")
        traceparent, span = tracing.checked(opening.traceparent), None
        if self._traces is not None:
            span = self._traces.span(
                "draft session",
                "consumer",
                traceparent,
                self._span,
                request__id=opening.request_id,
                lane=self._lane,
                session=key.session_id,
                epoch=key.epoch,
                prompt_tokens=opening.prompt_tokens,
            )
        self._entries[key.session_id] = _Entry(
            epoch=key.epoch,
            request_id=opening.request_id,
            prompt_tokens=opening.prompt_tokens,
            trace_id=tracing.trace_id_of(span.traceparent if span else traceparent),
            span=span,
            begun=time.monotonic(),
        )

    def _end(self, key: types_pb2.SessionKey, reason: str) -> None:
        entry = self._entries.get(key.session_id)
        if entry is not None and entry.epoch <= key.epoch:
            self._close(key.session_id, reason)

    def _close(self, session_id: int, outcome: str, error: str = "") -> None:
        entry = self._entries.pop(session_id)
        facts = {
            "outcome": outcome,
            "proposals": entry.proposals,
            "drafted": entry.drafted,
            "rounds": entry.rounds,
            "accepted": entry.accepted,
        }
        if entry.span is not None:
            entry.span.set(**facts)
            entry.span.end(error)
        log.info(
            "session",
            request_id=entry.request_id,
            **facts,
            prompt_tokens=entry.prompt_tokens,
            seconds=round(time.monotonic() - entry.begun, 4),
            lane=self._lane,
            session=session_id,
            epoch=entry.epoch,
            verifier=self._verifier,
            **({"trace_id": entry.trace_id} if entry.trace_id else {}),
            **({"error": error} if error else {}),
        )

    def _carry(self, message: types_pb2.Tensor, tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            kind = message.WhichOneof("carrier") or "inline"
            self._totals.carried[kind] += tensor.numel() * tensor.element_size()

"""Between the messages of a lane and the drafter's own values.

Knows protobuf and the codec. A tensor that cannot be read makes a Malformed for its session, not an
error of the lane. Does not know streams, sessions' states or the model.
"""

from __future__ import annotations

import math
import time

import structlog
import torch

from drafter_service.messages import (
    Budget,
    DraftSampling,
    End,
    Features,
    Malformed,
    Open,
    Outcome,
    Proposal,
    Speculation,
    Step,
    StepResult,
)
from drafter_service.tree import Part
from draftwire.carriers import Ring
from draftwire.codec import decode
from draftwire.errors import InvalidArgument
from draftwire.v1 import drafter_pb2 as pb
from draftwire.v1 import types_pb2
from draftwire_kernels.sampling import GREEDY_BELOW

log = structlog.get_logger(__name__)
_PARTS = frozenset(int(part) for part in Part)
_PREDICTED = (types_pb2.SPECULATION_MODE_PREDICTED, types_pb2.SPECULATION_MODE_ADAPTIVE)
LOWEST_LOG_PROB = -1e4  # stands for minus infinity


def read_step(
    message: pb.StepRequest, feature_size: int, ring: Ring | None, received_ns: int
) -> Step:
    """One StepRequest. `feature_size`: width of a feature row on this lane."""
    return Step(
        sequence=message.sequence,
        ends=[End(end.key.session_id, end.key.epoch) for end in message.ends],
        opens=[_open(opening, ring) for opening in message.opens],
        features=[_features(features, feature_size, ring) for features in message.features],
        outcomes=[_outcome(outcome, feature_size, ring) for outcome in message.outcomes],
        received_ns=received_ns,
    )


def write_result(result: StepResult, sequence: int) -> pb.StepResponse:
    """One StepResponse, the lane's `sequence`-th."""
    response = pb.StepResponse(
        sequence=sequence,
        ack_sequence=result.ack_sequence,
        proposals=[_proposal(proposal) for proposal in result.proposals],
        faults=[
            pb.SessionFault(
                key=types_pb2.SessionKey(
                    session_id=fault.session_id, epoch=fault.epoch, base_position=fault.base
                ),
                kind=int(fault.kind),  # type: ignore[arg-type]
                detail=fault.detail,
            )
            for fault in result.faults
        ],
    )
    response.model_time.FromNanoseconds(result.model_ns)
    if result.predictor_ns:
        response.predictor_time.FromNanoseconds(result.predictor_ns)
    response.service_time.FromNanoseconds(time.perf_counter_ns() - result.received_ns)
    return response


def _open(message: pb.OpenSession, ring: Ring | None) -> Open:
    sampling, wishes = message.sampling, message.speculation
    temperature = sampling.temperature if sampling.HasField("temperature") else 1.0
    return Open(
        session_id=message.key.session_id,
        epoch=message.key.epoch,
        base=message.key.base_position,
        token_ids=list(message.token_ids),
        prompt_tokens=message.prompt_tokens,
        sampling=DraftSampling(
            temperature=_temperature(temperature),
            seed=sampling.seed if sampling.HasField("seed") else None,
            logit_bias=dict(sampling.logit_bias),
            filtered=sampling.top_k > 0 or 0 < sampling.top_p < 1 or sampling.min_p > 0,
        ),
        speculation=Speculation(
            off=wishes.mode == types_pb2.SPECULATION_MODE_OFF,
            predict=wishes.mode in _PREDICTED,
            adaptive=wishes.mode == types_pb2.SPECULATION_MODE_ADAPTIVE,
            max_block_size=wishes.max_block_size or None,
            max_nodes=wishes.max_nodes or None,
            parts=frozenset(Part(part) for part in wishes.parts if part in _PARTS),
        ),
        budget=_budget(message.budget),
        last_logits=_last_logits(message, ring),
        request_id=message.request_id,
    )


def _temperature(value: float) -> float:
    """The verifier has checked it; here a bad value may only cost acceptance. What is greedy for
    the target is greedy here: nothing is divided by it.
    """
    if not math.isfinite(value) or value < 0:
        return 1.0
    return 0.0 if value < GREEDY_BELOW else value


def _last_logits(message: pb.OpenSession, ring: Ring | None) -> torch.Tensor | None:
    """The predictor's input; without one that can be read the session drafts with the configured
    size and is counted as missed.
    """
    if not message.HasField("last_logits"):
        return None
    try:
        logits = decode(message.last_logits, ring, shape=(None,), name="last_logits")
    except InvalidArgument as error:
        log.warning("logits not read", session=message.key.session_id, why=str(error))
        return None
    return logits if logits.is_floating_point() else None


def _features(message: pb.Features, feature_size: int, ring: Ring | None) -> Features | Malformed:
    session_id, epoch = message.key.session_id, message.key.epoch
    try:
        rows = _rows(message.rows, feature_size, ring)
    except InvalidArgument as error:
        return Malformed(session_id, epoch, str(error))
    return Features(session_id, epoch, message.first_position, rows)


def _outcome(message: pb.Outcome, feature_size: int, ring: Ring | None) -> Outcome | Malformed:
    session_id, epoch = message.key.session_id, message.key.epoch
    try:
        rows = _rows(message.features, feature_size, ring) if message.HasField("features") else None
    except InvalidArgument as error:
        return Malformed(session_id, epoch, str(error))
    return Outcome(
        session_id=session_id,
        epoch=epoch,
        base=message.key.base_position,
        previous_base=message.previous_base,
        token_ids=list(message.token_ids),
        features=rows,
        accepted=message.accepted,
        had_proposal=message.had_proposal,
        budget=_budget(message.budget),
    )


def _rows(message: types_pb2.Tensor, feature_size: int, ring: Ring | None) -> torch.Tensor:
    rows = decode(message, ring, shape=(None, feature_size), name="features")
    if not rows.is_floating_point():
        raise InvalidArgument(
            "features.dtype", str(rows.dtype).removeprefix("torch."), "a floating type"
        )
    return rows


def _budget(message: pb.RoundBudget) -> Budget:
    return Budget(message.want_proposal, message.max_nodes, message.max_depth)


def _proposal(proposal: Proposal) -> pb.Proposal:
    tree = proposal.tree
    several = any(tree.branches)
    return pb.Proposal(
        key=types_pb2.SessionKey(
            session_id=proposal.session_id, epoch=proposal.epoch, base_position=proposal.base
        ),
        tree=types_pb2.TokenTree(
            token_ids=tree.tokens,
            parents=tree.parents,
            log_probs=[max(value, LOWEST_LOG_PROB) for value in tree.log_probs],
            parts=[int(part) for part in tree.parts],  # type: ignore[misc]
            branches=tree.branches if several else (),
        ),
        block_size=proposal.block_size,
        reason=int(proposal.reason),  # type: ignore[arg-type]
    )

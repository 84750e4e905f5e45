"""Sessions in the words of the contract.

Knows: both. Pure. Does not know: when anything is sent.
"""

from __future__ import annotations

from draftwire.v1 import types_pb2
from draftwire_kernels.sampling import Sampling
from verifier_service.session import Session, Speculation


def session_key(session: Session, epoch: int) -> types_pb2.SessionKey:
    """The session at its present anchor."""
    return types_pb2.SessionKey(
        session_id=session.session_id, epoch=epoch, base_position=session.base
    )


def sampling_to_proto(s: Sampling) -> types_pb2.SamplingParams:
    """The sampling in force, every field set."""
    return types_pb2.SamplingParams(
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        min_p=s.min_p,
        repetition_penalty=s.repetition_penalty,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        logit_bias=dict(s.logit_bias),
        seed=s.seed,
    )


def speculation_to_proto(speculation: Speculation) -> types_pb2.SpeculationOptions:
    """The speculation in force, every field set."""
    return types_pb2.SpeculationOptions(
        mode=speculation.mode,  # type: ignore[arg-type]
        max_block_size=speculation.max_block_size,
        max_nodes=speculation.max_nodes,
        rule=types_pb2.ACCEPTANCE_RULE_FOLLOW,
        parts=speculation.parts,  # type: ignore[arg-type]
    )

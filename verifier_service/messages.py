"""Sessions in the words of the contract.

Knows: both. Pure. Does not know: when anything is sent.
"""

from __future__ import annotations

from draftwire.v1 import drafter_pb2, types_pb2
from draftwire_kernels.sampling import Sampling
from draftwire_kernels.tree import TokenTree
from verifier_service.budget import Wish
from verifier_service.lane import Link
from verifier_service.session import BlockSizeReason, Proposal, Session, Speculation

_REASONS = frozenset(BlockSizeReason.values())
_PARTS = frozenset(types_pb2.DraftPart.values())


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


def round_budget(wish: Wish | None, depth: int) -> drafter_pb2.RoundBudget:
    """What is wanted in the next round, None: nothing; no path longer than `depth`."""
    if wish is None:
        return drafter_pb2.RoundBudget(want_proposal=False)
    return drafter_pb2.RoundBudget(
        want_proposal=True, max_nodes=wish.nodes, max_depth=min(wish.depth, depth)
    )


def opening(
    link: Link, last_logits: types_pb2.Tensor | None, budget: drafter_pb2.RoundBudget
) -> drafter_pb2.OpenSession:
    """The session of `link` begins on its lane; its features go apart."""
    session = link.session
    return drafter_pb2.OpenSession(
        key=session_key(session, link.epoch),
        token_ids=session.tokens,
        prompt_tokens=session.prompt_length,
        sampling=sampling_to_proto(session.request.sampling),
        speculation=speculation_to_proto(session.request.speculation),
        last_logits=last_logits,
        budget=budget,
        request_id=session.request.request_id,
        traceparent=session.request.traceparent,
    )


def outcome(
    link: Link,
    features: types_pb2.Tensor,
    budget: drafter_pb2.RoundBudget,
    *,
    accepted: int,
    had_proposal: bool,
) -> drafter_pb2.Outcome:
    """All that the lane has not been told of the session of `link`, up to its present anchor."""
    return drafter_pb2.Outcome(
        key=session_key(link.session, link.epoch),
        previous_base=link.told,
        token_ids=link.session.tokens[link.told + 1 :],
        features=features,
        accepted=accepted,
        had_proposal=had_proposal,
        budget=budget,
    )


def checked_proposal(
    link: Link,
    message: drafter_pb2.Proposal,
    vocab_size: int,
    max_context: int,
    largest_block: int,
) -> Proposal | None:
    """What a drafter proposes for the session of `link`, without what may not be verified; None if
    nothing is left. Raises TreeError if it is no tree, or past what was allowed."""
    session = link.session
    tree = TokenTree(tuple(message.tree.token_ids), tuple(message.tree.parents))
    count = len(tree.tokens)
    tree.validate(vocab_size, max(1, session.request.speculation.max_nodes), max(1, count))
    parts = tuple(map(_known_part, message.tree.parts)) if len(message.tree.parts) == count else ()
    claims = tuple(message.tree.log_probs) if len(message.tree.log_probs) == count else ()
    # What is counted by these must not grow with whatever a drafter makes up.
    size = min(max(1, message.block_size), largest_block)
    reason = message.reason if message.reason in _REASONS else 0
    if reason == BlockSizeReason.BLOCK_SIZE_REASON_MAX_TOKENS and link.limited_by:
        reason = link.limited_by  # the drafter was told a depth, and not why
    proposal = Proposal(session.base, tree, parts, size, reason, claims, link.asked_depth)
    return proposal.pruned(session.drafts_allowed(max_context))


def _known_part(part: int) -> int:
    return part if part in _PARTS else 0

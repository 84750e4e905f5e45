"""How large the next block is, and why.

One pure function: the configured size, or the one predicted for the session, cut by limits. Does
not know the model, the predictor or the wire.
"""

from __future__ import annotations

from dataclasses import dataclass

from drafter_service.messages import Budget, Reason, Speculation


@dataclass(frozen=True, slots=True)
class BlockSize:
    """`size` counts the anchor; 1 drafts nothing. `reason` names the tightest limit."""

    size: int
    reason: Reason


def choose(
    *,
    preferred: int,
    lane_max: int,
    speculation: Speculation,
    budget: Budget,
    room: int | None,
    predicted: int | None = None,
) -> BlockSize:
    """The block size of one round.

    preferred: configured size. predicted: the predictor's, if it was asked. lane_max: largest the
    verifier takes (0: any). room: positions left in the drafter's context from the anchor on, or
    None if the model is not asked.
    """
    if speculation.off:
        return BlockSize(1, Reason.OFF)
    wanted = preferred if predicted is None else predicted
    reason = Reason.FIXED if predicted is None else Reason.PREDICTED
    choice = BlockSize(min(wanted, lane_max) if lane_max else wanted, reason)
    limits = (
        (speculation.max_block_size, Reason.REQUEST),
        (budget.max_depth + 1 if budget.max_depth else None, Reason.MAX_TOKENS),
        (room, Reason.CONTEXT),
    )
    for limit, reason in limits:
        if limit is not None and limit < choice.size:
            choice = BlockSize(max(1, limit), reason)
    return choice

"""What is drafted for a session in a round: the least that any limit leaves.

Pure. Knows the limits of the engine, of the lane and of the request. Does not know how the block
size is chosen among them, or how drafting is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from drafter_service.block_size import BlockSize, choose
from drafter_service.drafting import Job
from drafter_service.messages import Reason
from drafter_service.seats import Seats
from drafter_service.session import Session
from drafter_service.tree import Part

if TYPE_CHECKING:
    from drafter_service.engine import EngineSettings, LaneLimits


def job(
    settings: EngineSettings,
    limits: LaneLimits,
    available: frozenset[Part],
    session: Session,
    seats: Seats,
) -> Job:
    """The job of a session that is ready; `available`: the parts that the model has."""
    wishes = session.speculation
    context = seats.context(session)
    block: BlockSize = choose(
        preferred=settings.block_size,
        lane_max=limits.max_block_size,
        speculation=wishes,
        budget=session.budget,
        room=None if context is None else seats.room(session),
        predicted=session.predicted_size,
    )
    if context is None and block.reason in (Reason.FIXED, Reason.PREDICTED):
        block = BlockSize(block.size, Reason.NO_MODEL)
    bounds = (settings.max_nodes, limits.max_nodes, wishes.max_nodes, session.budget.max_nodes)
    # A request that names parts gets those or nothing: another one would not be what it asked.
    parts = wishes.parts & available if wishes.parts else settings.parts
    nodes = min(bound for bound in bounds if bound)
    return Job(session, context, block, nodes, parts, _ngram_depth(settings, limits, session))


def _ngram_depth(settings: EngineSettings, limits: LaneLimits, session: Session) -> int:
    """How deep repetition may go in this round. In the mode predicted the size is all there is; in
    the mode adaptive it caps what the model drafts.
    """
    wishes = session.speculation
    if wishes.predict and not wishes.adaptive:
        return 0
    depths = (
        limits.max_block_size - 1,
        (wishes.max_block_size or 0) - 1,
        session.budget.max_depth or -1,
    )
    return min([settings.ngram_depth, *(depth for depth in depths if depth >= 0)])

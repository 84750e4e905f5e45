"""Steps in the numbers of the policy: what one made at once would have, what one made has cost.

Knows: sessions, the work of a step, and which of their figures count. Pure. Does not know: what is
decided by them (`waiting`, `policy`).
"""

from __future__ import annotations

from collections.abc import Sequence

from verifier_service.policy import Policy
from verifier_service.scheduler import Work
from verifier_service.session import Session
from verifier_service.waiting import Awaited, Ready


def ready(
    running: Sequence[Session], awaited: Sequence[Awaited], policy: Policy, prompt_rows: int
) -> Ready:
    """A step of `running` without the proposals that are awaited; `prompt_rows`: its rows of
    prompts."""
    missing = {item.session_id for item in awaited}
    here = [s for s in running if s.at_anchor and s.session_id not in missing]
    trees = [s.proposal for s in here if s.proposal is not None]
    gain = sum(policy.expected_accepted(s) for s in here)
    rows = len(here) + prompt_rows + sum(len(p.tree) for p in trees)
    # A prompt is as good as a token, or it would wait for others' proposals for nothing.
    prompts = sum(not s.at_anchor for s in running)
    return Ready(len(here) + prompts + gain, rows, bool(trees))


def measure(policy: Policy, work: Sequence[Work], seconds: float) -> None:
    """Tell the policy what the step cost, all that belongs to it included."""
    rows = sum(len(item.feed.tokens) for item in work)
    drafted = any(item.proposal is not None for item in work)
    prompts = any(item.session.made <= 1 or not item.draws for item in work)
    context = sum(item.feed.base for item in work)
    policy.measured(rows, len(work), context, seconds, drafted=drafted, prompts=prompts)

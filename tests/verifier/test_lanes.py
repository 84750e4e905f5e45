"""Lanes without a network: what is told, what is believed, how long is waited."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from draftwire.codec import encode
from draftwire.v1 import drafter_pb2, types_pb2
from draftwire_kernels.sampling import Sampling
from verifier_service.budget import Wish
from verifier_service.cache import CacheShape, PagedStore, PagePool
from verifier_service.lane import Lane, LaneFacts
from verifier_service.lanes import Lanes
from verifier_service.session import Request, Session, Speculation

VOCAB = 32
HIDDEN = 4


class Letters:
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "x" * len(token_ids)


class Port:
    """Records what is sent."""

    def __init__(
        self, lane_id: int, credits: int = 4, limit: int = 1 << 20, layers: tuple[int, ...] = (0,)
    ) -> None:
        self.lane_id = lane_id
        self.facts = LaneFacts("t", "n", "w", True, layers, 8, 8, 1000, credits, False, limit)
        self.sent: list[drafter_pb2.StepRequest] = []
        self.abandoned = ""
        self.acknowledged = 0

    def encode(self, rows: torch.Tensor) -> types_pb2.Tensor:
        return encode(rows)

    def encode_plain(self, tensor: torch.Tensor) -> types_pb2.Tensor:
        return encode(tensor)

    def send(self, request: drafter_pb2.StepRequest) -> None:
        self.sent.append(request)

    def acknowledge(self, sequence: int) -> None:
        self.acknowledged = sequence

    def abandon(self, why: str) -> None:
        self.abandoned = why


class Everything:
    """A planner that always wants all it can get, or nothing."""

    def __init__(self) -> None:
        self.wanted = True

    def wish(self, session: Session, lane: Lane) -> Wish | None:
        return Wish(session.request.speculation.max_nodes, 7, 1.0, 7) if self.wanted else None


class Bench:
    """Lanes with sessions that stand at their anchors."""

    def __init__(self, longest_wait: float = 1.0, lane_timeout: float = 10.0) -> None:
        pool = PagePool(64, 16)
        store = PagedStore(pool, CacheShape(1, 1, 2, HIDDEN), torch.float32, torch.device("cpu"))
        self.recomputed: list[Session] = []
        self.planner = Everything()
        self.lanes = Lanes(
            store,
            vocab_size=VOCAB,
            max_context=500,
            longest_wait=longest_wait,
            lane_timeout=lane_timeout,
            planner=self.planner,
            recompute=self.recomputed.append,
            capture=lambda layer: None,
        )

    def session(self, number: int, prompt: int = 5, **options: object) -> Session:
        speculation = Speculation(
            **{"enabled": True, "max_block_size": 8, "max_nodes": 16, **options}
        )  # type: ignore[arg-type]
        request = Request(str(number), tuple(range(prompt)), Sampling(), 100, speculation)
        session = Session(number, request, VOCAB, Letters())
        session.slots = np.arange(16, 16 + 200)
        session.captured = frozenset({0})
        session.commit((1,), 500)
        session.computed = session.base
        return session

    def wait_until(self, sessions: Sequence[Session]) -> float | None:
        """When the last proposal that is waited for is overdue."""
        return max((item.overdue for item in self.lanes.awaited(sessions)), default=None)

    def round(self, session: Session, tokens: Sequence[int] = (2,)) -> None:
        before = session.base
        session.commit(tokens, 500)
        session.computed = session.base
        self.lanes.tell(session, before, len(tokens) - 1, len(tokens) > 1)


def answer(
    bench: Bench,
    port: Port,
    session: Session,
    *,
    now: float,
    base: int | None = None,
    epoch: int = 1,
    sequence: int | None = None,
) -> None:
    proposal = drafter_pb2.Proposal(
        key=types_pb2.SessionKey(
            session_id=session.session_id,
            epoch=epoch,
            base_position=session.base if base is None else base,
        ),
        tree=types_pb2.TokenTree(token_ids=[3, 4], parents=[-1, 0]),
        block_size=3,
    )
    ack = port.sent[-1].sequence if sequence is None else sequence
    bench.lanes.response(
        port.lane_id,
        drafter_pb2.StepResponse(sequence=1, ack_sequence=ack, proposals=[proposal]),
        now,
    )


def test_one_message_a_step_carries_every_session() -> None:
    bench, port = Bench(), Port(1)
    bench.lanes.lane_up(port)
    sessions = [bench.session(i) for i in range(16)]
    for s in sessions:
        bench.lanes.tell(s, s.base, 0, False)
    bench.lanes.flush(0.0)
    assert [len(m.opens) for m in port.sent] == [16]
    assert all(o.key.base_position + 1 == len(o.token_ids) for o in port.sent[0].opens)
    assert all(
        f.rows.shape[0] == s.base for f, s in zip(port.sent[0].features, sessions, strict=True)
    )
    for s in sessions:
        bench.round(s)
    bench.lanes.flush(0.1)
    assert [len(m.outcomes) for m in port.sent] == [0, 16]


def test_only_the_present_session_epoch_and_base_are_believed() -> None:
    bench, port = Bench(), Port(1)
    bench.lanes.lane_up(port)
    s = bench.session(1)
    bench.lanes.tell(s, s.base, 0, False)
    bench.lanes.flush(0.0)
    for wrong in ({"base": s.base - 1}, {"base": s.base + 1}, {"epoch": 0}, {"epoch": 2}):
        answer(bench, port, s, now=0.1, **wrong)  # type: ignore[arg-type]
        assert s.proposal is None
    other = bench.session(2)
    answer(bench, port, other, now=0.1)
    assert bench.lanes.counters.stale == 5
    answer(bench, port, s, now=0.1)
    assert s.proposal is not None
    assert s.stats.stale == 4


@pytest.mark.parametrize(
    "tree", [([40], [-1]), ([1, 2], [-1, 1]), ([1], [5]), ([1] * 17, [-1] * 17), ([1, 2], [-1])]
)
def test_a_malformed_tree_is_counted_and_the_round_is_plain(
    tree: tuple[list[int], list[int]],
) -> None:
    bench, port = Bench(), Port(1)
    bench.lanes.lane_up(port)
    s = bench.session(1)
    bench.lanes.tell(s, s.base, 0, False)
    bench.lanes.flush(0.0)
    key = types_pb2.SessionKey(session_id=1, epoch=1, base_position=s.base)
    message = drafter_pb2.Proposal(
        key=key, tree=types_pb2.TokenTree(token_ids=tree[0], parents=tree[1])
    )
    bench.lanes.response(
        1, drafter_pb2.StepResponse(sequence=1, ack_sequence=1, proposals=[message]), 0.1
    )
    assert s.proposal is None
    assert bench.lanes.counters.malformed == 1
    assert bench.wait_until([s]) is None


def test_nodes_deeper_than_the_request_may_go_are_left_out() -> None:
    bench, port = Bench(), Port(1)
    bench.lanes.lane_up(port)
    s = bench.session(1, max_block_size=2)
    bench.lanes.tell(s, s.base, 0, False)
    bench.lanes.flush(0.0)
    answer(bench, port, s, now=0.1)
    assert s.proposal is not None
    assert s.proposal.tree.tokens == (3,)


def test_sessions_of_a_lost_lane_open_elsewhere_with_a_new_epoch_and_all_features() -> None:
    bench, first, second = Bench(), Port(1), Port(2)
    bench.lanes.lane_up(first)
    s = bench.session(1)
    bench.lanes.tell(s, s.base, 0, False)
    bench.lanes.flush(0.0)
    answer(bench, first, s, now=0.1)
    bench.lanes.lane_down(1)
    assert s.proposal is None
    bench.lanes.lane_up(second)
    bench.round(s)
    bench.lanes.flush(0.2)
    (opened,) = second.sent[0].opens
    assert (opened.key.epoch, opened.key.base_position, list(opened.token_ids)) == (
        2,
        s.base,
        s.tokens,
    )
    assert second.sent[0].features[0].rows.shape[0] == s.base
    bench.lanes.check()


def test_new_sessions_go_to_the_lane_with_fewest() -> None:
    bench, ports = Bench(), [Port(1), Port(2), Port(3)]
    for port in ports:
        bench.lanes.lane_up(port)
    for number in range(9):
        s = bench.session(number)
        bench.lanes.tell(s, s.base, 0, False)
    bench.lanes.flush(0.0)
    assert [len(p.sent[0].opens) for p in ports] == [3, 3, 3]


def test_a_draining_lane_keeps_its_sessions_until_there_is_another() -> None:
    bench, first, second = Bench(), Port(1), Port(2)
    bench.lanes.lane_up(first)
    s = bench.session(1)
    bench.lanes.tell(s, s.base, 0, False)
    bench.lanes.flush(0.0)
    bench.lanes.lane_draining(1)
    bench.round(s)
    bench.lanes.flush(0.1)
    assert len(first.sent[-1].outcomes) == 1
    bench.lanes.lane_up(second)
    bench.round(s)
    bench.lanes.flush(0.2)
    assert first.sent[-1].ends[0].reason == drafter_pb2.END_REASON_MOVED
    assert len(second.sent[-1].opens) == 1


def test_without_credit_nothing_is_sent_and_nothing_is_lost() -> None:
    bench, port = Bench(), Port(1, credits=1)
    bench.lanes.lane_up(port)
    s = bench.session(1)
    bench.lanes.tell(s, s.base, 0, False)
    bench.lanes.flush(0.0)
    for number in range(3):
        bench.round(s)
        bench.lanes.flush(0.1 * number)
    assert len(port.sent) == 1
    bench.lanes.response(1, drafter_pb2.StepResponse(sequence=1, ack_sequence=1), 1.0)
    bench.lanes.flush(1.0)
    outcomes = port.sent[1].outcomes
    assert [o.previous_base for o in outcomes] == [5, 6, 7]
    assert outcomes[-1].key.base_position == s.base
    assert (port.acknowledged, port.sent[1].ack_sequence) == (1, 1)


def test_a_late_lane_is_not_waited_for_until_it_has_caught_up_and_then_less_often() -> None:
    bench, port = Bench(longest_wait=1.0), Port(1, credits=9)
    bench.lanes.lane_up(port)
    s = bench.session(1)
    bench.lanes.tell(s, s.base, 0, False)
    bench.lanes.flush(0.0)
    assert bench.wait_until([s]) == 1.0
    bench.lanes.give_up([s], bench.wait_until([s]) or 0.0)
    bench.round(s)
    bench.lanes.flush(1.0)
    assert bench.wait_until([s]) is None
    answer(bench, port, s, now=1.5)  # caught up: on time for the round that asked last
    assert s.proposal is not None
    bench.round(s)
    bench.lanes.flush(2.0)
    assert bench.wait_until([s]) is not None
    for _ in range(3):
        bench.lanes.give_up([s], bench.wait_until([s]) or 0.0)
        bench.round(s)
        bench.lanes.flush(3.0)
        bench.lanes.response(
            1, drafter_pb2.StepResponse(sequence=2, ack_sequence=port.sent[-1].sequence), 3.0
        )
        bench.round(s)
        bench.lanes.flush(3.1)
    assert bench.lanes.lanes[1].pause > 0
    assert bench.wait_until([s]) is None
    assert bench.lanes.counters.late >= 2


def test_a_lane_slower_than_its_usual_time_is_given_more_time_after_a_while() -> None:
    """Each answer comes a little after the wait for it ended: the measured round trip grows until
    the wait is long enough."""
    bench, port = Bench(longest_wait=9.0), Port(1, credits=9)
    bench.lanes.lane_up(port)
    s = bench.session(1)
    now = 0.0
    bench.lanes.tell(s, s.base, 0, False)
    bench.lanes.flush(now)
    answer(bench, port, s, now=0.001)
    got = 0
    for _ in range(200):
        bench.round(s)
        bench.lanes.flush(now)
        until = bench.wait_until([s])
        if until is not None and until >= now + 0.5:
            answer(bench, port, s, now=now + 0.5)
            got += s.proposal is not None
        else:
            base, sequence = s.base, port.sent[-1].sequence
            bench.lanes.give_up([s], bench.wait_until([s]) or 0.0)
            bench.round(
                s
            )  # a plain round; its answer comes while the step runs and is heard of afterwards
            bench.lanes.flush(now + 0.6)
            answer(bench, port, s, now=now + 0.5, base=base, sequence=sequence)
        now += 1.0
    assert got > 50


def test_the_usual_round_trip_bounds_the_wait() -> None:
    bench, port = Bench(longest_wait=5.0), Port(1)
    bench.lanes.lane_up(port)
    s = bench.session(1)
    bench.lanes.tell(s, s.base, 0, False)
    bench.lanes.flush(0.0)
    answer(bench, port, s, now=0.01)
    bench.round(s)
    bench.lanes.flush(1.0)
    until = bench.wait_until([s])
    assert until is not None
    assert 1.03 <= until <= 1.06


def test_a_silent_lane_is_abandoned() -> None:
    bench, port = Bench(lane_timeout=2.0), Port(1)
    bench.lanes.lane_up(port)
    s = bench.session(1)
    bench.lanes.tell(s, s.base, 0, False)
    bench.lanes.flush(0.0)
    bench.lanes.flush(1.9)
    assert not port.abandoned
    bench.lanes.flush(2.1)
    assert port.abandoned
    assert not bench.lanes.lanes


@pytest.mark.parametrize(
    "kind", [drafter_pb2.FAULT_KIND_OUT_OF_SYNC, drafter_pb2.FAULT_KIND_UNKNOWN_SESSION]
)
def test_a_fault_opens_the_session_again_at_once_the_first_time(
    kind: drafter_pb2.FaultKind,
) -> None:
    bench, port = Bench(), Port(1)
    bench.lanes.lane_up(port)
    s = bench.session(1)
    bench.lanes.tell(s, s.base, 0, False)
    bench.lanes.flush(0.0)
    fault = drafter_pb2.SessionFault(key=types_pb2.SessionKey(session_id=1, epoch=1), kind=kind)
    bench.lanes.response(
        1, drafter_pb2.StepResponse(sequence=1, ack_sequence=1, faults=[fault]), 0.1
    )
    bench.round(s)
    bench.lanes.flush(0.2)
    assert port.sent[-1].opens[0].key.epoch == 2


def test_no_room_keeps_the_session_plain_for_a_while() -> None:
    bench, port = Bench(), Port(1)
    bench.lanes.lane_up(port)
    s = bench.session(1)
    bench.lanes.tell(s, s.base, 0, False)
    bench.lanes.flush(0.0)
    fault = drafter_pb2.SessionFault(
        key=types_pb2.SessionKey(session_id=1, epoch=1), kind=drafter_pb2.FAULT_KIND_NO_ROOM
    )
    bench.lanes.response(
        1, drafter_pb2.StepResponse(sequence=1, ack_sequence=1, faults=[fault]), 0.1
    )
    for _ in range(10):
        bench.round(s)
        bench.lanes.flush(0.2)
    assert len(port.sent) == 1


def test_a_long_prompt_is_split_over_messages_within_the_limit() -> None:
    limit = 4096
    bench, port = Bench(), Port(1, limit=limit)
    bench.lanes.lane_up(port)
    s = bench.session(1, prompt=190)
    bench.lanes.tell(s, s.base, 0, False)
    bench.lanes.flush(0.0)
    assert len(port.sent) > 1
    assert all(m.ByteSize() <= limit for m in port.sent)
    starts = [f.first_position for m in port.sent for f in m.features]
    rows = sum(f.rows.shape[0] for m in port.sent for f in m.features)
    assert starts == sorted(starts)
    assert rows == s.base
    assert len(port.sent[0].opens) == 1


def test_a_session_that_ends_before_its_open_was_sent_is_never_mentioned() -> None:
    bench, port = Bench(), Port(1)
    bench.lanes.lane_up(port)
    s = bench.session(1)
    bench.lanes.tell(s, s.base, 0, False)
    bench.lanes.forget(s, drafter_pb2.END_REASON_FINISHED)
    bench.lanes.flush(0.0)
    assert all(not (m.opens or m.features or m.ends) for m in port.sent)
    bench.lanes.check()


def test_a_drafter_that_needs_other_layers_has_the_session_recomputed_first() -> None:
    bench, port = Bench(), Port(1, layers=(0, 3))
    bench.lanes.lane_up(port)
    s = bench.session(1)
    bench.lanes.tell(s, s.base, 0, False)
    assert bench.recomputed == [s]
    bench.lanes.flush(0.0)
    assert not port.sent


def test_an_answer_that_came_during_a_long_step_keeps_the_lane() -> None:
    """It lies in the inbox when the step is over; only what was heard before the step counts."""
    bench, port = Bench(lane_timeout=2.0), Port(1)
    bench.lanes.lane_up(port)
    s = bench.session(1)
    bench.lanes.tell(s, s.base, 0, False)
    bench.lanes.flush(0.0)
    bench.lanes.flush(5.0, heard=1.0)
    assert not port.abandoned
    bench.lanes.flush(7.5, heard=7.0)
    assert port.abandoned


def test_a_session_that_ends_while_its_features_are_half_sent_is_only_ended() -> None:
    limit = 4096
    bench, port = Bench(), Port(1, limit=limit)
    bench.lanes.lane_up(port)
    s = bench.session(1, prompt=190)
    bench.lanes.tell(s, s.base, 0, False)
    bench.lanes.forget(s, drafter_pb2.END_REASON_FINISHED)
    bench.lanes.flush(0.0)
    assert [len(m.ends) for m in port.sent][-1] == 1
    assert not port.sent[-1].features


def test_a_time_that_no_clock_can_show_does_not_break_the_lane() -> None:
    bench, port = Bench(), Port(1)
    bench.lanes.lane_up(port)
    s = bench.session(1)
    bench.lanes.tell(s, s.base, 0, False)
    bench.lanes.flush(0.0)
    response = drafter_pb2.StepResponse(sequence=1, ack_sequence=1)
    response.model_time.seconds = 2**62
    bench.lanes.response(1, response, 0.1)
    assert port.acknowledged == 1


def test_what_was_not_asked_for_want_of_credits_is_not_waited_for_nor_late() -> None:
    bench, port = Bench(), Port(1, credits=1)
    bench.lanes.lane_up(port)
    first, second = bench.session(1), bench.session(2)
    bench.lanes.tell(first, 0, 0, False)
    bench.lanes.flush(now=0.0)
    assert len(port.sent) == 1
    bench.lanes.tell(second, 0, 0, False)
    bench.lanes.flush(now=0.1)  # the one credit is out
    assert len(port.sent) == 1
    assert [item.session_id for item in bench.lanes.awaited([first, second])] == [1]
    bench.lanes.give_up([first, second], now=0.2)
    assert bench.lanes.counters.late == 0
    assert not bench.lanes.lanes[1].behind
    answer(bench, port, first, now=0.3)
    bench.lanes.flush(now=0.3)
    assert [item.session_id for item in bench.lanes.awaited([first, second])] == [2]


def test_what_a_drafter_makes_up_is_counted_under_no_name_of_its_own() -> None:
    bench, port = Bench(), Port(1)
    bench.lanes.lane_up(port)
    session = bench.session(1)
    bench.lanes.tell(session, 0, 0, False)
    bench.lanes.flush(now=0.0)
    proposal = drafter_pb2.Proposal(
        key=types_pb2.SessionKey(session_id=1, epoch=1, base_position=session.base),
        tree=types_pb2.TokenTree(token_ids=[3, 4], parents=[-1, 0], parts=[99, -7]),
        block_size=4_000_000_000,
        reason=1234,
    )
    bench.lanes.response(
        1, drafter_pb2.StepResponse(sequence=1, ack_sequence=1, proposals=[proposal]), 0.1
    )
    taken = session.proposal
    assert taken is not None
    assert (taken.block_size, taken.reason, taken.parts) == (8, 0, (0, 0))

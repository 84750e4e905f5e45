"""The drafting step: one batch over all lanes, one answer a lane, rows given back whatever
happens.
"""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafter import kit
from drafter.kit import Bench, opened, told

from drafter_service.engine import Engine, Lane
from drafter_service.messages import (
    Budget,
    DraftSampling,
    End,
    FaultKind,
    Features,
    Outcome,
    Proposal,
    Reason,
    Speculation,
    Step,
    StepResult,
)
from drafter_service.model import DraftModel
from drafter_service.tree import Part
from draftwire_kernels.noise import gumbel

ARGMAX = frozenset({Part.ARGMAX})


@pytest.fixture(scope="module")
def model() -> DraftModel:
    return kit.lively_model(kit.raw_config())


def only(result: StepResult) -> Proposal:
    (proposal,) = result.proposals
    assert not result.faults
    return proposal


def naive_chain(model: DraftModel, step: Step, size: int) -> list[int]:
    """Argmax of the naive model for a session opened by `step`."""
    opening, rows = step.opens[0], step.features[0]
    assert isinstance(rows, Features)
    logits = kit.naive_logits(model, rows.rows, opening.token_ids[-1], size)
    return logits[1:].argmax(-1).tolist()


def test_a_greedy_chain_is_the_argmax_of_the_slots_at_their_own_positions(
    model: DraftModel,
) -> None:
    bench = Bench(model, parts=ARGMAX)
    lane, step = bench.lane(), opened(1, 14)
    proposal = only(bench.step((lane, step))[lane])
    assert proposal.tree.tokens == naive_chain(model, step, 6)
    assert (proposal.base, proposal.block_size, proposal.reason) == (13, 6, Reason.FIXED)


def test_after_an_outcome_the_next_block_hangs_on_the_new_anchor(model: DraftModel) -> None:
    bench = Bench(model, parts=ARGMAX)
    lane, first = bench.lane(), opened(1, 14)
    bench.step((lane, first))
    second = told(1, 13, [3, 8, 5], accepted=2, had_proposal=True)
    proposal = only(bench.step((lane, second))[lane])
    assert proposal.base == 16
    rows = torch.cat([first.features[0].rows, second.outcomes[0].features])  # type: ignore[union-attr]
    want = kit.naive_logits(model, rows, anchor=5, size=6)[1:].argmax(-1).tolist()
    assert proposal.tree.tokens == want
    assert bench.engine.counters.mean_acceptance_length == 3.0


def test_all_ready_sessions_of_all_lanes_are_one_batch_and_each_lane_gets_one_answer(
    model: DraftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(model)
    batches = []
    original = DraftModel.draft

    def spy(self: DraftModel, pool: Any, blocks: Any) -> torch.Tensor:
        batches.append(len(blocks))
        return original(self, pool, blocks)

    monkeypatch.setattr(DraftModel, "draft", spy)
    one, two = bench.lane(), bench.lane()
    answers = bench.step(
        (one, opened(1, 9)),
        (two, opened(1, 20)),
        (one, opened(2, 5, sequence=2)),
        (two, opened(7, 30, sequence=2)),
    )
    assert batches == [4]
    assert {p.session_id for p in answers[one].proposals} == {1, 2}
    assert {p.session_id for p in answers[two].proposals} == {1, 7}
    assert answers[one].ack_sequence == answers[two].ack_sequence == 2


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_session_is_drafted_for_alike_alone_and_in_company(
    model: DraftModel, temperature: float
) -> None:
    sampling = DraftSampling(temperature=temperature, seed=42)

    def proposal(company: int) -> Proposal:
        bench = Bench(model)
        lane = bench.lane()
        others = [
            (lane, opened(100 + i, 4 + 3 * i, sampling=replace(sampling, temperature=float(i % 2))))
            for i in range(company)
        ]
        answers = bench.step(*others, (lane, opened(5, 17, sampling=sampling)))
        return next(p for p in answers[lane].proposals if p.session_id == 5)

    alone, together = proposal(0), proposal(9)
    assert together.tree.tokens == alone.tree.tokens
    assert together.tree.parents == alone.tree.parents
    assert together.tree.log_probs == pytest.approx(alone.tree.log_probs, abs=1e-3)


def test_the_request_s_limits_and_parts_act(model: DraftModel) -> None:
    bench = Bench(model)
    lane = bench.lane(max_block_size=5, max_nodes=9)

    def ask(session_id: int, **changes: Any) -> Proposal:
        return only(bench.step((lane, opened(session_id, 12, **changes)))[lane])

    plain = ask(1)
    assert (len(plain.tree.tokens), plain.block_size, plain.reason) == (9, 5, Reason.FIXED)
    short = ask(2, speculation=Speculation(max_block_size=3, max_nodes=4))
    assert (len(short.tree.tokens), short.block_size, short.reason) == (4, 3, Reason.REQUEST)
    chain = ask(3, speculation=Speculation(parts=ARGMAX))
    assert chain.tree.parents == [-1, 0, 1, 2]
    ending = ask(4, budget=Budget(max_nodes=3, max_depth=1))
    assert (ending.tree.parents, ending.block_size) == ([-1, -1, -1], 2)
    assert ending.reason == Reason.MAX_TOKENS
    off = ask(5, speculation=Speculation(off=True))
    assert (off.tree.tokens, off.block_size, off.reason) == ([], 1, Reason.OFF)
    unknown = ask(6, speculation=Speculation(parts=frozenset({Part.BRANCHES})))
    assert unknown.tree.tokens == [], "this model has no branches, and nothing else was asked for"


def test_a_session_that_wants_nothing_gets_nothing_but_its_features_are_kept(
    model: DraftModel,
) -> None:
    bench = Bench(model, parts=ARGMAX)
    lane = bench.lane()
    first = opened(1, 10, budget=Budget(want_proposal=False))
    assert bench.step((lane, first))[lane].proposals == []
    quiet = told(1, 9, [1, 2], budget=Budget(want_proposal=False))
    assert bench.step((lane, quiet))[lane].proposals == []
    proposal = only(bench.step((lane, told(1, 11, [4], sequence=3)))[lane])
    rows = [first.features[0].rows, kit.features(2, seed=1009), kit.features(1, seed=1011)]  # type: ignore[union-attr]
    want = kit.naive_logits(model, torch.cat(rows), anchor=4, size=6)[1:].argmax(-1).tolist()
    assert proposal.tree.tokens == want


def test_raw_features_are_fused_here_to_the_same_draft(model: DraftModel) -> None:
    bench = Bench(model)
    fused_lane, raw_lane = bench.lane(), bench.lane(raw_features=True)
    raw = opened(1, 11, width=3 * kit.HIDDEN)
    rows = raw.features[0]
    assert isinstance(rows, Features)
    fused = replace(raw, features=[replace(rows, rows=model.fuse(rows.rows))])
    answers = bench.step((raw_lane, raw), (fused_lane, fused))
    got, want = only(answers[raw_lane]).tree, only(answers[fused_lane]).tree
    assert got.tokens == want.tokens
    assert got.log_probs == pytest.approx(want.log_probs, abs=1e-4)


def test_the_block_is_clipped_to_the_context_and_past_it_ngrams_go_on(model: DraftModel) -> None:
    bench = Bench(model, max_context=20)
    lane = bench.lane()
    sizes = {}
    for length in range(14, 24):
        tokens = [1, 2, 3] * length
        step = opened(length, length)
        step = replace(step, opens=[replace(step.opens[0], token_ids=tokens[:length])])
        proposal = only(bench.step((lane, step))[lane])
        sizes[length] = (proposal.block_size, proposal.reason, set(proposal.tree.parts))
    assert sizes[14][:2] == (6, Reason.FIXED)
    assert sizes[15][:2] == (6, Reason.FIXED)
    assert sizes[16][:2] == (5, Reason.CONTEXT)
    assert sizes[19][:2] == (2, Reason.CONTEXT)
    for length in range(20, 24):
        assert sizes[length] == (6, Reason.NO_MODEL, {Part.NGRAM})
    for length in range(14, 24):
        bench.step((lane, Step(9, ends=[End(length, 1)])))
    bench.assert_all_free()


def test_a_session_that_outgrows_the_context_gives_its_rows_back_and_goes_on(
    model: DraftModel,
) -> None:
    bench = Bench(model, max_context=20)
    lane = bench.lane()
    bench.step((lane, opened(1, 16)))
    assert bench.engine.pool.free_rows < bench.free
    proposal = only(bench.step((lane, told(1, 15, [1, 2, 1, 2, 1, 2])))[lane])
    assert bench.engine.pool.free_rows == bench.free
    assert proposal.reason == Reason.NO_MODEL
    assert proposal.tree.tokens[:3] == [1, 2, 1]
    proposal = only(bench.step((lane, told(1, 21, [1], sequence=3)))[lane])
    assert proposal.tree.tokens[:2] == [2, 1]


def test_sessions_past_max_sessions_are_told_that_there_is_no_room(model: DraftModel) -> None:
    bench = Bench(model, max_sessions=2)
    lane = bench.lane()
    answer = bench.step(*((lane, opened(i, 8)) for i in range(1, 4)))[lane]
    assert [(f.session_id, f.kind) for f in answer.faults] == [(3, FaultKind.NO_ROOM)]
    assert {p.session_id for p in answer.proposals} == {1, 2}
    bench.step((lane, Step(2, ends=[End(1, 1)])))
    assert only(bench.step((lane, opened(4, 8)))[lane]).session_id == 4


def test_without_cache_rows_the_newcomer_is_told_and_the_others_draft_on(model: DraftModel) -> None:
    bench = Bench(model, cache_rows=256)
    lane = bench.lane()
    answer = bench.step((lane, opened(1, 60)), (lane, opened(2, 300)))[lane]
    assert [(f.session_id, f.kind) for f in answer.faults] == [(2, FaultKind.NO_ROOM)]
    assert [p.session_id for p in answer.proposals] == [1]


def test_a_silent_session_loses_its_rows_to_one_that_needs_them_and_is_told(
    model: DraftModel,
) -> None:
    bench = Bench(model, cache_rows=256, evict_idle_s=0.0)
    silent, busy = bench.lane(), bench.lane()
    bench.step((silent, opened(1, 60)))
    answer = bench.step((busy, opened(2, 100)))[busy]
    assert [p.session_id for p in answer.proposals] == [2]
    assert bench.engine.counters.evicted == 1
    answer = bench.step((silent, told(1, 59, [3])))[silent]
    assert [(f.session_id, f.kind) for f in answer.faults] == [(1, FaultKind.UNKNOWN_SESSION)]


def test_features_that_are_not_finite_cost_their_own_session_only(model: DraftModel) -> None:
    bench = Bench(model)
    lane, sick = bench.lane(), opened(1, 12)
    rows = sick.features[0]
    assert isinstance(rows, Features)
    rows.rows[3, 5] = float("nan")
    answer = bench.step((lane, sick), (lane, opened(2, 12)))[lane]
    assert [(f.session_id, f.kind) for f in answer.faults] == [(1, FaultKind.INTERNAL)]
    assert [p.session_id for p in answer.proposals] == [2]
    assert bench.engine.session_count == 1


def test_a_lane_that_ends_gives_everything_back(model: DraftModel) -> None:
    bench = Bench(model)
    lane, other = bench.lane(), bench.lane()
    bench.step(*((lane, opened(i, 9 + i)) for i in range(5)), (other, opened(1, 7)))
    bench.engine.remove_lane(lane)
    assert bench.engine.session_count == 1
    bench.engine.remove_lane(other)
    bench.assert_all_free()


def test_logit_bias_reaches_the_draft(model: DraftModel) -> None:
    bench = Bench(model, parts=ARGMAX)
    lane = bench.lane()
    biased = DraftSampling(temperature=0.0, logit_bias={17: 1000.0})
    answers = bench.step((lane, opened(1, 9, sampling=biased)), (lane, opened(2, 9)))[lane]
    first, second = answers.proposals
    assert set(first.tree.tokens) == {17}
    assert 17 not in second.tree.tokens[:1] or second.tree.tokens != first.tree.tokens


def test_without_a_seed_the_order_is_the_drafters_own(model: DraftModel) -> None:
    bench = Bench(model, parts=frozenset({Part.RANK_TREE}), max_nodes=1)
    lane = bench.lane()
    blind = only(
        bench.step((lane, opened(1, 9, sampling=DraftSampling(temperature=1.0))))[lane]
    ).tree
    greedy = only(
        bench.step(
            (
                lane,
                opened(2, 9, sampling=DraftSampling(0.0)),
            )
        )[lane]
    ).tree
    assert len(blind.tokens) == len(greedy.tokens) == 1
    seeds = set()
    for seed in range(12):
        step = opened(1, 9, sampling=DraftSampling(temperature=2.0, seed=seed))
        one = Bench(model, parts=frozenset({Part.RANK_TREE}), max_nodes=1)
        mine = one.lane()
        seeds.add(only(one.step((mine, step))[mine]).tree.tokens[0])
    assert len(seeds) > 1, "the seed does not reach the order"


def test_the_noise_of_each_slot_is_that_of_the_position_it_predicts(model: DraftModel) -> None:
    """Slot j is drawn at base + j: the best child of a node of depth j - 1 is the argmax of the
    slot's scores with the target's noise of exactly that position.
    """
    temperature, seed = 1.7, 21
    bench = Bench(model, parts=frozenset({Part.RANK_TREE}), max_nodes=40)
    lane, step = bench.lane(), opened(1, 14, sampling=DraftSampling(temperature, seed))
    tree = only(bench.step((lane, step))[lane]).tree
    rows = step.features[0]
    assert isinstance(rows, Features)
    logits = kit.naive_logits(model, rows.rows, step.opens[0].token_ids[-1], 6)
    best = [
        int((logits[j] / (0.8 * temperature) + gumbel(seed, 13 + j, kit.VOCAB)).argmax())
        for j in range(1, 6)
    ]
    node, depth = -1, 0
    while node in tree.parents:
        node = tree.parents.index(node)
        assert tree.tokens[node] == best[depth], f"slot {depth + 1}"
        depth += 1
    assert depth >= 2


def test_branches_are_drafted_where_the_checkpoint_has_them() -> None:
    model = kit.lively_model(kit.raw_config(draftwire={"branches": 4}))
    every = frozenset({Part.RANK_TREE, Part.BRANCHES})
    bench = Bench(model, parts=every, max_nodes=32)
    lane = bench.lane()
    proposal = only(bench.step((lane, opened(1, 12)))[lane])
    assert len(set(proposal.tree.branches)) > 1
    chains = Speculation(parts=frozenset({Part.BRANCHES}))
    merged = only(bench.step((lane, opened(2, 12, speculation=chains)))[lane]).tree
    assert set(merged.parts) == {Part.BRANCHES}
    single = Speculation(parts=frozenset({Part.RANK_TREE}))
    best = only(bench.step((lane, opened(3, 12, speculation=single)))[lane]).tree
    assert set(best.branches) == {0}


@pytest.mark.parametrize("rounds", [250, pytest.param(4000, marks=pytest.mark.slow)])
def test_after_hundreds_of_random_messages_all_rows_are_free_again(
    model: DraftModel, rounds: int
) -> None:
    bench = Bench(model, cache_rows=1024, max_sessions=12, max_context=120, evict_idle_s=0.0)
    chance = random.Random(7)
    lanes = [bench.lane() for _ in range(3)]
    sequence = 0
    bases: dict[tuple[Lane, int], int] = {}
    number = 0
    for _ in range(rounds):
        said = []
        for lane in lanes:
            sequence += 1
            kind = chance.random()
            mine = [key for key in bases if key[0] is lane]
            if kind < 0.4 or not mine:
                number += 1
                length = chance.randint(1, 110)
                said.append((lane, opened(number, length, sequence=sequence)))
                bases[lane, number] = length - 1
            elif kind < 0.85:
                key = chance.choice(mine)
                tokens = [chance.randrange(kit.VOCAB) for _ in range(chance.randint(1, 6))]
                wrong = chance.random() < 0.1
                said.append((lane, told(key[1], bases[key] + wrong, tokens, sequence=sequence)))
                bases[key] += len(tokens)
            elif kind < 0.95:
                key = chance.choice(mine)
                said.append((lane, Step(sequence, ends=[End(key[1], 1)])))
                del bases[key]
            else:
                bench.engine.remove_lane(lane)
                bases = {key: base for key, base in bases.items() if key[0] is not lane}
                lanes[lanes.index(lane)] = bench.lane()
        for result in bench.step(*said).values():
            for fault in result.faults:
                bases = {k: b for k, b in bases.items() if k[1] != fault.session_id}
    assert bench.engine.counters.proposals > 100
    assert bench.engine.counters.faults
    for lane in lanes:
        bench.engine.remove_lane(lane)
    bench.assert_all_free()


class Threaded:
    """An engine with its thread; answers are awaited, never slept for."""

    def __init__(self, model: DraftModel, **changes: Any) -> None:
        self.engine = Engine(model, kit.settings_for(model, **changes))
        self.answers: list[StepResult] = []
        self.arrived = threading.Condition()
        self.engine.start()

    def lane(self) -> Lane:
        return self.engine.call(
            lambda: self.engine.add_lane(kit.LaneLimits(kit.VOCAB), self._take)
        ).result(30)

    def _take(self, result: StepResult) -> None:
        with self.arrived:
            self.answers.append(result)
            self.arrived.notify_all()

    def wait(self, count: int) -> list[StepResult]:
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.answers) >= count, timeout=30)
            return self.answers


def test_a_step_that_fails_inside_costs_its_sessions_and_the_next_one_works(
    model: DraftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Threaded(model)
    try:
        lane = run.lane()
        with monkeypatch.context() as patch:
            patch.setattr(DraftModel, "draft", lambda *_: 1 / 0)
            run.engine.submit(lane, opened(1, 9))
            (failed,) = run.wait(1)
        assert [f.kind for f in failed.faults] == [FaultKind.INTERNAL]
        assert "division" not in failed.faults[0].detail
        run.engine.submit(lane, opened(2, 9, sequence=2))
        assert only(run.wait(2)[1]).session_id == 2
        assert run.engine.call(lambda: run.engine.session_count).result(30) == 1
    finally:
        run.engine.stop()


def test_what_piles_up_while_a_step_runs_is_one_step(
    model: DraftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Threaded(model)
    entered, go_on = threading.Event(), threading.Event()
    original = DraftModel.draft

    def slow(self: DraftModel, pool: Any, blocks: Any) -> torch.Tensor:
        entered.set()
        assert go_on.wait(30)
        return original(self, pool, blocks)

    monkeypatch.setattr(DraftModel, "draft", slow)
    try:
        lane = run.lane()
        run.engine.submit(lane, opened(1, 9))
        assert entered.wait(30)
        for sequence in (2, 3, 4):
            run.engine.submit(lane, opened(sequence, 9, sequence=sequence))
        go_on.set()
        first, second = run.wait(2)
        assert (first.ack_sequence, second.ack_sequence) == (1, 4)
        assert {p.session_id for p in second.proposals} == {2, 3, 4}
        assert run.engine.counters.steps == 2
    finally:
        go_on.set()
        run.engine.stop()


def test_a_step_that_lasts_too_long_is_no_progress(
    model: DraftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Threaded(model, stall_s=0.0)
    entered, go_on = threading.Event(), threading.Event()

    def stuck(self: DraftModel, pool: Any, blocks: Any) -> torch.Tensor:
        entered.set()
        assert go_on.wait(30)
        raise RuntimeError("stuck")

    monkeypatch.setattr(DraftModel, "draft", stuck)
    try:
        lane = run.lane()
        run.engine.submit(lane, opened(1, 9))
        assert entered.wait(30)
        assert not run.engine.progressing()
        go_on.set()
        run.wait(1)
        run.engine.call(lambda: None).result(30)
    finally:
        go_on.set()
        run.engine.stop()
    assert run.engine.progressing()


def test_an_outcome_without_features_waits_for_them(model: DraftModel) -> None:
    bench = Bench(model)
    lane = bench.lane()
    bench.step((lane, opened(1, 9)))
    bare = Step(2, outcomes=[Outcome(1, 1, 10, 8, [4, 5], None)])
    assert bench.step((lane, bare))[lane].proposals == []
    late = Step(3, features=[Features(1, 1, 8, kit.features(2))])
    assert only(bench.step((lane, late))[lane]).base == 10


def test_a_caller_that_gave_up_does_not_end_the_thread(model: DraftModel) -> None:
    engine = Engine(model, kit.settings_for(model))
    engine.start()
    try:
        held, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            held.set()
            go_on.wait(30)

        engine.call(hold)
        assert held.wait(30)
        forsaken = engine.call(lambda: 1)
        assert forsaken.cancel()
        go_on.set()
        assert engine.call(lambda: 2).result(30) == 2
    finally:
        engine.stop()


def test_repetition_goes_deeper_than_the_block_as_far_as_it_is_let(model: DraftModel) -> None:
    """A loop in the text is drafted as a loop, past the six positions of the block."""
    loop = [5, 6, 7, 8] * 6

    def depth(bench: Bench, lane: Lane, session_id: int, **changes: Any) -> int:
        step = opened(session_id, len(loop), **changes)
        message = replace(step.opens[0], token_ids=loop)
        answers = bench.step((lane, replace(step, opens=[message])))
        return max(only(answers[lane]).tree.depths())

    grams = Speculation(parts=frozenset({Part.NGRAM}))
    deep = Bench(model, ngram_depth=12)
    assert depth(deep, deep.lane(), 1, speculation=grams) == 12
    assert depth(deep, deep.lane(max_block_size=9), 2, speculation=grams) == 8
    short = replace(grams, max_block_size=4)
    assert depth(deep, deep.lane(), 3, speculation=short) == 3
    assert depth(deep, deep.lane(), 4, speculation=grams, budget=Budget(max_depth=7)) == 7
    predicted = replace(grams, predict=True)
    assert depth(deep, deep.lane(), 5, speculation=predicted) == 5
    usual = Bench(model)
    assert depth(usual, usual.lane(), 1, speculation=grams) == 5

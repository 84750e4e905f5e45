"""When the predictor is asked, with what, and what becomes of its answer: through the engine, and
over real gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter import kit, peer

from drafter_service import checkpoint, predictor
from drafter_service.engine import Engine, Lane, LaneLimits
from drafter_service.messages import (
    Budget,
    DraftSampling,
    Features,
    Open,
    Proposal,
    Reason,
    Speculation,
    Step,
    StepResult,
)
from drafter_service.model import DraftModel
from drafter_service.predictor import BlockSizePredictor, InputKind, PredictorConfig
from drafter_service.tree import Part
from draftwire.codec import encode
from draftwire.v1 import drafter_pb2 as pb
from draftwire.v1 import types_pb2

SIZES = (3, 5, 8)
PREDICT = Speculation(predict=True)


@pytest.fixture(scope="module")
def model() -> DraftModel:
    return kit.lively_model(kit.raw_config())


def thresholds(kind: InputKind, width: int, *, temperature: bool = False) -> BlockSizePredictor:
    """Chooses 8 where the first input is above zero and 3 where it is below; with `temperature`,
    5 where the temperature is above 1.
    """
    config = PredictorConfig(kind, width, SIZES, "d" * 64, 4, 0.2, temperature)
    network = BlockSizePredictor(config)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
        network.first.weight[0, 0], network.first.weight[1, 0] = 1.0, -1.0
        network.output.weight[2, 0], network.output.weight[0, 1] = 1.0, 1.0
        if temperature:
            network.first.weight[2, -1], network.first.bias[2] = 1.0, -1.0
            network.output.weight[1, 2] = 1e6
    return network.eval()


class Bench(kit.Bench):
    """An engine with a predictor, stepped by hand."""

    def __init__(self, model: DraftModel, asked: BlockSizePredictor | None) -> None:
        settings = kit.settings_for(model, parts=frozenset({Part.ARGMAX}))
        self.engine = Engine(model, settings, asked)
        self.free = self.engine.pool.free_rows


def opening(
    session_id: int,
    length: int,
    *,
    prompt: int | None = None,
    speculation: Speculation = PREDICT,
    epoch: int = 1,
    **changes: Any,
) -> Step:
    """A session of `length` tokens with all its features; the prompt ends before the anchor."""
    step = kit.opened(session_id, length, speculation=speculation, **changes)
    message = replace(
        step.opens[0], prompt_tokens=length - 1 if prompt is None else prompt, epoch=epoch
    )
    rows = replace(step.features[0], epoch=epoch)
    return Step(1, opens=[message], features=[rows])


def with_row(step: Step, position: int, value: float) -> Step:
    """The step with the first entry of one feature row set."""
    (features,) = step.features
    assert isinstance(features, Features)
    rows = features.rows.clone()
    rows[position, 0] = value
    return replace(step, features=[replace(features, rows=rows)])


def joined(steps: Sequence[Step]) -> Step:
    return Step(
        1, opens=[s.opens[0] for s in steps], features=[f for s in steps for f in s.features]
    )


def proposals(bench: Bench, lane: Lane, step: Step) -> dict[int, Proposal]:
    result: StepResult = bench.step((lane, step))[lane]
    assert not result.faults
    return {proposal.session_id: proposal for proposal in result.proposals}


def test_sessions_opened_in_one_step_are_asked_for_in_one_pass_and_never_again(
    model: DraftModel,
) -> None:
    bench = Bench(model, thresholds(InputKind.CONTEXT, kit.HIDDEN))
    lane = bench.lane()
    steps = [with_row(opening(n, 14), 12, value) for n, value in ((1, 2.0), (2, -2.0), (3, 1.0))]
    result = bench.step((lane, joined(steps)))[lane]
    found = {proposal.session_id: proposal for proposal in result.proposals}
    assert {n: found[n].block_size for n in found} == {1: 8, 2: 3, 3: 8}
    assert {proposal.reason for proposal in found.values()} == {Reason.PREDICTED}
    assert len(found[1].tree.tokens) == 7  # more than the trained 6 has
    assert result.predictor_ns > 0
    later = bench.step((lane, kit.told(1, 13, [3, 4])))[lane]
    assert (later.proposals[0].block_size, later.proposals[0].reason) == (8, Reason.PREDICTED)
    assert later.predictor_ns == 0
    asked = bench.engine.predictor
    assert (asked.calls, asked.predicted, asked.missed) == (1, 3, 0)


@pytest.mark.parametrize(
    ("speculation", "size", "reason"),
    [
        (Speculation(), 6, Reason.FIXED),
        (PREDICT, 8, Reason.PREDICTED),
        (Speculation(predict=True, max_block_size=7), 7, Reason.REQUEST),
        (Speculation(off=True), 1, Reason.OFF),
    ],
)
def test_the_mode_decides_whether_the_prediction_counts_and_limits_cut_it(
    model: DraftModel, speculation: Speculation, size: int, reason: Reason
) -> None:
    bench = Bench(model, thresholds(InputKind.CONTEXT, kit.HIDDEN))
    step = with_row(opening(1, 14, speculation=speculation), 12, 1.0)
    (proposal,) = proposals(bench, bench.lane(), step).values()
    assert (proposal.block_size, proposal.reason) == (size, reason)


def test_the_verifiers_largest_block_and_a_rounds_budget_cap_the_prediction(
    model: DraftModel,
) -> None:
    bench = Bench(model, thresholds(InputKind.CONTEXT, kit.HIDDEN))
    step = with_row(opening(1, 14), 12, 1.0)
    (proposal,) = proposals(bench, bench.lane(max_block_size=7), step).values()
    assert (proposal.block_size, proposal.reason) == (7, Reason.PREDICTED)
    capped = with_row(opening(2, 14, budget=Budget(max_depth=3)), 12, 1.0)
    (proposal,) = proposals(bench, bench.lane(), capped).values()
    assert (proposal.block_size, proposal.reason) == (4, Reason.MAX_TOKENS)


def test_the_row_is_the_last_prompt_positions_even_if_the_session_opens_in_mid_answer(
    model: DraftModel,
) -> None:
    bench = Bench(model, thresholds(InputKind.CONTEXT, kit.HIDDEN))
    lane = bench.lane()
    early = with_row(with_row(opening(1, 20, prompt=9), 8, 1.0), 18, -1.0)
    assert proposals(bench, lane, early)[1].block_size == 8
    # Opened again in a later epoch, in mid-answer: the same choice.
    again = with_row(with_row(opening(1, 30, prompt=9, epoch=2), 8, 1.0), 28, -1.0)
    assert proposals(bench, lane, again)[1].block_size == 8


def test_rows_that_come_in_several_messages_are_waited_for(model: DraftModel) -> None:
    bench = Bench(model, thresholds(InputKind.CONTEXT, kit.HIDDEN))
    lane = bench.lane()
    whole = with_row(opening(1, 20, prompt=9), 8, -1.0)
    (features,) = whole.features
    assert isinstance(features, Features)
    first = replace(features, rows=features.rows[:8])
    rest = replace(features, rows=features.rows[8:], first_position=8)
    result = bench.step((lane, replace(whole, features=[first])))[lane]
    assert not result.proposals
    assert bench.engine.predictor.calls == 0
    (proposal,) = proposals(bench, lane, Step(2, features=[rest])).values()
    assert (proposal.block_size, proposal.reason) == (3, Reason.PREDICTED)


def test_a_lane_of_raw_features_asks_with_the_fused_row(model: DraftModel) -> None:
    width = model.config.raw_feature_size
    bench = Bench(model, thresholds(InputKind.CONTEXT, kit.HIDDEN))
    raw = opening(1, 14, width=width)
    (features,) = raw.features
    assert isinstance(features, Features)
    fused = model.fuse(features.rows)
    want = 8 if fused[12, 0] > 0 else 3
    assert proposals(bench, bench.lane(raw_features=True), raw)[1].block_size == want
    (turned,) = opening(2, 14, width=width).features
    flipped = replace(opening(2, 14, width=width), features=[replace(turned, rows=-features.rows)])
    found = proposals(bench, bench.lane(raw_features=True), flipped)
    assert found[2].block_size == 11 - want


@pytest.mark.parametrize("kind", [InputKind.LOGITS, InputKind.EXPECTED_EMBEDDING])
def test_logits_are_turned_into_the_networks_input(model: DraftModel, kind: InputKind) -> None:
    width = kit.VOCAB if kind is InputKind.LOGITS else kit.HIDDEN
    asked = thresholds(kind, width)
    draw = torch.Generator().manual_seed(5)
    logits = [torch.randn(kit.VOCAB, generator=draw) for _ in range(6)]
    rows = [one.log_softmax(-1) for one in logits]
    if kind is InputKind.EXPECTED_EMBEDDING:
        matrix, _ = kit.target_matrices(model.config)
        rows = [one.softmax(-1) @ matrix for one in logits]
    else:
        asked.shift.fill_(float(torch.stack(rows)[:, 0].median()))
    want = {n: 8 if r[0] > asked.shift[0] else 3 for n, r in enumerate(rows, 1)}
    assert set(want.values()) == {3, 8}
    bench = Bench(model, asked)
    steps = [opening(n, 14, last_logits=one) for n, one in enumerate(logits, 1)]
    found = proposals(bench, bench.lane(), joined(steps))
    assert {n: proposal.block_size for n, proposal in found.items()} == want
    assert bench.engine.predictor.calls == 1


@pytest.mark.parametrize("logits", [None, torch.zeros(kit.VOCAB - 1)])
def test_a_session_without_a_usable_input_drafts_with_the_configured_size_and_is_counted(
    model: DraftModel, logits: torch.Tensor | None
) -> None:
    bench = Bench(model, thresholds(InputKind.LOGITS, kit.VOCAB))
    (proposal,) = proposals(bench, bench.lane(), opening(1, 14, last_logits=logits)).values()
    assert (proposal.block_size, proposal.reason) == (6, Reason.FIXED)
    asked = bench.engine.predictor
    assert (asked.calls, asked.predicted, asked.missed) == (0, 0, 1)


def test_without_a_predictor_the_modes_draft_with_the_configured_size(model: DraftModel) -> None:
    bench = Bench(model, None)
    (proposal,) = proposals(bench, bench.lane(), opening(1, 14)).values()
    assert (proposal.block_size, proposal.reason) == (6, Reason.FIXED)
    assert bench.engine.predictor.missed == 0


def test_the_temperature_is_an_input_where_the_predictor_takes_it(model: DraftModel) -> None:
    bench = Bench(model, thresholds(InputKind.CONTEXT, kit.HIDDEN, temperature=True))
    lane = bench.lane()
    for number, temperature, size in ((1, 0.0, 8), (2, 1.5, 5)):
        sampling = DraftSampling(temperature=temperature, seed=1)
        step = with_row(opening(number, 14, sampling=sampling), 12, 1.0)
        assert proposals(bench, lane, step)[number].block_size == size


def test_blocks_past_the_trained_size_have_room_in_the_cache(model: DraftModel) -> None:
    asked = thresholds(InputKind.CONTEXT, kit.HIDDEN)
    settings = kit.settings_for(model, cache_rows=192, max_sessions=2)
    engine = Engine(model, settings, asked)
    lane = engine.add_lane(LaneLimits(embedding_rows=kit.VOCAB), lambda result: None)
    with torch.inference_mode():
        ((_, result),) = engine.step([(lane, with_row(opening(1, 56), 54, 1.0))])
        assert result.proposals[0].block_size == 8
        base = 55
        for _ in range(30):
            step = kit.told(1, base, [3, 4, 5])
            ((_, result),) = engine.step([(lane, step)])
            assert result.proposals[0].block_size == 8
            engine.pool.check_integrity()
            base += 3


def test_a_session_that_goes_away_unasked_leaves_nothing_behind(model: DraftModel) -> None:
    bench = Bench(model, thresholds(InputKind.CONTEXT, kit.HIDDEN))
    lane = bench.lane()
    step = opening(1, 14, budget=Budget(want_proposal=False))
    assert not proposals(bench, lane, step)
    asked = bench.engine.predictor
    assert len(asked._clues) == 1
    bench.engine.remove_lane(lane)
    assert len(asked._clues) == 0
    bench.assert_all_free()


def test_over_the_wire_the_handshake_asks_for_logits_and_the_modes_use_them(
    tmp_path: Path,
) -> None:
    model = peer.write_checkpoint(tmp_path)
    sha256 = checkpoint.load(str(tmp_path), device=torch.device("cpu")).base_sha256
    asked = thresholds(InputKind.LOGITS, kit.VOCAB)
    asked.config = replace(asked.config, drafter_sha256=sha256)
    asked.shift.fill_(-4.0)
    predictor.save(tmp_path, asked)
    modes = {
        1: (types_pb2.SPECULATION_MODE_PREDICTED, 8, types_pb2.BLOCK_SIZE_REASON_PREDICTED),
        2: (types_pb2.SPECULATION_MODE_ADAPTIVE, 8, types_pb2.BLOCK_SIZE_REASON_PREDICTED),
        3: (types_pb2.SPECULATION_MODE_FIXED, 6, types_pb2.BLOCK_SIZE_REASON_FIXED),
    }

    async def main() -> None:
        async with (
            peer.drafter(tmp_path, draft_parts=("argmax",)) as (_, address),
            peer.peer(address, model) as lane,
        ):
            reply = await lane.shake_hands()
            assert reply.wants_last_logits
            assert list(reply.predicted_block_sizes) == list(SIZES)
            assert (reply.block_size, reply.max_block_size) == (6, 8)
            likely = torch.zeros(kit.VOCAB)
            likely[0] = 5.0
            opens: list[pb.OpenSession] = []
            rows: list[pb.Features] = []
            for number, (mode, _, _) in modes.items():
                message, features = lane.opening(number, 14)
                message.speculation.mode = mode
                message.last_logits.CopyFrom(encode(likely))
                opens.append(message)
                rows.append(features)
            broken, features = lane.opening(4, 14)
            broken.speculation.mode = types_pb2.SPECULATION_MODE_PREDICTED
            broken.last_logits.CopyFrom(encode(torch.zeros(2, kit.VOCAB)))
            step = await lane.step(opens=[*opens, broken], features=[*rows, features])
            assert not step.faults
            found = {p.key.session_id: (p.block_size, p.reason) for p in step.proposals}
            assert found.pop(4) == (6, types_pb2.BLOCK_SIZE_REASON_FIXED)
            assert found == {n: (size, reason) for n, (_, size, reason) in modes.items()}
            assert step.predictor_time.ToNanoseconds() > 0
            info = await peer.get_info(address)
            assert list(info.predicted_block_sizes) == list(SIZES)
            assert (info.predictions, info.predictions_missed) == (2, 1)
            assert info.predictor_time.ToNanoseconds() > 0

    asyncio.run(main())


def test_a_predictor_of_context_features_asks_the_verifier_for_nothing_more(
    tmp_path: Path,
) -> None:
    model = peer.write_checkpoint(tmp_path)
    sha256 = checkpoint.load(str(tmp_path), device=torch.device("cpu")).base_sha256
    asked = thresholds(InputKind.CONTEXT, kit.HIDDEN)
    asked.config = replace(asked.config, drafter_sha256=sha256)
    predictor.save(tmp_path, asked)

    async def main() -> None:
        async with peer.drafter(tmp_path) as (_, address), peer.peer(address, model) as lane:
            reply = await lane.shake_hands()
            assert not reply.wants_last_logits
            assert list(reply.predicted_block_sizes) == list(SIZES)

    asyncio.run(main())


def test_opening_without_a_prompt_position_before_the_anchor_is_not_predicted(
    model: DraftModel,
) -> None:
    bench = Bench(model, thresholds(InputKind.CONTEXT, kit.HIDDEN))
    message = Open(1, 1, 0, [5], 1, speculation=PREDICT)
    (proposal,) = proposals(bench, bench.lane(), Step(1, opens=[message])).values()
    assert (proposal.block_size, proposal.reason) == (6, Reason.FIXED)
    assert bench.engine.predictor.missed == 1

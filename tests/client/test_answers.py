"""Messages become answers: order, completeness, statistics. Pure, without gRPC."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2
from hypothesis import given
from hypothesis import strategies as st

from draftwire.v1 import types_pb2, verifier_pb2
from draftwire_client import (
    AcceptanceRule,
    BlockSizeReason,
    DraftPart,
    ElementType,
    FinishReason,
    HealthStatus,
    Internal,
    LaneState,
    SpeculationMode,
)
from draftwire_client.answer import Answer
from draftwire_client.responses import read_health, read_info, read_trailers, word

Message = verifier_pb2.GenerateResponse
STARTED = Message(started=verifier_pb2.Started(request_id="r", prompt_tokens=3))
FINISHED = Message(finished=verifier_pb2.Finished(reason=verifier_pb2.FINISH_REASON_EOS))

ENUMS: list[tuple[Any, Any]] = [
    (verifier_pb2.FinishReason, FinishReason),
    (verifier_pb2.LaneState, LaneState),
    (types_pb2.SpeculationMode, SpeculationMode),
    (types_pb2.AcceptanceRule, AcceptanceRule),
    (types_pb2.DraftPart, DraftPart),
    (types_pb2.BlockSizeReason, BlockSizeReason),
    (types_pb2.ElementType, ElementType),
]


def dataclass_names(value: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(value)]


def delta(text: str, token_ids: list[int]) -> verifier_pb2.GenerateResponse:
    return Message(delta=verifier_pb2.Delta(text=text, token_ids=token_ids))


@pytest.mark.parametrize(("wrapper", "words"), ENUMS)
def test_every_value_of_an_enum_has_its_own_word(wrapper: Any, words: Any) -> None:
    read = [word(wrapper, words, number) for number in wrapper.values()]
    assert read == list(words)


@pytest.mark.parametrize(("wrapper", "words"), ENUMS)
def test_a_value_that_only_a_newer_server_knows_reads_as_unspecified(
    wrapper: Any, words: Any
) -> None:
    assert word(wrapper, words, 9999) is words.UNSPECIFIED


def test_every_health_status_is_known() -> None:
    statuses = health_pb2.HealthCheckResponse.ServingStatus
    for name in statuses.keys():  # noqa: SIM118 - the wrapper is no mapping
        response = health_pb2.HealthCheckResponse(status=statuses.Value(name))
        assert read_health(response) is HealthStatus[name]


@given(
    st.text(max_size=30),
    st.lists(st.integers(0, 30), max_size=6),
    st.lists(st.integers(0, 99), max_size=20),
    st.lists(st.integers(0, 20), max_size=6),
)
def test_however_an_answer_is_cut_into_chunks_the_result_is_the_same(
    text: str, text_cuts: list[int], ids: list[int], id_cuts: list[int]
) -> None:
    def pieces(whole: Any, cuts: list[int]) -> list[Any]:
        edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
        return [whole[a:b] for a, b in pairwise(edges)]

    texts, id_lists = pieces(text, text_cuts), pieces(ids, id_cuts)
    rounds = max(len(texts), len(id_lists))
    texts += [""] * (rounds - len(texts))
    id_lists += [[]] * (rounds - len(id_lists))
    answer = Answer()
    answer.add(STARTED, 0.0)
    chunks = [
        answer.add(delta(piece, list(some)), 1.0)
        for piece, some in zip(texts, id_lists, strict=True)
    ]
    answer.add(FINISHED, 2.0)
    result = answer.result((), 3.0, 1)
    seen = [chunk for chunk in chunks if chunk is not None]
    assert result.text == "".join(chunk.text for chunk in seen) == text
    assert list(result.token_ids) == [i for chunk in seen for i in chunk.token_ids] == ids
    assert all(chunk.text or chunk.token_ids for chunk in seen)
    assert result.timing.first_token_s == (1.0 if ids else None)


@given(st.lists(st.sampled_from(["started", "delta", "finished", "future"]), max_size=6))
def test_only_started_deltas_finished_in_this_order_is_an_answer(events: list[str]) -> None:
    messages = {
        "started": STARTED,
        "delta": delta("x", [1]),
        "finished": FINISHED,
        "future": Message(),
    }
    answer = Answer()
    known = [event for event in events if event != "future"]
    middle = known[1:-1]
    good = known[:1] == ["started"] and known[-1:] == ["finished"] and set(middle) <= {"delta"}
    with nullcontext() if good else pytest.raises(Internal, match="server"):
        for event in events:
            answer.add(messages[event], 0.0)
        answer.result((), 0.0, 1)


def test_statistics_come_from_finished_and_else_from_the_trailers() -> None:
    trailers = [
        ("draftwire-usage-bin", types_pb2.Usage(completion_tokens=5).SerializeToString()),
        (
            "draftwire-acceptance-bin",
            types_pb2.AcceptanceStats(accepted_tokens=4).SerializeToString(),
        ),
    ]
    answer = Answer()
    answer.add(STARTED, 0.0)
    answer.add(FINISHED, 0.0)
    result = answer.result(trailers, 0.0, 1)
    assert (result.usage.completion_tokens, result.acceptance.accepted) == (5, 4)

    finished = verifier_pb2.Finished(usage=types_pb2.Usage(completion_tokens=7))
    other = Answer()
    other.add(STARTED, 0.0)
    other.add(Message(finished=finished), 0.0)
    assert other.result(trailers, 0.0, 1).usage.completion_tokens == 7


@given(st.binary())
def test_trailers_of_any_bytes_never_raise(data: bytes) -> None:
    read_trailers([("draftwire-usage-bin", data), ("draftwire-acceptance-bin", data)])


def test_rates_are_per_position_and_never_divide_by_nothing() -> None:
    stats = types_pb2.AcceptanceStats(
        rounds=4,
        drafted_tokens=8,
        accepted_tokens=5,
        rejected_tokens=3,
        accepted_per_position=[4, 1, 0],
        drafted_per_position=[4, 4, 0],
        mean_acceptance_length=2.25,
        block_sizes=[
            types_pb2.BlockSizeCount(
                block_size=3, reason=types_pb2.BLOCK_SIZE_REASON_LOAD, rounds=4
            )
        ],
        accepted_per_part=[
            types_pb2.PartCount(part=types_pb2.DRAFT_PART_NGRAM, drafted=8, accepted=5)
        ],
    )
    answer = Answer()
    answer.add(STARTED, 0.0)
    answer.add(Message(finished=verifier_pb2.Finished(acceptance=stats)), 0.0)
    acceptance = answer.result((), 0.0, 1).acceptance
    assert acceptance.rate == 0.625
    assert acceptance.rate_per_position == (1.0, 0.25, 0.0)
    assert acceptance.mean_acceptance_length == 2.25
    assert acceptance.block_sizes[0].reason is BlockSizeReason.LOAD
    assert acceptance.parts[0].part is DraftPart.NGRAM


def test_settings_tell_unset_from_zero() -> None:
    started = verifier_pb2.Started(
        request_id="r",
        sampling=types_pb2.SamplingParams(temperature=0.0, seed=0, logit_bias={3: 1.0}),
        speculation=types_pb2.SpeculationOptions(mode=types_pb2.SPECULATION_MODE_FIXED),
    )
    answer = Answer()
    answer.add(Message(started=started), 0.0)
    assert answer.settings is not None
    assert (answer.settings.temperature, answer.settings.seed) == (0.0, 0)
    assert answer.settings.top_p is None
    assert answer.settings.max_tokens is None
    assert answer.settings.speculation is SpeculationMode.FIXED
    assert answer.settings.rule is None
    assert answer.settings.logit_bias == {3: 1.0}


def test_info_carries_every_field_of_the_contract() -> None:
    response = verifier_pb2.VerifierGetInfoResponse(
        version=types_pb2.ServiceVersion(
            package_version="0.1.0",
            protocol_minor=2,
            instance_id="i",
            uptime=Duration(seconds=3, nanos=500_000_000),
        ),
        model=types_pb2.ModelIdentity(
            name="m", hidden_size=64, dtype=types_pb2.ELEMENT_TYPE_BFLOAT16, max_context=512
        ),
        config={"listen": "x"},
        lanes=[
            verifier_pb2.LaneInfo(
                target="d:1",
                state=verifier_pb2.LANE_STATE_LOST,
                round_trip=Duration(nanos=2_000_000),
                last_error="gone",
            )
        ],
        load=verifier_pb2.LoadInfo(running=1, total_pages=9, page_size=16),
        totals=types_pb2.AcceptanceStats(rounds=7),
        draining=True,
        devices=[types_pb2.DeviceInfo(index=3, utilization=0.0, power_watts=70.5)],
    )
    info = read_info(response)
    assert info.uptime_s == pytest.approx(3.5)
    assert (info.protocol_minor, info.draining, info.config) == (2, True, {"listen": "x"})
    assert info.model.dtype is ElementType.BFLOAT16
    assert info.lanes[0].state is LaneState.LOST
    assert info.lanes[0].round_trip_s == pytest.approx(0.002)
    assert (info.load.page_size, info.totals.rounds) == (16, 7)
    device = info.devices[0]
    assert (device.index, device.utilization) == (3, 0.0)
    assert (device.power_watts, device.energy_joules) == (70.5, None)
    # A field added to the contract is missed here until the client reads it.
    for message, read in [
        (response.load, info.load),
        (response.lanes[0], info.lanes[0]),
        (response.model, info.model),
        (response.devices[0], info.devices[0]),
    ]:
        names = {field.name for field in message.DESCRIPTOR.fields}
        assert names == {name.removesuffix("_s") for name in dataclass_names(read)}

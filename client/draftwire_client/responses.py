"""Protobuf to dataclasses: what both clients read, message by message.

Knows which field is which. Does not know the order of messages: that is in `answer`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from draftwire.v1 import types_pb2, verifier_pb2
from draftwire_client import enums
from draftwire_client.info import DeviceInfo, Info, LaneInfo, LoadInfo, ModelInfo
from draftwire_client.types import (
    Acceptance,
    BlockSizeCount,
    PartCount,
    Settings,
    TokenLogprob,
    TopLogprob,
    Usage,
)

USAGE_TRAILER = "draftwire-usage-bin"
ACCEPTANCE_TRAILER = "draftwire-acceptance-bin"

Trailers = Iterable[tuple[str, str | bytes]] | None
_SAMPLING = (
    "seed",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
Word = TypeVar("Word", bound=StrEnum)


def word(wrapper: Any, words: type[Word], number: int) -> Word:
    """The word for an enum's number; UNSPECIFIED for a number that only a newer server knows."""
    by_number = wrapper.DESCRIPTOR.values_by_number
    zero: str = by_number[0].name
    name: str = by_number[number].name if number in by_number else zero
    member = name.removeprefix(zero.removesuffix("UNSPECIFIED"))
    return words[member] if member in words.__members__ else words["UNSPECIFIED"]


def seconds(duration: Duration) -> float:
    """A Duration in seconds."""
    return float(duration.seconds + duration.nanos * 1e-9)


def read_health(response: health_pb2.HealthCheckResponse) -> enums.HealthStatus:
    """The status of a service."""
    names = health_pb2.HealthCheckResponse.ServingStatus.DESCRIPTOR.values_by_number
    known = enums.HealthStatus.__members__
    name = names[response.status].name if response.status in names else "UNKNOWN"
    return known.get(name, enums.HealthStatus.UNKNOWN)


def read_trailers(trailers: Trailers) -> tuple[Usage | None, Acceptance | None]:
    """Statistics in the trailers, None where absent.

    Unreadable ones are passed over: the trailers of a failed call must not hide why it failed.
    """
    usage: Usage | None = None
    acceptance: Acceptance | None = None
    for key, value in trailers or ():
        if not isinstance(value, bytes):
            continue
        try:
            if key == USAGE_TRAILER:
                usage = read_usage(types_pb2.Usage.FromString(value))
            elif key == ACCEPTANCE_TRAILER:
                acceptance = read_acceptance(types_pb2.AcceptanceStats.FromString(value))
        except DecodeError:
            continue
    return usage, acceptance


def read_usage(usage: types_pb2.Usage) -> Usage:
    """Usage."""
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)


def read_acceptance(
    stats: types_pb2.AcceptanceStats | types_pb2.AcceptanceTotals,
) -> Acceptance:
    """Acceptance statistics, of an answer or of all of a server's."""
    return Acceptance(
        rounds=stats.rounds,
        plain_rounds=stats.plain_rounds,
        drafted=stats.drafted_tokens,
        accepted=stats.accepted_tokens,
        rejected=stats.rejected_tokens,
        discarded=stats.discarded_tokens,
        accepted_per_position=tuple(stats.accepted_per_position),
        drafted_per_position=tuple(stats.drafted_per_position),
        mean_acceptance_length=stats.mean_acceptance_length,
        stale_proposals=stats.stale_proposals,
        reopened=stats.reopened,
        block_sizes=tuple(
            BlockSizeCount(
                count.block_size,
                word(types_pb2.BlockSizeReason, enums.BlockSizeReason, count.reason),
                count.rounds,
            )
            for count in stats.block_sizes
        ),
        parts=tuple(
            PartCount(_part(count.part), count.drafted, count.accepted)
            for count in stats.accepted_per_part
        ),
    )


def read_settings(started: verifier_pb2.Started) -> Settings:
    """What is in force for a request."""
    sampling, stop, speculation = started.sampling, started.stop, started.speculation
    mode = _given(speculation, "mode")
    rule = _given(speculation, "rule")
    return Settings(
        request_id=started.request_id,
        prompt_tokens=started.prompt_tokens,
        logit_bias=dict(sampling.logit_bias),
        max_tokens=_given(stop, "max_tokens"),
        min_tokens=_given(stop, "min_tokens"),
        ignore_eos=_given(stop, "ignore_eos"),
        stop=tuple(stop.stop_strings),
        stop_token_ids=tuple(stop.stop_token_ids),
        speculation=(
            None if mode is None else word(types_pb2.SpeculationMode, enums.SpeculationMode, mode)
        ),
        max_block_size=_given(speculation, "max_block_size"),
        max_nodes=_given(speculation, "max_nodes"),
        rule=(None if rule is None else word(types_pb2.AcceptanceRule, enums.AcceptanceRule, rule)),
        draft_parts=tuple(_part(part) for part in speculation.parts),
        **{name: _given(sampling, name) for name in _SAMPLING},
    )


def read_info(info: verifier_pb2.VerifierGetInfoResponse) -> Info:
    """What a verifier is."""
    model, load = info.model, info.load
    return Info(
        package_version=info.version.package_version,
        protocol_minor=info.version.protocol_minor,
        instance_id=info.version.instance_id,
        uptime_s=seconds(info.version.uptime),
        draining=info.draining,
        model=ModelInfo(
            name=model.name,
            dtype=word(types_pb2.ElementType, enums.ElementType, model.dtype),
            vocab_size=model.vocab_size,
            embedding_rows=model.embedding_rows,
            hidden_size=model.hidden_size,
            num_layers=model.num_layers,
            max_context=model.max_context,
            tokenizer_sha256=model.tokenizer_sha256,
            vocabulary_sha256=model.vocabulary_sha256,
            template_sha256=model.template_sha256,
            weights_sha256=model.weights_sha256,
        ),
        config=dict(info.config),
        lanes=tuple(_lane(lane) for lane in info.lanes),
        load=LoadInfo(
            running=load.running,
            waiting=load.waiting,
            free_pages=load.free_pages,
            total_pages=load.total_pages,
            page_size=load.page_size,
            steps=load.steps,
            tokens=load.tokens,
        ),
        # An older server has the narrow form only.
        totals=read_acceptance(info.counters if info.HasField("counters") else info.totals),
        devices=tuple(_device(device) for device in info.devices),
    )


def _device(device: types_pb2.DeviceInfo) -> DeviceInfo:
    names = [name.name for name in device.DESCRIPTOR.fields if name.name != "index"]
    return DeviceInfo(device.index, **{name: _given(device, name) for name in names})


def _lane(lane: verifier_pb2.LaneInfo) -> LaneInfo:
    return LaneInfo(
        target=lane.target,
        state=word(verifier_pb2.LaneState, enums.LaneState, lane.state),
        drafter_name=lane.drafter_name,
        trained=lane.trained,
        sessions=lane.sessions,
        round_trip_s=seconds(lane.round_trip),
        model_time_s=seconds(lane.model_time),
        block_size=lane.block_size,
        losses=lane.losses,
        last_error=lane.last_error,
        steps_sent=lane.steps_sent,
        steps_received=lane.steps_received,
    )


def _part(number: int) -> enums.DraftPart:
    return word(types_pb2.DraftPart, enums.DraftPart, number)


def read_logprob(entry: verifier_pb2.TokenLogprob) -> TokenLogprob:
    """Log-probability of one token."""
    top = tuple(TopLogprob(item.token_id, item.logprob) for item in entry.top)
    return TokenLogprob(entry.token_id, entry.logprob, top)


def _given(message: Any, name: str) -> Any:
    return getattr(message, name) if message.HasField(name) else None

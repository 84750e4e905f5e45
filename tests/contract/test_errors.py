"""Errors over a real connection: what is raised in a servicer is what the client gets."""

from __future__ import annotations

import asyncio
import pickle

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwire import channel, errors
from draftwire.v1 import verifier_pb2, verifier_pb2_grpc

CLASSES = [
    errors.FailedPrecondition,
    errors.ResourceExhausted,
    errors.Unavailable,
    errors.DeadlineExceeded,
    errors.Cancelled,
    errors.NotFound,
    errors.Unauthenticated,
    errors.Internal,
]


async def ask(address: str, text: str) -> errors.DraftwireError:
    async with channel.open_channel(address) as connection:
        stub = verifier_pb2_grpc.VerifierStub(connection)
        with pytest.raises(grpc.RpcError) as caught:
            async for _ in stub.Generate(verifier_pb2.GenerateRequest(text=text)):
                pass
        return errors.from_rpc_error(caught.value)


def test_a_typed_error_arrives_with_field_limit_and_value(serving, script):
    async def main():
        async with serving(script()) as running:
            return await ask(running.address, "typed")

    error = asyncio.run(main())
    assert isinstance(error, errors.InvalidArgument)
    assert (error.field, error.value, error.limit) == ("sampling.temperature", "-1.0", "at least 0")
    assert error.reason == "INVALID_FIELD"
    assert str(error) == "sampling.temperature is -1.0; it must be at least 0"


@pytest.mark.parametrize("text", ["bug", "late bug"])
def test_an_unhandled_exception_shows_an_id_and_nothing_else(serving, script, text, capfd):
    async def main():
        async with serving(script()) as running:
            return await ask(running.address, text)

    error = asyncio.run(main())
    logged = capfd.readouterr().err
    assert isinstance(error, errors.Internal)
    assert "swordfish" not in str(error)
    assert "swordfish" not in str(error.metadata)
    assert error.metadata["error_id"] in str(error)
    assert error.metadata["error_id"] in logged
    assert "swordfish" in logged


def test_trailers_set_by_the_handler_survive_its_error(serving, script):
    async def main():
        async with serving(script()) as running, channel.open_channel(running.address) as channel_:
            stub = verifier_pb2_grpc.VerifierStub(channel_)
            call = stub.Generate(verifier_pb2.GenerateRequest(text="trailers"))
            with pytest.raises(grpc.RpcError) as caught:
                await call.read()
            return dict(await call.trailing_metadata()), errors.from_rpc_error(caught.value)

    trailers, error = asyncio.run(main())
    assert trailers["draftwire-usage-bin"] == b"usage"
    assert isinstance(error, errors.ResourceExhausted)
    assert error.metadata == {"limit": "8"}


def test_the_sync_stack_gives_the_same_error(serving, script):
    def blocking(address):
        with channel.open_sync_channel(address) as connection:
            stub = verifier_pb2_grpc.VerifierStub(connection)
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Generate(verifier_pb2.GenerateRequest(text="typed"), timeout=30))
            return errors.from_rpc_error(caught.value)

    async def main():
        async with serving(script()) as running:
            return await asyncio.to_thread(blocking, running.address)

    assert isinstance(asyncio.run(main()), errors.InvalidArgument)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_survives_the_status_and_pickle(cls):
    status = errors.to_status(cls("SOME_REASON", "12 of 8 pages", pages=12, limit=8))
    back = errors.from_status_parts(status.code, status.details, status.trailing_metadata)
    for error in (back, pickle.loads(pickle.dumps(back))):
        assert type(error) is cls
        assert (error.reason, error.message) == ("SOME_REASON", "12 of 8 pages")
        assert error.metadata == {"pages": "12", "limit": "8"}


@given(field=st.text(), value=st.text(max_size=5000), limit=st.text(max_size=5000))
def test_any_text_fits_into_a_status(field, value, limit):
    error = errors.InvalidArgument(field, value, limit)
    status = errors.to_status(error)
    assert len(status.trailing_metadata[0][1]) < 8192
    back = errors.from_status_parts(status.code, status.details, status.trailing_metadata)
    assert isinstance(back, errors.InvalidArgument)
    assert (back.field, back.value, back.limit) == (error.field, error.value, error.limit)
    assert len(back.value) <= 200


@given(st.binary(max_size=200))
def test_details_that_are_no_status_are_passed_over(garbage):
    error = errors.from_status_parts(
        grpc.StatusCode.NOT_FOUND, "gone", [("grpc-status-details-bin", garbage)]
    )
    assert isinstance(error, errors.NotFound)
    assert (error.reason, error.message) == (errors.UNSPECIFIED, "gone")


def test_codes_without_a_class_keep_their_code():
    error = errors.from_status_parts(grpc.StatusCode.UNIMPLEMENTED, "no such method", None)
    assert type(error) is errors.DraftwireError
    assert error.code is grpc.StatusCode.UNIMPLEMENTED


def test_a_reason_that_is_not_upper_snake_is_a_mistake_in_the_program():
    with pytest.raises(ValueError, match="UPPER_SNAKE"):
        errors.Unavailable("not ready", "…")

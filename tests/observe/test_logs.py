"""One line a request on each side, with its id, and nothing in it that was not asked for."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fakes import generate, tiny_target
from hypothesis import given
from hypothesis import strategies as st
from observe.pair_kit import metered_drafter, metered_verifier

from draftwire import logs
from draftwire.v1 import types_pb2, verifier_pb2

STOP = {"max_tokens": 10, "ignore_eos": True}
SECRET = "the goose flies at midnight"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


@contextlib.contextmanager
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Lines that services of this process log, parsed."""
    stream, lines = io.StringIO(), []
    monkeypatch.setattr("sys.stderr", stream)
    try:
        yield lines
    finally:
        for text in stream.getvalue().splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(text))


def of(lines: list[dict[str, Any]], event: str, **wanted: Any) -> list[dict[str, Any]]:
    """Lines of an event with these values."""
    return [line for line in lines if line.get("event") == event and wanted.items() <= line.items()]


def test_a_request_leaves_one_line_at_the_verifier_and_one_at_the_drafter(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> Any:
        async with (
            metered_drafter(target, log_level="info") as (_, address, _),
            metered_verifier(target, address, log_level="info") as (_, stub, _),
        ):
            answer = await generate(
                stub,
                SECRET,
                sampling={"temperature": 0, "logit_bias": {66: 100.0}},
                stop=STOP,
                speculation={"mode": types_pb2.SPECULATION_MODE_FIXED},
                request_id="mine-7",
            )
            with pytest.raises(grpc.RpcError):
                await generate(stub, SECRET, sampling={"top_p": 2.0}, request_id="wrong-8")
            return answer

    with captured(monkeypatch) as lines:
        answer = asyncio.run(main())
    (line,) = of(lines, "request", request_id="mine-7")
    stats = answer.finished.acceptance
    assert line["outcome"] == "max_tokens"
    assert line["prompt_tokens"] == len(SECRET)
    assert line["completion_tokens"] == 10
    assert line["accepted"] == stats.accepted_tokens
    assert (line["rounds"], line["drafted"]) == (stats.rounds, stats.drafted_tokens)
    assert line["mean_acceptance_length"] == pytest.approx(stats.mean_acceptance_length, abs=1e-3)
    assert line["peer"].startswith("ipv4:127.0.0.1:")
    assert 0 < line["first_token_ms"] <= 1e3 * line["seconds"]
    for timing in ("queued_ms", "prefill_ms", "decode_ms", "draft_wait_ms"):
        assert line[timing] >= 0
    (session,) = of(lines, "session", request_id="mine-7")
    assert (session["outcome"], session["verifier"]) == ("finished", "verifier")
    assert session["rounds"] <= session["proposals"]
    assert session["accepted"] <= session["drafted"]
    (refused,) = of(lines, "request", request_id="wrong-8")
    assert (refused["outcome"], refused["error"]) == ("refused", "INVALID_FIELD")
    assert SECRET not in json.dumps(lines), "a prompt was logged"
    assert answer.text not in json.dumps(lines)


def test_a_cancelled_request_leaves_its_line_too(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with metered_verifier(target, log_level="info") as (service, stub, _):
            request = verifier_pb2.GenerateRequest(text="a", request_id="gone")
            request.stop.max_tokens, request.stop.ignore_eos = 400, True
            call = stub.Generate(request)
            await call.read()
            await call.read()
            call.cancel()
            await service.servicer.wait_idle()

    with captured(monkeypatch) as lines:
        asyncio.run(main())
    (line,) = of(lines, "request", request_id="gone")
    assert line["outcome"] == "cancelled"
    assert line["completion_tokens"] >= 0


@pytest.mark.parametrize("form", ["text", "chat"])
def test_prompts_are_logged_only_if_that_was_asked_for(
    target: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    async def main() -> None:
        async with metered_verifier(target, log_level="info", log_prompts=True) as (_, stub, _):
            request = verifier_pb2.GenerateRequest(request_id="shown")
            request.stop.max_tokens = 2
            if form == "text":
                request.text = SECRET
            else:
                request.chat.messages.add(role="user", content=SECRET)
            async for _ in stub.Generate(request):
                pass

    with captured(monkeypatch) as lines:
        asyncio.run(main())
    (line,) = of(lines, "request", request_id="shown")
    assert line["prompt"] == (SECRET if form == "text" else f"user: {SECRET}")


@given(st.text(max_size=60))
def test_no_value_breaks_a_line_of_the_console(value: str) -> None:
    stream = io.StringIO()
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    try:
        logs.configure("console", "info", stream)
        logs.get_logger("test").info("request", request_id=value, other=[value], **{"k": value})
        logging.getLogger("library").warning("said %s", value)
    finally:
        root.handlers[:], root.level = before
    text = stream.getvalue()
    assert text.count("\n") == 2
    assert len(text.splitlines()) == 2
    assert all(character == "\n" or character.isprintable() for character in text)


def test_what_people_can_read_stays_as_it_is() -> None:
    assert logs.printable("größe 日本 🦆 a-b_c") == "größe 日本 🦆 a-b_c"
    assert logs.printable("a\x1b[2J\n\u202eb\x85") == "a\\x1b[2J\\n\\u202eb\\x85"


@given(st.text(max_size=60))
def test_a_line_of_json_stays_one_line_and_gives_the_value_back(value: str) -> None:
    stream = io.StringIO()
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    try:
        logs.configure("json", "info", stream)
        logs.get_logger("test").info("request", request_id=value)
    finally:
        root.handlers[:], root.level = before
    assert len(stream.getvalue().splitlines()) == 1
    assert json.loads(stream.getvalue())["request_id"] == value

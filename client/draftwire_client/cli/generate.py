"""`draftwire generate`: one prompt, one answer."""

from __future__ import annotations

from typing import Any

import click

from draftwire_client.cli import output
from draftwire_client.cli.failures import RequestFailed
from draftwire_client.cli.options import (
    connection_options,
    open_client,
    read_request_options,
    request_options,
)
from draftwire_client.cli.texts import read_prompt
from draftwire_client.enums import FinishReason
from draftwire_client.errors import DraftwireError, partial_of
from draftwire_client.stream import Stream
from draftwire_client.types import Result

_CUT_SHORT = {
    FinishReason.DEADLINE: "the deadline passed",
    FinishReason.SHUTDOWN: "the server is going away",
}


@click.command()
@click.argument("prompt", required=False)
@request_options
@click.option("--json", "as_json", is_flag=True, help="Print the whole result as one JSON object.")
@click.option(
    "--stream/--no-stream",
    default=None,
    help="Print text as it comes (default; with --json: one JSON object a chunk).",
)
@connection_options
def generate(prompt: str | None, as_json: bool, stream: bool | None, **options: Any) -> None:
    """Go on from PROMPT, or from the text on stdin (one line end at its end is left out).

    The text goes to stdout; tokens/s, acceptance and errors go to stderr.
    """
    text = read_prompt(prompt)
    with open_client(options) as client:
        timeout = options.pop("timeout")
        answer = client.stream(text, timeout=timeout, **read_request_options(options))
        show(answer, as_json=as_json, streamed=not as_json if stream is None else stream)


def show(answer: Stream, *, as_json: bool, streamed: bool) -> Result:
    """Print an answer and what it cost. Raises DraftwireError, and Failure if it was cut short."""
    try:
        with answer:
            if streamed:
                for chunk in answer:
                    if as_json:
                        output.say(output.chunk_line(chunk))
                    elif chunk.text:
                        output.say(chunk.text, end="")
            result = answer.result()
    except DraftwireError as error:
        _show_broken(error, as_json=as_json, streamed=streamed)
        raise
    if as_json:
        line = (
            output.result_line(result) if streamed else output.to_json(output.result_object(result))
        )
        output.say(line)
    else:
        output.say("" if streamed else result.text)
        if result.logprobs:
            output.note(output.logprob_lines(result))
        output.note(output.statistics(result))
    if result.finish_reason in _CUT_SHORT:
        reason = str(result.finish_reason).upper()
        why = _CUT_SHORT[result.finish_reason]
        raise RequestFailed(f"{reason}: the answer was cut short: {why}")
    return result


def _show_broken(error: DraftwireError, *, as_json: bool, streamed: bool) -> None:
    partial = partial_of(error)
    if as_json:
        event = {"event": "error"} if streamed else {}
        output.say(output.to_json({**event, **output.error_object(error)}))
    elif partial is not None and partial.token_ids:
        output.say("" if streamed else partial.text)
        output.note(output.partial_statistics(partial))

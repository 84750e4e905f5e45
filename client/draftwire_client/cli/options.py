"""Options that several subcommands share, and what they become.

Knows flags, environment variables and their types. Does not know limits of values: the server has
them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from draftwire_client.cli.failures import BadUsage
from draftwire_client.client import Client
from draftwire_client.config import DEFAULT_TIMEOUT_S, RetryConfig, TLSConfig
from draftwire_client.enums import AcceptanceRule, DraftPart, SpeculationMode
from draftwire_client.errors import DraftwireError, describe

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_TARGET = "127.0.0.1:7450"
_SCOPE = "DRAFTWIRE_CLIENT__"
# These mean the same to every command. The others are scoped: DRAFTWIRE_TLS_CERT, for instance, is
# the server's certificate in a server's environment.
_SHARED = frozenset({"TARGET", "TOKEN", "TLS_CA"})
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def _connection(name: str, **about: Any) -> Callable[[Command], Command]:
    variable = name.removeprefix("--").replace("-", "_").upper()
    _VARIABLES.add(f"{_SCOPE}{variable}")
    shared = [f"DRAFTWIRE_{variable}"] if variable in _SHARED else []
    return click.option(name, envvar=[f"{_SCOPE}{variable}", *shared], **about)


_VARIABLES: set[str] = set()
_CONNECTION = (
    _connection(
        "--target",
        default=DEFAULT_TARGET,
        show_default=True,
        help="Verifier: host:port, unix:PATH, dns:///name:port, or ip:port,ip:port.",
    ),
    _connection("--tls", is_flag=True, help="Use TLS, trusting the system's authorities."),
    _connection("--tls-ca", type=_FILE, help="PEM authorities to trust; turns TLS on."),
    _connection("--tls-cert", type=_FILE, help="PEM certificate of this client (mTLS)."),
    _connection("--tls-key", type=_FILE, help="PEM key of this client (mTLS)."),
    _connection("--tls-server-name", help="Name expected in the server's certificate."),
    _connection("--token", help="Bearer token; better in the environment or a file."),
    _connection("--token-file", type=_FILE, help="File whose first line is the bearer token."),
    _connection("--allow-insecure", is_flag=True, help="Allow other hosts without TLS."),
    _connection("--timeout", type=float, help="Deadline of the call, seconds."),
    _connection(
        "--retries",
        type=click.IntRange(min=0),
        default=3,
        show_default=True,
        help="Times to try again while the server is unavailable and has said nothing.",
    ),
)


def _some(*flags: str, **about: Any) -> Callable[[Command], Command]:
    return click.option(*flags, multiple=True, **about)


def _words(words: type[SpeculationMode | AcceptanceRule | DraftPart]) -> click.Choice[str]:
    return click.Choice([str(word) for word in words if word != "unspecified"])


# Every name is that of a RequestOptions key.
_REQUEST = (
    click.option("--temperature", type=float, help="Softmax temperature; 0 is greedy."),
    click.option("--top-p", type=float, help="Nucleus: smallest set with this probability."),
    click.option("--top-k", type=int, help="Only the k likeliest tokens; 0 is off."),
    click.option("--min-p", type=float, help="Least share of the likeliest token's probability."),
    click.option("--repetition-penalty", type=float, help="Above 1 avoids tokens already seen."),
    click.option("--presence-penalty", type=float, help="Subtracted for tokens of the output."),
    click.option("--frequency-penalty", type=float, help="Subtracted for each occurrence."),
    _some("--logit-bias", metavar="ID=BIAS", help="Bias of one token id; may be repeated."),
    click.option("--seed", type=int, help="Seed; the same seed makes the same tokens."),
    click.option("--max-tokens", type=int, help="Most tokens to make."),
    click.option("--min-tokens", type=int, help="Least tokens before an end is allowed."),
    click.option("--ignore-eos", is_flag=True, default=None, help="Go on past the model's end."),
    _some("--stop", help="Text that ends the answer; may be repeated."),
    _some("--stop-token-id", "stop_token_ids", type=int, help="Token id that ends it."),
    click.option("--speculation", type=_words(SpeculationMode), help="How blocks are sized."),
    click.option("--max-block-size", type=int, help="Largest block, anchor included."),
    click.option("--max-nodes", type=int, help="Most drafted tokens verified a round."),
    click.option("--rule", type=_words(AcceptanceRule), help="How proposals are accepted."),
    _some("--draft-part", "draft_parts", type=_words(DraftPart), help="Part to draft with."),
    click.option("--logprobs", is_flag=True, default=None, help="Log-probability of each token."),
    click.option("--top-logprobs", type=int, help="Also of the n likeliest tokens."),
    click.option(
        "--skip-special-tokens/--keep-special-tokens", default=None, help="Leave them out of text."
    ),
    click.option("--json-schema", help="JSON Schema that the text has to fit."),
    click.option("--regex", help="Regular expression that the text has to match."),
    click.option("--ebnf", help="EBNF grammar that the text has to follow."),
    _some("--choice", "choices", help="Text allowed; repeated, the answer is one of them."),
    click.option("--request-id", help="Id of the request in the server's logs."),
    click.option("--priority", type=int, help="Higher goes first when requests wait."),
)


def connection_options(command: Command) -> Command:
    """Add the options that `open_client` takes."""
    return _apply(_CONNECTION, command)


def request_options(command: Command) -> Command:
    """Add the options of a request, by the names of RequestOptions."""
    return _apply(_REQUEST, command)


def _apply(options: tuple[Callable[[Command], Command], ...], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


def check_environment() -> None:
    """Refuse a DRAFTWIRE_CLIENT__ variable that nothing reads: it is misspelt."""
    for name in sorted(os.environ):
        if name.startswith(_SCOPE) and name not in _VARIABLES:
            known = ", ".join(sorted(_VARIABLES))
            raise click.UsageError(f"unknown variable {name}; known are {known}")


def open_client(options: dict[str, Any]) -> Client:
    """The client that the connection options describe; takes them out of `options`."""
    timeout = options["timeout"]
    given = connect_arguments(options)
    options["timeout"] = timeout
    try:
        return Client.connect(**given)
    except DraftwireError as error:
        raise BadUsage(describe(error)) from error


def connect_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `connect` from the connection options, which are taken out of `options`."""
    given = {name: options.pop(name) for name in _connection_names()}
    timeout = given["timeout"]
    files = (given["tls_ca"], given["tls_cert"], given["tls_key"], given["tls_server_name"])
    try:
        tls = TLSConfig(ca=files[0], cert=files[1], key=files[2], server_name=files[3])
        return {
            "target": given["target"],
            "tls": tls if given["tls"] or any(files) else None,
            "token": _token(given["token"], given["token_file"]),
            "retry": RetryConfig(max_attempts=given["retries"] + 1),
            "timeout": timeout if timeout is not None else DEFAULT_TIMEOUT_S,
            "allow_insecure": given["allow_insecure"],
        }
    except DraftwireError as error:
        raise BadUsage(describe(error)) from error


def read_request_options(options: dict[str, Any]) -> dict[str, Any]:
    """Flags as RequestOptions: what was not given is left out."""
    request = {name: value for name, value in options.items() if value not in (None, ())}
    if "logit_bias" in request:
        request["logit_bias"] = dict(_bias(item) for item in request["logit_bias"])
    return request


def _connection_names() -> list[str]:
    return [name.removeprefix(_SCOPE).lower() for name in sorted(_VARIABLES)]


def _bias(item: str) -> tuple[int, float]:
    token_id, _, bias = item.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise click.BadParameter(
            f"{item!r} is not ID=BIAS, for instance 42=-1.5", param_hint="--logit-bias"
        ) from None


def _token(token: str | None, file: Path | None) -> str | None:
    if token is not None or file is None:
        return token
    try:
        lines = [line.strip() for line in file.read_text(encoding="ascii").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{file}: {error}", param_hint="--token-file") from error
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise click.BadParameter(f"{file} holds no token", param_hint="--token-file")
    return found[0]

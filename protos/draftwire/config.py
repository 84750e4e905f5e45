"""One loader for every command's configuration, and what both services have in common.

Knows flags, DRAFTWIRE_* variables, a TOML file and defaults, in that order, and fails on whatever
it does not understand. Does not know what the settings of a service mean.

A variable may be scoped to one command: DRAFTWIRE_VERIFIER__MODEL beats DRAFTWIRE_MODEL there and
is passed over by the others, so that one environment can serve a whole fleet.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from draftwire.addresses import is_local, split_host_port, unix_path
from draftwire.errors import InvalidArgument
from draftwire.settings import (
    PREFIX,
    ConfigError,
    Option,
    check_bounds,
    options_of,
    parse,
    setting,
    shown,
    wanted,
)

__all__ = ["ConfigError", "WireConfig", "effective", "load", "setting", "usage", "validate"]

T = TypeVar("T")
SCOPES = ("VERIFIER", "DRAFTER", "TRAIN", "CLIENT", "TEST")
MIN_KEEPALIVE_S = 10.0  # servers allow pings at half this distance
MIB = 1024 * 1024


@dataclass(frozen=True)
class WireConfig:
    """Settings that both services share: address, security, limits, logs."""

    listen: str = setting("127.0.0.1:0", help="host:port or unix:PATH; port 0 picks a free one")
    tls_cert: Path | None = setting(None, help="PEM certificate chain of the server; turns TLS on")
    tls_key: Path | None = setting(None, help="PEM private key of the server")
    tls_client_ca: Path | None = setting(
        None, help="PEM authorities of clients; a client certificate is then required (mTLS)"
    )
    token_file: Path | None = setting(
        None, help="file of bearer tokens, one a line; every call but health must bear one"
    )
    allow_insecure: bool = setting(
        False, help="serve without TLS on addresses other than loopback and unix sockets"
    )
    max_message_bytes: int = setting(
        64 * MIB, help="largest message either way, bytes", minimum=64 * 1024, maximum=1024 * MIB
    )
    keepalive_s: float = setting(
        60.0, help="seconds of silence before a ping", minimum=MIN_KEEPALIVE_S, maximum=7200.0
    )
    drain_grace_s: float = setting(
        30.0, help="seconds that admitted work may take after SIGTERM", minimum=0.0, maximum=86400.0
    )
    metrics_listen: str | None = setting(
        None, help="host:port of Prometheus metrics over HTTP, without TLS or token; none: off"
    )
    log_format: Literal["auto", "json", "console"] = setting(
        "auto", help="auto is console on a terminal and json elsewhere"
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", help="least severe level that is logged"
    )
    check_config: bool = setting(False, help="check the configuration and leave")

    def check(self) -> None:
        """What no single setting shows. Raises ConfigError."""
        try:
            if not unix_path(self.listen):
                split_host_port(self.listen)
        except InvalidArgument as error:
            raise ConfigError("--listen", self.listen, "host:port or unix:PATH") from error
        try:
            if self.metrics_listen is not None:
                split_host_port(self.metrics_listen)
        except InvalidArgument as error:
            raise ConfigError("--metrics-listen", self.metrics_listen, "host:port") from error
        local = is_local(self.listen)
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("--tls-key", self.tls_key or "", "given together with --tls-cert")
        if self.tls_client_ca and not self.tls_cert:
            raise ConfigError("--tls-client-ca", self.tls_client_ca, "used with --tls-cert")
        if self.tls_cert and unix_path(self.listen) is not None:
            raise ConfigError("--tls-cert", self.tls_cert, "left out on a unix socket")
        if not local and not self.tls_cert and not self.allow_insecure:
            raise ConfigError(
                "--listen",
                self.listen,
                "loopback or a unix socket without TLS (--allow-insecure lifts this)",
            )
        if not local and not self.tls_cert and self.token_file:
            raise ConfigError(
                "--token-file", self.token_file, "used with TLS, or on loopback or a unix socket"
            )


def load(cls: type[T], argv: Sequence[str], env: Mapping[str, str], prog: str) -> T:
    """An instance of the dataclass `cls`: flag beats variable beats file beats default.

    --help prints and exits 0. Raises ConfigError for an unknown flag, variable or key of the file,
    a bad value, or a failed cross-field check.
    """
    options = options_of(cls)
    if "--help" in argv or "-h" in argv:
        sys.stdout.write(usage(cls, prog))
        raise SystemExit(0)
    flags, from_flag = _read_flags(options, argv)
    variables, from_variable = _read_variables(options, env, prog)
    path = from_flag or from_variable
    values = (_read_file(options, Path(path)) if path else {}) | variables | flags
    for option in options.values():
        if option.required and option.name not in values:
            raise ConfigError(option.flag, "", f"given (or {option.variable} set)")
    config = cls(**values)
    validate(config)
    return config


def validate(config: object) -> None:
    """Checks every bound, then each class's own `check`. Raises ConfigError."""
    for option in options_of(type(config)).values():
        check_bounds(option, option.flag, getattr(config, option.name))
    for cls in reversed(type(config).__mro__):
        if (check := vars(cls).get("check")) is not None:
            check(config)


def effective(config: object) -> dict[str, str]:
    """Every setting by flag name, as text, for logs and GetInfo; secrets are hidden."""
    return {
        option.flag[2:]: shown(option, getattr(config, option.name))
        for option in options_of(type(config)).values()
    }


def _read_flags(
    options: Mapping[str, Option], argv: Sequence[str]
) -> tuple[dict[str, Any], str | None]:
    values: dict[str, Any] = {}
    file: str | None = None
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise ConfigError("argument", word, "a flag (--help lists them)")
        flag, equals, inline = word.partition("=")
        name = flag[2:].replace("-", "_")
        option = options.get(name)
        negated = options.get(name[3:]) if option is None and name.startswith("no_") else None
        if negated is not None and negated.kind is bool and not equals:
            _once(values, negated.name, flag, "false")
            values[negated.name] = False
            continue
        if option is None and name != "config":
            raise ConfigError("flag", flag, "a known flag (--help lists them)")
        if option is not None and option.kind is bool and not equals:
            _once(values, name, flag, "true")
            values[name] = True
            continue
        if not equals and (not words or words[0].startswith("--")):
            raise ConfigError(flag, "", "followed by a value")
        text = inline if equals else words.pop(0)
        if option is None:
            if file is not None:
                raise ConfigError(flag, text, "given once")
            file = text
        elif option.kind is tuple:
            values[name] = (*values.get(name, ()), *parse(option, flag, text))
        else:
            _once(values, name, flag, text)
            values[name] = parse(option, flag, text)
    return values, file


def _once(values: Mapping[str, Any], name: str, where: str, text: object) -> None:
    """Of two values one would be passed over without a word."""
    if name in values:
        raise ConfigError(where, text, "given once")


def _read_variables(
    options: Mapping[str, Option], env: Mapping[str, str], prog: str
) -> tuple[dict[str, Any], str | None]:
    command = prog.split()[0]
    own = command.rpartition("-")[2].upper() if "-" in command else "CLIENT"
    plain: dict[str, Any] = {}
    scoped: dict[str, Any] = {}
    file: str | None = None
    for variable, text in sorted(env.items()):
        if not variable.startswith(PREFIX):
            continue
        scope, separator, name = variable[len(PREFIX) :].partition("__")
        if not separator:
            scope, name = "", scope
        elif scope not in SCOPES:
            raise ConfigError("variable", variable, f"scoped to one of {', '.join(SCOPES)}")
        elif scope != own:
            continue
        if name == "CONFIG":
            file = text
        elif name.lower() in options and name == name.upper():
            option = options[name.lower()]
            (scoped if scope else plain)[option.name] = parse(option, variable, text)
        else:
            raise ConfigError(
                "variable",
                variable,
                f"a setting of {prog} (those of others are scoped: {PREFIX}VERIFIER__{name})",
            )
    return plain | scoped, file


def _read_file(options: Mapping[str, Option], path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # tomllib lets int's own errors out
        raise ConfigError("--config", path, f"a readable TOML file ({error})") from error
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        where = f"{path.name}: {key}"
        option = options.get(name)
        if option is None:
            raise ConfigError(where, value, "a known setting")
        _once(values, name, where, value)  # max-nodes and max_nodes are one
        if isinstance(value, list) and option.kind is tuple:
            if not all(isinstance(item, str) for item in value):
                raise ConfigError(where, value, "a list of strings")
            values[name] = tuple(value)
        elif isinstance(value, bool) != (option.kind is bool) or isinstance(value, list | dict):
            raise ConfigError(where, value, wanted(option))
        else:
            values[name] = parse(
                option, where, str(value).lower() if value in (True, False) else str(value)
            )
    return values


def usage(cls: type, prog: str) -> str:
    """Text of --help: every setting with its help, bounds, default and variable."""
    lines = [f"usage: {prog} [--FLAG VALUE | --FLAG=VALUE] ...", ""]
    if cls.__doc__:
        lines += [cls.__doc__.strip().splitlines()[0], ""]
    for option in options_of(cls).values():
        default = shown(option, option.default) if not option.required else ""
        note = "required" if option.required else f"default: {default or 'none'}"
        bounds = [f"one of {', '.join(option.choices)}"] if option.choices else []
        bounds += [
            f"{word} {option.about(key)}"
            for key, word in (("minimum", "at least"), ("maximum", "at most"))
            if option.about(key) is not None
        ]
        flag = f"{option.flag}, --no-{option.flag[2:]}" if option.kind is bool else option.flag
        lines += [f"  {flag}", f"      {option.about('help') or ''} ({'; '.join([*bounds, note])})"]
    lines += [
        "  --config FILE",
        "      TOML file of settings; flags and variables beat it.",
        "",
        f"Each setting can also come from {PREFIX}NAME or, for one command, {PREFIX}COMMAND__NAME.",
        "",
    ]
    return "\n".join(lines)

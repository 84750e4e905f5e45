"""Who may call: bearer tokens, and the credentials of a listening port.

Knows token files, TLS files and local sockets. Does not know what is served.
"""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Iterable
from pathlib import Path

import grpc

from draftwire.addresses import is_local, unix_path
from draftwire.config import ConfigError, WireConfig

MIN_TOKEN_LENGTH = 16
_SCHEME = "bearer "


class TokenCheck:
    """Compares bearer tokens in constant time. Several may be valid: rotation."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = tuple(token.encode("ascii") for token in tokens)
        if not self._tokens:
            raise ValueError("no token")

    def allows(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Whether the call's metadata bear a valid token in `authorization`."""
        for key, value in metadata:
            if key != "authorization" or not isinstance(value, str):
                continue
            if value[: len(_SCHEME)].lower() != _SCHEME:
                continue
            given = value[len(_SCHEME) :].strip().encode("utf-8", "replace")
            # Every token is compared, so that the time does not tell which one was near.
            if sum(hmac.compare_digest(given, token) for token in self._tokens):
                return True
        return False


def read_tokens(path: Path) -> TokenCheck:
    """The tokens of a file, one a line, # for comments. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--token-file", path, "a readable ASCII file") from error
    tokens = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not tokens:
        raise ConfigError("--token-file", path, "a file with at least one token")
    for number, token in enumerate(tokens, 1):
        if len(token) < MIN_TOKEN_LENGTH or not token.isprintable() or " " in token:
            raise ConfigError(
                "--token-file",
                f"{path}, token {number}",
                f"{MIN_TOKEN_LENGTH} or more printable characters without blanks",
            )
    return TokenCheck(tokens)


def server_credentials(wire: WireConfig) -> grpc.ServerCredentials | None:
    """Credentials of the listening port; None serves plain TCP, which WireConfig.check has allowed.

    TLS files are read again at each handshake: a renewed certificate needs no restart.
    """
    if wire.tls_cert is None or wire.tls_key is None:
        if unix_path(wire.listen) is not None:
            return grpc.local_server_credentials(grpc.LocalConnectionType.UDS)
        if is_local(wire.listen):
            return grpc.local_server_credentials(grpc.LocalConnectionType.LOCAL_TCP)
        return None
    try:
        last = _read_certificates(wire)
    except OSError as error:
        raise ConfigError("--tls-cert", error.filename, "a readable file") from error

    def fetch() -> grpc.ServerCertificateConfiguration:
        nonlocal last
        # In the middle of a renewal the certificates in force stay.
        with contextlib.suppress(OSError):
            last = _read_certificates(wire)
        return last

    return grpc.dynamic_ssl_server_credentials(
        last, fetch, require_client_authentication=wire.tls_client_ca is not None
    )


def _read_certificates(wire: WireConfig) -> grpc.ServerCertificateConfiguration:
    assert wire.tls_cert is not None
    assert wire.tls_key is not None
    roots = wire.tls_client_ca.read_bytes() if wire.tls_client_ca else None
    pair = (wire.tls_key.read_bytes(), wire.tls_cert.read_bytes())
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)

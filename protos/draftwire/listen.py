"""The listening port of a server: TCP or a unix socket.

Knows how an address is taken and given back without sharing it. Does not know what is served on it.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import grpc.aio

from draftwire import auth
from draftwire.addresses import unix_path
from draftwire.config import ConfigError, WireConfig

_MAX_UNIX_PATH = 100  # sockaddr_un takes 107 bytes


def bind(server: grpc.aio.Server, wire: WireConfig) -> str:
    """Binds the port; returns the address with its real port. Raises ConfigError."""
    path = unix_path(wire.listen)
    if path is not None:
        _prepare_socket(Path(path))
    credentials = auth.server_credentials(wire)
    # For the moment of the bind: nobody else may reach the socket before its mode could be set.
    before = os.umask(0o077) if path is not None else None
    try:
        if credentials is None:
            number = server.add_insecure_port(wire.listen)
        else:
            number = server.add_secure_port(wire.listen, credentials)
    except RuntimeError as error:
        raise ConfigError(
            "--listen", wire.listen, "an address of this host that is not in use"
        ) from error
    finally:
        if before is not None:
            os.umask(before)
    if path is not None:
        return wire.listen
    return f"{wire.listen.rpartition(':')[0]}:{number}"


def release(address: str) -> None:
    """Removes the socket file of a unix address; nothing for others."""
    if (path := unix_path(address)) is not None:
        Path(path).unlink(missing_ok=True)


def _prepare_socket(path: Path) -> None:
    """Makes the folder (0700) and clears a socket that nobody listens on. Raises ConfigError."""
    if len(os.fsencode(path)) > _MAX_UNIX_PATH:
        raise ConfigError("--listen", f"unix:{path}", f"a path of at most {_MAX_UNIX_PATH} bytes")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError("--listen", f"unix:{path}", f"usable ({error.strerror})") from error
    if not stat.S_ISSOCK(mode):
        raise ConfigError("--listen", f"unix:{path}", "a socket or free; a file is there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise ConfigError("--listen", f"unix:{path}", f"usable ({error.strerror})") from error
    raise ConfigError("--listen", f"unix:{path}", "an address that is not in use")

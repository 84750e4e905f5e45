"""What addresses mean: host:port, lists of them, unix sockets, gRPC target names.

Knows names only; opens nothing and resolves nothing.
"""

from __future__ import annotations

import ipaddress
import re

from draftwire.errors import InvalidArgument

_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:")
_PORT = re.compile(r"[0-9]{1,5}")
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
_ALLOWED = "host:port, a list of ip:port, dns:///host:port, or unix:PATH"


def split_host_port(address: str, field: str = "target") -> tuple[str, int]:
    """("::1", 80) of "[::1]:80". Raises InvalidArgument naming `field`."""
    host, colon, port = address.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    number = int(port) if _PORT.fullmatch(port) else 65536
    valid = bracketed == (":" in host) and (bracketed or _HOST.fullmatch(host))
    if not colon or not valid or number > 65535 or (bracketed and not _is_ip(host)):
        raise InvalidArgument(field, address, _ALLOWED)
    return host, number


def unix_path(address: str) -> str | None:
    """Path of a unix socket address, else None."""
    if not address.startswith("unix:"):
        return None
    path = address.removeprefix("unix:")
    return path.removeprefix("//") if path.startswith("///") else path


def normalise_target(target: str) -> str:
    """A gRPC target name for what users write. Raises InvalidArgument naming `target`.

    "a:1" becomes dns:///a:1 or ipv4:…, "10.0.0.1:1,10.0.0.2:1" a static list; a name with a scheme
    stays as it is.
    """
    target = target.strip()
    if not target or "\0" in target:
        raise InvalidArgument("target", target, _ALLOWED)
    if target.startswith("/"):
        return f"unix:{target}"
    if target.startswith(_SCHEMES):
        if not target.partition(":")[2].strip("/"):
            raise InvalidArgument("target", target, _ALLOWED)
        return target
    parts = [split_host_port(part) for part in target.split(",")]
    if len(parts) > 1:
        # gRPC has no name for a list of names; the loopback is the one name that needs no resolver.
        parts = [("127.0.0.1" if host == "localhost" else host, port) for host, port in parts]
    families = {_family(host) for host, _ in parts}
    if len(families) > 1 or ("dns" in families and len(parts) > 1):
        raise InvalidArgument(
            "target", target, "a list of addresses of one IP family, or one name (dns:///) for all"
        )
    family = families.pop()
    names = ",".join(
        f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in parts
    )
    return f"dns:///{names}" if family == "dns" else f"{family}:{names}"


def is_local(target: str) -> bool:
    """Whether every address of a target or listener is a unix socket or on the loopback."""
    scheme, colon, rest = normalise_target(target).partition(":")
    if scheme.startswith("unix"):
        return bool(colon)
    rest = rest.rpartition("/")[2]  # dns:[//authority/]host[:port]
    hosts = []
    for part in rest.split(","):
        try:
            hosts.append(split_host_port(part)[0])
        except InvalidArgument:
            return part == "localhost"  # a name without a port
    return all(
        host.lower() == "localhost" or (_is_ip(host) and ipaddress.ip_address(host).is_loopback)
        for host in hosts
    )


def is_many(target: str) -> bool:
    """Whether a normalised target may stand for several servers: a list or a DNS name."""
    return target.startswith("dns:") or "," in target


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _family(host: str) -> str:
    if not _is_ip(host):
        return "dns"
    return f"ipv{ipaddress.ip_address(host).version}"

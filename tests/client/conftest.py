"""What the client's tests share: both clients behind one face, the command, and certificates.

`either` runs a test once with Client and once with AsyncClient; tests of what only one of them can
do use that one directly.
"""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from click.testing import Result as Ran
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from draftwire_client import AsyncClient, Chunk, Client, Result
from draftwire_client.cli import app
from draftwire_client.testing import Reply, ScriptedVerifier


class Threads:
    """Client, one call a connection."""

    def call(
        self, target: str, method: str, *args: Any, connect: Any = None, **options: Any
    ) -> Any:
        with Client.connect(target, **(connect or {})) as client:
            return getattr(client, method)(*args, **options)

    def stream(
        self, target: str, prompt: Any, *, connect: Any = None, **options: Any
    ) -> tuple[list[Chunk], Result]:
        with Client.connect(target, **(connect or {})) as client:
            stream = client.stream(prompt, **options)
            return list(stream), stream.result()


class Loop:
    """AsyncClient, one event loop a call."""

    def call(
        self, target: str, method: str, *args: Any, connect: Any = None, **options: Any
    ) -> Any:
        async def main() -> Any:
            async with AsyncClient.connect(target, **(connect or {})) as client:
                return await getattr(client, method)(*args, **options)

        return asyncio.run(main())

    def stream(
        self, target: str, prompt: Any, *, connect: Any = None, **options: Any
    ) -> tuple[list[Chunk], Result]:
        async def main() -> tuple[list[Chunk], Result]:
            async with AsyncClient.connect(target, **(connect or {})) as client:
                stream = client.stream(prompt, **options)
                return [chunk async for chunk in stream], await stream.result()

        return asyncio.run(main())


Either = Threads | Loop


@pytest.fixture(params=[Threads, Loop], ids=["sync", "async"])
def either(request: pytest.FixtureRequest) -> Either:
    """One of the clients."""
    made: Either = request.param()
    return made


@pytest.fixture
def serve() -> Iterator[Callable[..., ScriptedVerifier]]:
    """Starts scripted verifiers and stops them after the test."""
    running: list[ScriptedVerifier] = []

    def start(*replies: Any, **options: Any) -> ScriptedVerifier:
        server = ScriptedVerifier(*(replies or (Reply.of("Hello, wörld."),)), **options)
        running.append(server)
        return server

    yield start
    for server in running:
        server.close()


@dataclass(frozen=True)
class Authority:
    """A certificate authority in a folder: ca.pem, and pairs made on demand."""

    folder: Path
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def pair(self, name: str) -> tuple[Path, Path]:
        """(certificate, key) for 127.0.0.1 and `name`."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName(name)]
        signed = _sign(name, key, self.key, self.certificate.subject, names)
        cert_path, key_path = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        cert_path.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return cert_path, key_path


def make_authority(folder: Path) -> Authority:
    """A new authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _sign("test authority", key, key, None, None)
    folder.mkdir(exist_ok=True)
    (folder / "ca.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return Authority(folder, key, certificate)


def _sign(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer_key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name | None,
    names: list[x509.GeneralName] | None,
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    if names is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """An authority of this test."""
    return make_authority(tmp_path / "tls")


def run(*arguments: str, stdin: str | bytes | None = None, **env: str) -> Ran:
    """The command `draftwire` in this process."""
    return CliRunner().invoke(app, list(arguments), input=stdin, env=env)


def at(server: ScriptedVerifier, *arguments: str, **options: Any) -> Ran:
    """The command with that server as its target."""
    command, *rest = arguments
    return run(command, "--target", server.target, *rest, **options)


async def eventually(check: Callable[[], bool]) -> None:
    """Return when `check` says yes: for states that others settle. The test's time limit ends it
    otherwise."""
    while True:
        if check():
            return
        await asyncio.sleep(0.01)

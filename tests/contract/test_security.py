"""Who may call: tokens, TLS and mTLS, with certificates made here."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from draftwire import channel, errors
from draftwire.auth import TokenCheck, read_tokens
from draftwire.channel import ChannelConfig
from draftwire.config import ConfigError, WireConfig
from draftwire.v1 import verifier_pb2, verifier_pb2_grpc

TOKEN = "correct-horse-battery-staple"


@dataclass
class Authority:
    """A certificate authority in a folder."""

    folder: Path
    name: str

    def __post_init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = self._sign(self.name, self.key, self.key, self.name, ca=True)
        self.path = self._write(f"{self.name}.pem", self.certificate)

    def issue(self, name: str) -> tuple[Path, Path]:
        """Certificate and key files for `name` and the loopback."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(name, key, self.key, self.name, ca=False)
        key_path = self.folder / f"{name}.key"
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return self._write(f"{name}.crt", certificate), key_path

    def _write(self, name: str, certificate: x509.Certificate) -> Path:
        path = self.folder / name
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return path

    def _sign(self, name, key, signing_key, issuer, *, ca):
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName(
                    [x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
                ),
                critical=False,
            )
            .sign(signing_key, hashes.SHA256())
        )


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path, "authority")


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"# rotated on Monday\nold-token-still-valid-today\n\n{TOKEN}\n")
    return path


async def ask(address: str, config: ChannelConfig) -> str | errors.DraftwireError:
    async with channel.open_channel(address, config) as connection:
        stub = verifier_pb2_grpc.VerifierStub(connection)
        try:
            request = verifier_pb2.GenerateRequest(text="hello")
            return (await stub.Generate(request, timeout=30).read()).delta.text
        except grpc.RpcError as error:
            return errors.from_rpc_error(error)


def answers(serving, service, wire: WireConfig, *configs: ChannelConfig):
    async def main():
        async with serving(service, wire) as running:
            return [await ask(running.address, config) for config in configs]

    return asyncio.run(main())


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "unix:{}/d.sock"])
def test_only_a_valid_token_may_call(serving, script, token_file, tmp_path, listen):
    wire = WireConfig(listen=listen.format(tmp_path), token_file=token_file)
    right, old, none, wrong, prefix, longer = answers(
        serving,
        script(),
        wire,
        ChannelConfig(token=TOKEN),
        ChannelConfig(token="old-token-still-valid-today"),
        ChannelConfig(),
        ChannelConfig(token="wrong-horse-battery-staple!!"),
        ChannelConfig(token=TOKEN[:-1]),
        ChannelConfig(token=TOKEN + "s"),
    )
    assert (right, old) == ("hello", "hello")
    for refused in (none, wrong, prefix, longer):
        assert isinstance(refused, errors.Unauthenticated)
        assert refused.reason == "TOKEN_REFUSED"
        assert TOKEN not in str(refused)


def test_health_needs_no_token_and_everything_else_does(serving, script, token_file):
    async def main():
        wire = WireConfig(token_file=token_file)
        async with (
            serving(script(), wire) as running,
            channel.open_channel(running.address) as connection,
        ):
            health = health_pb2_grpc.HealthStub(connection)
            await health.Check(health_pb2.HealthCheckRequest())
            await health.Watch(health_pb2.HealthCheckRequest()).read()
            info = verifier_pb2_grpc.VerifierStub(connection).GetInfo(
                verifier_pb2.VerifierGetInfoRequest()
            )
            listing = reflection_pb2_grpc.ServerReflectionStub(connection).ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            )
            for call in (info, listing.read()):
                with pytest.raises(grpc.RpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED

    asyncio.run(main())


def test_tls_is_spoken_and_a_stranger_is_not_trusted(serving, script, authority, token_file):
    certificate, key = authority.issue("verifier")
    stranger = Authority(authority.folder, "stranger")
    wire = WireConfig(tls_cert=certificate, tls_key=key, token_file=token_file)
    trusted, unknown, plain, named = answers(
        serving,
        script(),
        wire,
        ChannelConfig(tls_ca=authority.path, token=TOKEN),
        ChannelConfig(tls_ca=stranger.path, token=TOKEN),
        ChannelConfig(),
        ChannelConfig(tls_ca=authority.path, token=TOKEN, server_name_override="someone-else"),
    )
    assert trusted == "hello"
    for refused in (unknown, plain, named):
        assert isinstance(refused, errors.Unavailable)


def test_mtls_asks_for_a_certificate_of_the_right_authority(serving, script, authority):
    certificate, key = authority.issue("verifier")
    client = authority.issue("client")
    stranger = Authority(authority.folder, "stranger").issue("impostor")
    wire = WireConfig(tls_cert=certificate, tls_key=key, tls_client_ca=authority.path)
    known, bare, impostor = answers(
        serving,
        script(),
        wire,
        ChannelConfig(tls_ca=authority.path, tls_cert=client[0], tls_key=client[1]),
        ChannelConfig(tls_ca=authority.path),
        ChannelConfig(tls_ca=authority.path, tls_cert=stranger[0], tls_key=stranger[1]),
    )
    assert known == "hello"
    for refused in (bare, impostor):
        assert isinstance(refused, errors.Unavailable)


def test_a_renewed_certificate_is_used_without_a_restart(serving, script, authority):
    certificate, key = authority.issue("verifier")
    renewed = Authority(authority.folder, "renewed")

    async def main():
        wire = WireConfig(tls_cert=certificate, tls_key=key)
        async with serving(script(), wire) as running:
            before = await ask(running.address, ChannelConfig(tls_ca=authority.path))
            renewed.issue("verifier")  # the same files
            after = await ask(running.address, ChannelConfig(tls_ca=renewed.path))
            key.unlink()
            torn = await ask(running.address, ChannelConfig(tls_ca=renewed.path))
            return before, after, torn

    assert asyncio.run(main()) == ("hello", "hello", "hello")


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("", "at least one"),
        ("# nothing\n\n", "at least one"),
        ("short", "16 or more"),
        ("a token with blanks in it", "without blanks"),
        ("tökentökentökentöken", "ASCII"),
    ],
)
def test_a_token_file_is_checked_when_it_is_read(tmp_path, text, limit):
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_tokens(path)
    assert caught.value.field == "--token-file"
    assert limit in caught.value.limit
    assert text.strip() not in str(caught.value) or not text.strip()


def test_a_file_that_cannot_be_read_is_named(serving, script, authority, tmp_path):
    certificate, _ = authority.issue("verifier")
    wire = WireConfig(tls_cert=certificate, tls_key=tmp_path / "missing.key")
    with pytest.raises(ConfigError, match=r"missing\.key"):
        answers(serving, script(), wire)
    with pytest.raises(errors.InvalidArgument, match="tls_ca"):
        channel.open_sync_channel("127.0.0.1:1", ChannelConfig(tls_ca=tmp_path / "missing.pem"))


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        (f"Bearer {TOKEN}", True),
        (f"bearer {TOKEN}", True),
        (TOKEN, False),
        (f"Basic {TOKEN}", False),
        ("Bearer ", False),
        ("", False),
        (b"Bearer " + TOKEN.encode(), False),
    ],
)
def test_the_header_is_a_bearer_token(header, allowed):
    assert TokenCheck([TOKEN]).allows([("x", "y"), ("authorization", header)]) is allowed
    assert not TokenCheck([TOKEN]).allows([("x-authorization", f"Bearer {TOKEN}")])

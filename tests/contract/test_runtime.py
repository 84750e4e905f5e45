"""A server's life: bound, warm, serving, stuck, draining, gone."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftwire import channel, errors, runtime
from draftwire.channel import ChannelConfig
from draftwire.config import ConfigError, WireConfig
from draftwire.v1 import verifier_pb2, verifier_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
NAMES = ("", "draftwire.v1.Verifier")


def generate(connection, text: str):
    request = verifier_pb2.GenerateRequest(text=text)
    return verifier_pb2_grpc.VerifierStub(connection).Generate(request)


async def check(connection, name: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(connection)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status


async def fails(call) -> errors.DraftwireError:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return errors.from_rpc_error(caught.value)


def test_health_follows_the_service_from_cold_to_gone(serving, script):
    async def main():
        service = script(warm=asyncio.Event())
        async with (
            serving(service, wait=False) as running,
            channel.open_channel(running.address) as connection,
        ):
            watch = health_pb2_grpc.HealthStub(connection).Watch(health_pb2.HealthCheckRequest())
            assert [await check(connection, name) for name in NAMES] == [NOT_SERVING] * 2
            assert (await watch.read()).status == NOT_SERVING
            early = await fails(generate(connection, "hello").read())
            assert (type(early), early.reason) == (errors.Unavailable, "STARTING")

            service.warm.set()
            await running.ready.wait()
            assert service.started
            assert (await watch.read()).status == SERVING
            assert [await check(connection, name) for name in NAMES] == [SERVING] * 2
            assert (await generate(connection, "hello").read()).delta.text == "hello"

            running.stop.set()
            assert (await watch.read()).status == NOT_SERVING
            assert (await fails(watch.read())).reason == "DRAINING"
            await running.task
            assert service.freed == 1

    asyncio.run(main())


def test_health_of_a_name_that_is_not_served_is_not_found(serving, script):
    async def main():
        async with (
            serving(script()) as running,
            channel.open_channel(running.address) as connection,
        ):
            error = await fails(check(connection, "other.Service"))
            assert isinstance(error, errors.NotFound)
            request = health_pb2.HealthCheckRequest(service="other.Service")
            watch = health_pb2_grpc.HealthStub(connection).Watch(request)
            first = await watch.read()
            assert first.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

    asyncio.run(main())


def test_health_follows_progress(serving, script):
    async def main():
        service = script()
        async with serving(service) as running, channel.open_channel(running.address) as connection:
            watch = health_pb2_grpc.HealthStub(connection).Watch(health_pb2.HealthCheckRequest())
            seen = [(await watch.read()).status]
            service.moving = False
            seen.append((await watch.read()).status)
            service.progress = None  # the check itself fails: not a sign of life either
            service.moving = True
            assert await check(connection) == NOT_SERVING
            del service.progress
            seen.append((await watch.read()).status)
            assert seen == [SERVING, NOT_SERVING, SERVING]

    asyncio.run(main())


def test_a_drain_lets_open_streams_end_and_takes_no_new_ones(serving, script):
    async def main():
        service = script(drain_waits=asyncio.Event())
        async with serving(service) as running, channel.open_channel(running.address) as connection:
            call = generate(connection, "until drain")
            assert (await call.read()).delta.text == "until drain"
            running.stop.set()
            await service.draining.wait()
            late = await fails(generate(connection, "hello").read())
            assert (type(late), late.reason) == (errors.Unavailable, "DRAINING")
            info = await verifier_pb2_grpc.VerifierStub(connection).GetInfo(
                verifier_pb2.VerifierGetInfoRequest()
            )
            assert info.draining
            assert (await call.read()).delta.text == "last words"
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK
            service.drain_waits.set()
            await running.task
            assert service.closed == ["until drain"]

    asyncio.run(main())


def test_work_that_outlasts_the_grace_is_cut_off(serving, script):
    async def main():
        service = script()
        wire = WireConfig(drain_grace_s=0.2)
        async with (
            serving(service, wire) as running,
            channel.open_channel(running.address) as connection,
        ):
            call = generate(connection, "forever")
            await call.read()
            running.stop.set()
            error = await fails(call.read())
            assert isinstance(error, errors.Unavailable)
            await running.task
            assert service.closed == ["forever"]
            assert service.freed == 1

    asyncio.run(main())


def test_a_watcher_does_not_hold_a_drain_up(serving, script):
    async def main():
        wire = WireConfig(drain_grace_s=3600.0)
        async with (
            serving(script(), wire) as running,
            channel.open_channel(running.address) as connection,
        ):
            watch = health_pb2_grpc.HealthStub(connection).Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            running.stop.set()
            await asyncio.wait_for(running.task, 30)

    asyncio.run(main())


@pytest.mark.parametrize("text", ["forever", "flood"])
def test_a_cancelled_call_is_cleaned_up_at_once(serving, script, text):
    async def main():
        service = script()
        async with serving(service) as running, channel.open_channel(running.address) as connection:
            call = generate(connection, text)
            await call.read()
            call.cancel()
            while not service.closed:
                # Another call is a round trip; the cancel is ahead of it on the same connection.
                await check(connection)
            assert service.closed == [text]

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_storm_of_cancels_leaves_no_call_behind(serving, script):
    async def main():
        service = script()
        async with serving(service) as running, channel.open_channel(running.address) as connection:
            await check(connection)
            before = len(asyncio.all_tasks())
            calls = [generate(connection, "forever") for _ in range(300)]
            await asyncio.gather(*(call.read() for call in calls))
            for call in calls:
                call.cancel()
            while len(service.closed) < 300:
                await check(connection)
            assert (await generate(connection, "hello").read()).delta.text == "hello"
            while len(asyncio.all_tasks()) > before:
                await check(connection)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_start_that_fails_ends_the_server_and_frees_the_service(serving, script):
    async def main():
        service = script(start_error=errors.FailedPrecondition("NO_MODEL", "no model there"))
        with pytest.raises(errors.FailedPrecondition, match="no model"):
            async with serving(service):
                pass
        assert service.freed == 1

    asyncio.run(main())


def test_a_stop_during_start_cancels_the_start(serving, script):
    async def main():
        service = script(warm=asyncio.Event())
        async with serving(service, wait=False) as running:
            running.stop.set()
            await running.task
        assert not service.started
        assert not running.ready.is_set()
        assert service.freed == 1

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_message_over_the_limit_names_the_option(serving, script):
    async def main():
        wire = WireConfig(max_message_bytes=65536, drain_grace_s=1.0)
        async with serving(script(), wire) as running:
            async with channel.open_channel(running.address) as connection:
                error = await fails(generate(connection, "x" * 70_000).read())
                assert isinstance(error, errors.ResourceExhausted)
                assert error.reason == errors.MESSAGE_TOO_LARGE
                assert error.metadata["option"] == "max_message_bytes"
                assert error.metadata["limit"] == "65536"
                assert int(error.metadata["size"]) > 70_000
                assert (await generate(connection, "x" * 60_000).read()).delta.text
            small = ChannelConfig(max_message_bytes=1000)
            async with channel.open_channel(running.address, small) as connection:
                call = generate(connection, "flood")
                assert (await call.read()).delta.text == "flood"
                error = await fails(call.read())
                assert (error.reason, error.metadata["limit"]) == (errors.MESSAGE_TOO_LARGE, "1000")

    asyncio.run(main())


def test_a_port_in_use_is_an_error_that_names_it(serving, script):
    async def main():
        async with serving(script()) as running:
            with pytest.raises(ConfigError) as caught:
                async with serving(script(), WireConfig(listen=running.address)):
                    pass
            assert caught.value.field == "--listen"
            assert caught.value.value == running.address

    asyncio.run(main())


def test_a_unix_socket_is_private_survives_a_crash_and_is_not_shared(serving, script, tmp_path):
    path = tmp_path / "new" / "d.sock"
    wire = WireConfig(listen=f"unix:{path}", drain_grace_s=1.0)

    async def main():
        async with serving(script(), wire) as running:
            assert running.address == f"unix:{path}"
            assert path.parent.stat().st_mode & 0o777 == 0o700
            assert path.stat().st_mode & 0o077 == 0
            async with channel.open_channel(running.address) as connection:
                assert (await generate(connection, "hello").read()).delta.text == "hello"
            with pytest.raises(ConfigError, match="in use"):
                async with serving(script(), wire):
                    pass
        assert not path.exists()
        with socket.socket(socket.AF_UNIX) as crashed:
            crashed.bind(str(path))
        assert path.exists()
        async with serving(script(), wire):
            pass
        path.write_text("a file of somebody")
        with pytest.raises(ConfigError, match="a file is there"):
            async with serving(script(), wire):
                pass
        assert path.read_text() == "a file of somebody"

    asyncio.run(main())


def test_a_unix_path_that_is_too_long_is_refused(serving, script, tmp_path):
    async def main():
        wire = WireConfig(listen=f"unix:{tmp_path}/{'x' * 120}")
        with pytest.raises(ConfigError, match="bytes"):
            async with serving(script(), wire):
                pass

    asyncio.run(main())


def test_round_robin_passes_over_a_server_that_is_not_serving(serving, script):
    async def main():
        one, two = script(), script(moving=True)
        async with serving(one) as first, serving(two) as second:
            target = f"{first.address},{second.address}"
            async with channel.open_channel(target) as connection:
                while not (one.closed and two.closed):
                    await generate(connection, "hello").read()
                first.stop.set()
                await first.task
                one.closed.clear()
                for _ in range(4):
                    assert (await generate(connection, "hello").read()).delta.text == "hello"
                assert not one.closed

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_channel_that_checks_no_health_reaches_a_server_that_is_not_serving(serving, script):
    async def main():
        service = script(warm=asyncio.Event())
        async with serving(service, wait=False) as running:
            port = running.address.rpartition(":")[2]
            asking = ChannelConfig(health_checked=False)
            async with channel.open_channel(f"dns:///localhost:{port}", asking) as connection:
                assert await check(connection) == NOT_SERVING
            async with channel.open_channel(f"dns:///localhost:{port}") as connection:
                assert isinstance(await fails(check(connection)), errors.Unavailable)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_reflection_and_channelz_are_there(serving, script):
    from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    async def main():
        async with (
            serving(script()) as running,
            channel.open_channel(running.address) as connection,
        ):
            stub = reflection_pb2_grpc.ServerReflectionStub(connection)
            call = stub.ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            )
            listed = {
                service.name for service in (await call.read()).list_services_response.service
            }
            servers = await channelz_pb2_grpc.ChannelzStub(connection).GetServers(
                channelz_pb2.GetServersRequest(start_server_id=0)
            )
            return listed, len(servers.server)

    listed, servers = asyncio.run(main())
    assert {"draftwire.v1.Verifier", "grpc.health.v1.Health"} <= listed
    assert servers >= 1


PROGRAM = textwrap.dedent(
    """
    import importlib.util, sys
    from draftwire import runtime
    from draftwire.config import WireConfig
    spec = importlib.util.spec_from_file_location("scripted", sys.argv.pop(1))
    scripted = importlib.util.module_from_spec(spec)
    sys.modules["scripted"] = scripted
    spec.loader.exec_module(scripted)
    def make(config):
        service = scripted.Script()
        if config.log_level == "error":
            import asyncio
            service.drain_waits = asyncio.Event()
        return service
    sys.exit(runtime.run(make, WireConfig, "draftwire-verifier"))
    """
)


def start(*flags: str) -> subprocess.Popen[str]:
    scripted = Path(__file__).with_name("conftest.py")
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(scripted), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_command_tells_its_address_and_leaves_with_0_on_sigterm():
    process = start("--log-format", "json")
    try:
        word, address = process.stdout.readline().split()
        assert word == "listening"
        assert process.stdout.readline().split() == ["serving", address]
        with channel.open_sync_channel(address) as connection:
            stub = verifier_pb2_grpc.VerifierStub(connection)
            answer = next(stub.Generate(verifier_pb2.GenerateRequest(text="hello"), timeout=30))
            assert answer.delta.text == "hello"
        process.send_signal(signal.SIGTERM)
        _, logged = process.communicate(timeout=30)
        assert process.returncode == 0
        assert '"event": "stopped"' in logged
        assert "Traceback" not in logged
    finally:
        process.kill()
        process.wait()


def test_a_second_signal_cuts_a_drain_short():
    process = start("--log-level", "error", "--drain-grace-s", "3600")
    try:
        _, address = process.stdout.readline().split()
        process.stdout.readline()
        with channel.open_sync_channel(address) as connection:
            watch = health_pb2_grpc.HealthStub(connection).Watch(health_pb2.HealthCheckRequest())
            assert next(watch).status == SERVING
            process.send_signal(signal.SIGINT)
            assert next(watch).status == NOT_SERVING
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--listen", "nonsense"], "--listen"),
        (["--what"], "--what"),
        (["--token-file", "/does/not/exist"], "--token-file"),
    ],
)
def test_the_command_leaves_with_2_and_one_line_for_a_bad_configuration(flags, words):
    process = start(*flags)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert not out
    lines = [line for line in err.splitlines() if not line.startswith("{")]
    assert len(lines) == 1
    assert lines[0].startswith("draftwire-verifier: ")
    assert words in lines[0]


def test_the_command_leaves_with_2_for_a_port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start("--listen", f"127.0.0.1:{taken.getsockname()[1]}")
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "in use" in err.splitlines()[-1]


def test_check_config_prints_the_effective_settings_and_serves_nothing():
    process = start("--check-config", "--keepalive-s", "90")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "keepalive-s = 90.0" in out.splitlines()


def test_run_cuts_the_switch_interval(monkeypatch, script):
    seen = []

    async def served(*_, **__):
        seen.append(sys.getswitchinterval())

    before = sys.getswitchinterval()
    monkeypatch.setattr(runtime, "serve", served)
    try:
        assert runtime.run(lambda _: script(), WireConfig, "draftwire-verifier", []) == 0
    finally:
        sys.setswitchinterval(before)
    assert seen[0] == pytest.approx(runtime.SWITCH_INTERVAL_S)
    assert os.environ["GRPC_VERBOSITY"]

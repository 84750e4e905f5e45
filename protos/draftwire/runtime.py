"""A service's life: bind, load, serve, drain, close; and the main() of both commands.

Knows signals, health and the order in which a server goes away. Does not know what is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Protocol, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from draftwire import auth, config, health, listen, logs
from draftwire.channel import server_options
from draftwire.config import ConfigError, WireConfig
from draftwire.errors import DraftwireError
from draftwire.exporter import Exporter, service_exporter
from draftwire.guard import Guard, Phase
from draftwire.rpc_meter import RpcMeter

C = TypeVar("C", bound=WireConfig)
# By default a computing thread keeps the interpreter for 5 ms, and each round trip waits for it.
SWITCH_INTERVAL_S = 50e-6
PROGRESS_INTERVAL_S = 0.25


class Service(Protocol):
    """What `serve` needs. Handlers raise DraftwireError; those that stream are async generators.

    With a method `readings()` (an iterable of `meters.Reading`, called from another thread at each
    scrape) its numbers are among the metrics.
    """

    @property
    def service_names(self) -> Sequence[str]:
        """Full names, "draftwire.v1.Verifier"."""

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer."""

    async def start(self) -> None:
        """Loads and warms; calls are taken and health is SERVING only after it has returned."""

    def progress(self) -> bool:
        """False while work waits and no step was made for too long: health is NOT_SERVING then."""

    async def drain(self) -> None:
        """Takes no new work, says so on open streams, returns when admitted work is done."""

    async def close(self) -> None:
        """Frees everything; called once, also after a start that failed."""


async def serve(
    service: Service,
    wire: WireConfig,
    *,
    bound: Callable[[str], None] | None = None,
    ready: Callable[[str], None] | None = None,
    metrics: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Runs the service until SIGTERM, SIGINT or `stop`, then drains it.

    `bound` gets the address once it is listened on (NOT_SERVING), `ready` once the service is
    warm (SERVING), `metrics` the URL of the metrics if they are served. Raises ConfigError for an
    address in use, and what `start` raised.
    """
    config.validate(wire)
    logs.configure(wire.log_format, wire.log_level)
    log = logs.get_logger("draftwire.runtime")
    stop = stop or asyncio.Event()
    hurry = asyncio.Event()
    guard = Guard(auth.read_tokens(wire.token_file) if wire.token_file else None)
    meter = RpcMeter() if wire.metrics_listen else None
    interceptors = [guard] if meter is None else [meter, guard]  # the first one is the outermost
    server = grpc.aio.server(interceptors=interceptors, options=server_options(wire))
    healthy = health.HealthService(service.service_names)
    service.register(server)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    _add_tools(server, service.service_names)
    address = listen.bind(server, wire)
    exporter: Exporter | None = None
    try:
        with _signals(stop, hurry):
            if meter is not None and wire.metrics_listen:
                exporter = service_exporter(service, meter, healthy)
                url = exporter.open(wire.metrics_listen)
                log.info("metrics", url=url)
                if metrics is not None:
                    metrics(url)
            await server.start()
            log.info("listening", address=address, config=config.effective(wire))
            if bound is not None:
                bound(address)
            if await _unless_stopped(service.start(), stop):
                guard.phase = Phase.SERVING
                healthy.set_serving(True)
                log.info("serving", address=address)
                if ready is not None:
                    ready(address)
                await _watch_progress(service, healthy, stop, log)
                await _drain(service, server, guard, healthy, wire.drain_grace_s, hurry, log)
    finally:
        healthy.close()
        await server.stop(None)
        await service.close()
        if exporter is not None:
            exporter.close()
        listen.release(address)
        log.info("stopped", address=address)


async def _unless_stopped(start: Coroutine[None, None, None], stop: asyncio.Event) -> bool:
    """Whether `start` ended before `stop` was set; else it is cancelled. Raises what it raised."""
    starting = asyncio.create_task(start)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return False
        await starting
        return not stop.is_set()
    finally:
        for task in (starting, stopping):
            task.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)


async def _watch_progress(
    service: Service, healthy: health.HealthService, stop: asyncio.Event, log: logs.Logger
) -> None:
    """Until `stop`: health follows progress."""
    while not stop.is_set():
        try:
            moving = service.progress()
        except Exception:
            log.exception("progress check failed")
            moving = False
        if moving != healthy.serving:
            log.warning("health changed", serving=moving)
            healthy.set_serving(moving)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), PROGRESS_INTERVAL_S)


async def _drain(
    service: Service,
    server: grpc.aio.Server,
    guard: Guard,
    healthy: health.HealthService,
    grace_s: float,
    hurry: asyncio.Event,
    log: logs.Logger,
) -> None:
    """In this order: balancers look away, peers are told in band, work ends, the port closes."""
    loop = asyncio.get_running_loop()
    end = loop.time() + grace_s
    log.info("draining", grace_s=grace_s)
    guard.phase = Phase.DRAINING
    healthy.set_serving(False)
    draining = asyncio.create_task(service.drain())
    hurrying = asyncio.create_task(hurry.wait())
    try:
        await asyncio.wait(
            {draining, hurrying}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED
        )
        healthy.close()  # its watchers would hold the server open
        left = 0.0 if hurry.is_set() else max(0.0, end - loop.time())
        stopping = asyncio.create_task(server.stop(left))
        await asyncio.wait({stopping, hurrying}, return_when=asyncio.FIRST_COMPLETED)
        await server.stop(None)
        await stopping
        if draining.done() and (error := draining.exception()) is not None:
            log.error("drain failed", exc_info=error)
        elif not draining.done():
            log.warning("work was cut off at the end of the grace")
    finally:
        for task in (draining, hurrying):
            task.cancel()
        await asyncio.gather(draining, hurrying, return_exceptions=True)


@contextlib.contextmanager
def _signals(stop: asyncio.Event, hurry: asyncio.Event) -> Iterator[None]:
    """The first SIGTERM or SIGINT sets `stop`, the second `hurry`; main thread only."""

    def handle() -> None:
        (hurry if stop.is_set() else stop).set()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, handle)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _add_tools(server: grpc.aio.Server, names: Sequence[str]) -> None:
    """Reflection and channelz, for grpcurl and grpcdebug."""
    from grpc_channelz.v1 import channelz
    from grpc_reflection.v1alpha import reflection

    channelz.add_channelz_servicer(server)
    reflection.enable_server_reflection(
        [*names, health.SERVICE, "grpc.channelz.v1.Channelz", reflection.SERVICE_NAME], server
    )


def run(
    service_factory: Callable[[C], Service],
    config_cls: type[C],
    prog: str,
    argv: Sequence[str] | None = None,
) -> int:
    """main() of a service: 0 after a drain, 2 for a configuration that cannot work, 1 for the rest.

    stdout gets a line "listening ADDRESS" and a line "serving ADDRESS" for the parent process, and
    before them "metrics URL" if there are any; logs go to stderr.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

    def tell(word: str) -> Callable[[str], None]:
        def write(address: str) -> None:
            with contextlib.suppress(BrokenPipeError):
                sys.stdout.write(f"{word} {address}\n")
                sys.stdout.flush()

        return write

    try:
        wire = config.load(config_cls, sys.argv[1:] if argv is None else argv, os.environ, prog)
        if wire.check_config:
            for name, value in config.effective(wire).items():
                sys.stdout.write(f"{name} = {value}\n")
            return 0
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        service = service_factory(wire)
        bound, ready, metrics = tell("listening"), tell("serving"), tell("metrics")
        asyncio.run(serve(service, wire, bound=bound, ready=ready, metrics=metrics))
    except ConfigError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 2
    except DraftwireError as error:
        sys.stderr.write(f"{prog}: {error.reason}: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0

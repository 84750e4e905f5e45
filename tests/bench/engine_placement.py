"""Measures where the engine may live: in a thread of the gRPC process, or in a process of its own.

The round trip of a small message over an aio bidi stream, client in another process, is taken while
the engine steps the demo target without pause: (a) in a thread with the interpreter's usual switch
interval of 5 ms, (b) in a thread with 50 us, (c) in a process behind a multiprocessing pipe, where
each echo makes one trip through the pipe to a reader thread beside the engine, as a request would.
In (a) and (b) the hand-over is an append under a lock. The engine's step time is taken in each arm;
`idle` is the same server with nothing stepping. Arms alternate over several rounds.

Not measured: proposals, many clients, GPUs (where the engine waits without holding the
interpreter).
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import grpc
import numpy as np
from common import demo_folder, distribution, load_average, options, say, write

METHOD = "/draftwire.bench.Echo/Talk"
ROWS, BASE = 16, 64
ARMS = {
    "thread, 5 ms": ("thread", 5e-3),
    "thread, 50 us": ("thread", 50e-6),
    "process, pipe": ("process", 50e-6),
}


class Stepper:
    """A target step of 16 rows and the walk over its logits, again and again while it is on."""

    def __init__(self) -> None:
        import torch

        from draftwire.models import resolve
        from draftwire_kernels.sampling import Sampling
        from draftwire_kernels.tree import TokenTree
        from draftwire_kernels.walk import follow
        from verifier_service import model as target
        from verifier_service.cache import PagedStore, PagePool
        from verifier_service.packing import Feed

        host = target.TargetHost(
            target.load_model(resolve(str(demo_folder())), torch.float32, "cpu")
        )
        store = PagedStore(PagePool(16, 16), host.cache_shape, host.dtype, host.device)
        slots = np.arange(16, 16 + BASE + ROWS, dtype=np.int64)
        host.step([Feed([1] * BASE, 0, slots, None, ())], store)
        feed = Feed([1] * ROWS, BASE, slots, None, tuple(range(ROWS)))
        tree, sampling = TokenTree.chain([1] * (ROWS - 1)), Sampling(seed=1)

        def step() -> None:
            output = host.step([feed], store)
            follow(output.of(0, ROWS), tree, sampling, position=BASE + 1)

        self._step = step
        self.on = threading.Event()
        self.times: list[float] = []
        self.inbox: list[bytes] = []
        self.lock = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self.on.wait()
            started = time.perf_counter()
            self._step()
            self.times.append(time.perf_counter() - started)
            with self.lock:
                self.inbox.clear()

    def hear(self, message: bytes) -> list[float]:
        """Take a message: "on SECONDS" and "off" are obeyed, anything else goes to the inbox."""
        word, _, value = message.partition(b" ")
        if word == b"on":
            self.times.clear()
            sys.setswitchinterval(float(value))
            self.on.set()
        elif word == b"off":
            self.on.clear()
            return list(self.times)
        else:
            with self.lock:
                self.inbox.append(message)
                self.lock.notify()
        return []


def engine_process(pipe: Connection) -> None:
    """The engine's side of the pipe."""
    stepper = Stepper()
    while (message := pipe.recv_bytes()) != b"end":
        times = stepper.hear(message)
        pipe.send_bytes(np.asarray(times).tobytes() if message == b"off" else message)


def server_process(kind: str, told: Connection) -> None:
    """An echo server; its engine is a thread of it or a process behind a pipe."""
    asyncio.run(_serve(kind, told))


async def _serve(kind: str, told: Connection) -> None:
    loop = asyncio.get_running_loop()
    if kind == "thread":
        stepper = await asyncio.to_thread(Stepper)

        async def answer(message: bytes) -> bytes:
            times = stepper.hear(message)
            return np.asarray(times).tobytes() if message == b"off" else message
    else:
        near, far = multiprocessing.get_context("spawn").Pipe()
        engine = multiprocessing.get_context("spawn").Process(target=engine_process, args=(far,))
        engine.start()
        waiting: asyncio.Queue[asyncio.Future[bytes]] = asyncio.Queue()
        loop.add_reader(near.fileno(), lambda: waiting.get_nowait().set_result(near.recv_bytes()))

        async def answer(message: bytes) -> bytes:
            future: asyncio.Future[bytes] = loop.create_future()
            waiting.put_nowait(future)
            near.send_bytes(message)
            return await future

        await answer(b"hello")

    async def talk(messages: Any, _context: Any) -> Any:
        async for message in messages:
            yield await answer(message)

    server = grpc.aio.server()
    handler: Any = grpc.stream_stream_rpc_method_handler(talk)
    _, service, method = METHOD.split("/")
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    told.send(port)
    await asyncio.to_thread(told.recv)
    await server.stop(0)
    if kind == "process":
        loop.remove_reader(near.fileno())
        near.send_bytes(b"end")
        engine.join(5)


async def echo(call: Any, message: bytes) -> tuple[bytes, float]:
    """One round trip; seconds."""
    started = time.perf_counter()
    await call.write(message)
    reply = await call.read()
    return reply, time.perf_counter() - started


async def measure(
    call: Any, interval: float | None, seconds: float, rng: random.Random
) -> tuple[list[float], list[float]]:
    """Round trips and step times of one round; interval None leaves the engine idle."""
    if interval is not None:
        await echo(call, b"on %f" % interval)
        await asyncio.sleep(0.3)
    trips = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        trips.append((await echo(call, b"x" * 512))[1])
        await asyncio.sleep(rng.uniform(0.002, 0.012))
    if interval is None:
        return trips, []
    reply, _ = await echo(call, b"off")
    await asyncio.sleep(0.3)  # the step under way ends
    return trips, np.frombuffer(reply).tolist()


async def main() -> int:
    """Run the arms in turn and write engine_placement.json."""
    given, load = options(__doc__), load_average()
    rounds, seconds = (1, 1.0) if given.quick else (4, 5.0)
    rng = random.Random(given.seed)
    spawn = multiprocessing.get_context("spawn")
    calls: dict[str, Any] = {}
    ends, processes, channels = [], [], []
    for kind in ("thread", "process"):
        near, far = spawn.Pipe()
        process = spawn.Process(target=server_process, args=(kind, far))
        process.start()
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{await asyncio.to_thread(near.recv)}")
        calls[kind] = channel.stream_stream(METHOD)()
        channels.append(channel)
        ends.append(near)
        processes.append(process)
    found: dict[str, tuple[list[float], list[float]]] = {}
    for number in range(rounds):
        arms: list[tuple[str, str, float | None]] = [(n, k, i) for n, (k, i) in ARMS.items()]
        arms += [("thread, idle", "thread", None), ("process, idle", "process", None)]
        for name, kind, interval in arms[number % 3 :] + arms[: number % 3]:
            length = seconds if interval is not None else seconds / 3
            trips, steps = await measure(calls[kind], interval, length, rng)
            kept = found.setdefault(name, ([], []))
            kept[0].extend(trips)
            kept[1].extend(steps)
    for call, channel, end, process in zip(calls.values(), channels, ends, processes, strict=True):
        call.cancel()
        await channel.close()
        end.send("end")
        process.join(10)
    results = {
        name: {
            "round_trip_ms": distribution([1e3 * t for t in trips]),
            "step_ms": distribution([1e3 * t for t in steps], 2),
        }
        for name, (trips, steps) in sorted(found.items())
    }
    write("engine_placement", {"rows": ROWS, "rounds": rounds, "arms": results}, given, load)
    for name, arm in results.items():
        trip, step = arm["round_trip_ms"], arm["step_ms"]
        say(
            f"engine_placement: {name}: echo p50 {trip['p50']} ms, p99 {trip['p99']} ms, "
            f"n {trip['n']}; step p50 {step.get('p50')} ms"
        )
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

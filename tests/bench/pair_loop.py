"""Measures what the loop between verifier and drafter costs beside the models.

The verifier runs in this process (the shipped service: engine thread, real gRPC), the drafter as a
process of its own, with random weights. A draft round trip begins when Lanes.flush sends a step's
message and ends when the engine takes the answer in. `less_model_ms` is the round trip less the
drafter's model time, `less_service_ms` the round trip less all of the drafter's time between
reading a request and writing the answer: transport and hand-over on both sides. Messages and bytes
are counted each way.

Not measured: acceptance (the drafter is random) and networks (both ends share this host). Rounds in
which a target step ran before the answer was taken in are counted apart: the engine had stopped
waiting for the lane. Then one answer may also cover several messages, so that fewer than one a step
come back.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import distribution, load_average, many, options, say, write
from fakes import eventually, prompts, tiny_target, verifier

from draftwire.runtime import SWITCH_INTERVAL_S
from draftwire.v1 import drafter_pb2
from draftwire_client.demo import TARGET, service

SESSIONS = (1, 16)


@dataclass
class Recorder:
    """Listens to one lane. Messages are kept and sized afterwards: sizing them is not free."""

    sent: dict[int, tuple[float, int]] = field(default_factory=dict)  # sequence -> (time, steps)
    requests: list[drafter_pb2.StepRequest] = field(default_factory=list)
    responses: list[drafter_pb2.StepResponse] = field(default_factory=list)
    rounds: list[tuple[float, float, float, bool]] = field(default_factory=list)
    flushes: int = 0
    first_step: int = 0

    def attach(self, engine: Any) -> None:
        """Wrap the engine's lanes and the port of its only lane."""
        lanes = engine.lanes
        (lane,) = lanes.lanes.values()
        hear, flush, send = lanes.response, lanes.flush, lane.port.send

        def sending(request: drafter_pb2.StepRequest) -> None:
            self.sent[request.sequence] = (time.perf_counter(), engine.steps)
            self.requests.append(request)
            send(request)

        def hearing(lane_id: int, message: drafter_pb2.StepResponse, *rest: Any) -> None:
            taken = time.perf_counter()
            if message.ack_sequence in self.sent:
                at, steps = self.sent[message.ack_sequence]
                self.rounds.append(
                    (
                        taken - at,
                        message.model_time.ToNanoseconds() / 1e9,
                        message.service_time.ToNanoseconds() / 1e9,
                        steps == engine.steps,
                    )
                )
                self.responses.append(message)
            hear(lane_id, message, *rest)

        def flushing(*arguments: Any, **named: Any) -> None:
            before = len(self.requests)
            flush(*arguments, **named)
            self.flushes += len(self.requests) > before

        lane.port.send, lanes.response, lanes.flush = sending, hearing, flushing

    def clear(self, engine: Any) -> None:
        """Forget what was heard so far; called when the engine is idle."""
        self.requests.clear()
        self.responses.clear()
        self.rounds.clear()
        self.sent.clear()
        self.flushes = 0
        self.first_step = engine.steps

    def report(self, engine: Any) -> dict[str, Any]:
        """The cell of one target and one number of sessions; times in milliseconds."""
        waited = [r for r in self.rounds if r[3]]
        steps = engine.steps - self.first_step
        return {
            "round_trip_ms": distribution([1e3 * r[0] for r in waited]),
            "model_ms": distribution([1e3 * r[1] for r in waited]),
            "less_model_ms": distribution([1e3 * (r[0] - r[1]) for r in waited]),
            "less_service_ms": distribution([1e3 * (r[0] - r[2]) for r in waited]),
            "less_model_with_overlapped_ms": distribution(
                [1e3 * (r[0] - r[1]) for r in self.rounds]
            ),
            "rounds_overlapped_by_a_step": len(self.rounds) - len(waited),
            "target_steps": steps,
            "steps_that_told_the_lane": self.flushes,
            "messages_per_step_to_drafter": round(len(self.requests) / max(1, self.flushes), 4),
            "messages_per_step_to_verifier": round(len(self.responses) / max(1, self.flushes), 4),
            "bytes_per_message_to_drafter": distribution([m.ByteSize() for m in self.requests], 1),
            "bytes_per_message_to_verifier": distribution(
                [m.ByteSize() for m in self.responses], 1
            ),
            "ring_bytes_per_message_to_drafter": distribution(
                [_ring_bytes(m) for m in self.requests], 1
            ),
            "proposals_per_response": round(
                sum(len(m.proposals) for m in self.responses) / max(1, len(self.responses)), 2
            ),
            "faults": sum(len(m.faults) for m in self.responses),
        }


def _answered(engine: Any) -> bool:
    """Whether the drafter has acknowledged every message."""
    return all(
        not lane.outbox.pending and lane.acked == lane.outbox.sequence
        for lane in engine.lanes.lanes.values()
    )


def _ring_bytes(request: drafter_pb2.StepRequest) -> int:
    tensors = [f.rows for f in request.features] + [o.features for o in request.outcomes]
    return sum(t.shared_memory.length for t in tensors)


async def target_cells(
    model: Path | str, given: Any, *, tokens: int, seconds: float, vocab: int, nodes: int
) -> dict[str, Any]:
    """All cells of one target."""
    cells: dict[str, Any] = {}
    with service(
        ["drafter_service", "--target", str(model), "--random-weights-seed", "0"], "the drafter"
    ) as address:
        async with verifier(model, [address], kv_tokens=16384, draft_wait_ms=20000) as pair:
            engine, stub = pair[0].engine, pair[1]
            assert engine is not None
            await eventually(lambda: engine.lanes.lanes)
            recorder = Recorder()
            recorder.attach(engine)
            fields = {
                "stop": {"max_tokens": tokens, "ignore_eos": True},
                "speculation": {"max_nodes": nodes},
            }
            texts = prompts(10**6, vocab, seed=given.seed, low=8, high=60)
            await many(stub, [(next(texts), fields) for _ in range(2)], 2)  # warm both sides
            for sessions in SESSIONS:
                await eventually(lambda: not engine.sessions and _answered(engine))
                recorder.clear(engine)
                until = time.monotonic() + seconds
                while time.monotonic() < until:
                    batch = [(next(texts), fields) for _ in range(sessions)]
                    await many(stub, batch, sessions)
                await eventually(lambda: not engine.sessions and _answered(engine))
                cells[str(sessions)] = recorder.report(engine) | {"max_nodes": nodes}
    return cells


async def main() -> int:
    """Run all cells and write pair_loop.json."""
    given, load = options(__doc__), load_average()
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as draftwire.runtime.run does
    seconds = 1.0 if given.quick else 25.0
    with tempfile.TemporaryDirectory() as folder:
        tiny = await target_cells(
            tiny_target(Path(folder)),
            given,
            tokens=32 if given.quick else 128,
            seconds=seconds,
            vocab=256,
            nodes=15,
        )
    demo = await target_cells(
        TARGET, given, tokens=4 if given.quick else 24, seconds=seconds, vocab=40000, nodes=4
    )
    results = {
        "drafter": "random weights, a process of its own",
        "switch_interval_ms": 1e3 * sys.getswitchinterval(),
        "sessions": {"tiny target": tiny, "demo target": demo},
    }
    write("pair_loop", results, given, load)
    for name, cells in results["sessions"].items():  # type: ignore[attr-defined]
        for sessions, cell in cells.items():
            found = cell["less_model_ms"]
            say(
                f"pair_loop: {name}, {sessions} sessions: round trip less model time "
                f"p50 {found.get('p50')} ms, p99 {found.get('p99')} ms, n {found['n']}; "
                f"messages a step {cell['messages_per_step_to_drafter']} there, "
                f"{cell['messages_per_step_to_verifier']} back"
            )
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

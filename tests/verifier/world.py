"""The shipped engine in a made-up world: time stands still but for what steps and drafts are said
to take, the target's next token is known, and the drafter hits it as often as it is told to.

Knows: nothing of real models or clocks. The engine, its lanes, scheduler and policy are the real
ones.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from draftwire.codec import encode
from draftwire.v1 import drafter_pb2, types_pb2
from draftwire_kernels.sampling import Sampling
from verifier_service.cache import CacheShape, PagePool
from verifier_service.engine import Engine, EngineLimits
from verifier_service.lane import LaneFacts
from verifier_service.model import StepOutput
from verifier_service.packing import pack
from verifier_service.reports import Emitted
from verifier_service.scheduler import Budgets
from verifier_service.session import Request, Speculation

VOCAB = 16
BUCKETS = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
ADAPTIVE = types_pb2.SPECULATION_MODE_ADAPTIVE


def token_at(position: int) -> int:
    """What the target says there, whoever asks."""
    return (7 * position * position + 3 * position) % (VOCAB - 1)


class Letters:
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "x" * len(token_ids)


class Host:
    """A target whose steps take `step_ms(rows)` of the world's time."""

    cache_shape = CacheShape(1, 1, 2, 4)
    dtype, device = torch.float32, torch.device("cpu")
    plan = SimpleNamespace(buckets=BUCKETS)

    def __init__(self, world: World) -> None:
        self._world = world

    def capture(self, layer: int) -> None: ...

    def step(self, feeds: Sequence[Any], store: Any) -> Any:
        packed = pack(feeds, BUCKETS, (4, 8, 16, 32, 64, 128, 256), self.device)
        world = self._world
        world.now += world.step_ms(len(packed.token_ids)) / 1e3
        world.now += sum(world.session_ms + world.position_ms * f.base for f in feeds) / 1e3
        world.steps.append(packed.real_rows)
        rows = packed.positions[packed.logit_rows].tolist()
        logits = torch.zeros(len(rows), VOCAB)
        for row, position in enumerate(rows):
            logits[row, token_at(position + 1)] = 9.0
        return StepOutput(logits, packed)


@dataclass
class Drafter:
    """A lane whose drafter answers after `draft_ms(rows)`: chains with the target's token at depth
    d with chance rate(d), claimed with chance `claim` (as it is if None)."""

    world: World
    lane_id: int
    draft_ms: Callable[[int], float]
    rate: Callable[[int], float]
    claim: float | None = None
    block_size: int = 16
    told: dict[int, int] = field(default_factory=dict)
    asked: list[tuple[float, int]] = field(default_factory=list)  # time, drafter rows
    answers: int = 0

    def __post_init__(self) -> None:
        self.facts = LaneFacts(
            "t", f"d{self.lane_id}", "w", True, (0,), self.block_size, 64, 10_000, 8, False, 1 << 20
        )

    def encode(self, rows: torch.Tensor) -> types_pb2.Tensor:
        return encode(rows)

    def encode_plain(self, tensor: torch.Tensor) -> types_pb2.Tensor:
        return encode(tensor)

    def acknowledge(self, sequence: int) -> None: ...

    def abandon(self, why: str) -> None:
        raise AssertionError(why)

    def send(self, request: drafter_pb2.StepRequest) -> None:
        """Checks that no position is missing, and answers in time."""
        wanted: list[tuple[types_pb2.SessionKey, drafter_pb2.RoundBudget]] = []
        for opening in request.opens:
            self.told[opening.key.session_id] = opening.key.base_position
            wanted.append((opening.key, opening.budget))
        for outcome in request.outcomes:
            assert outcome.previous_base == self.told[outcome.key.session_id]
            assert len(outcome.token_ids) == outcome.features.shape[0]
            self.told[outcome.key.session_id] = outcome.key.base_position
            wanted.append((outcome.key, outcome.budget))
        drafts = [(key, b) for key, b in wanted if b.want_proposal]
        sizes = [min(b.max_depth, b.max_nodes, self.block_size - 1) for _, b in drafts]
        rows = sum(1 + size for size in sizes)
        ms = self.draft_ms(rows) if rows else 0.1
        if rows:
            self.asked.append((self.world.now, rows))
        proposals = [self._propose(k, n) for (k, _), n in zip(drafts, sizes, strict=True)]
        due = self.world.now + ms / 1e3
        self.world.at(ms / 1e3, lambda: self._answer(request.sequence, proposals, due))

    def _propose(self, key: types_pb2.SessionKey, length: int) -> drafter_pb2.Proposal:
        base = key.base_position
        tokens = []
        for depth in range(length):
            right = self.world.rng.random() < self.rate(depth)
            tokens.append((token_at(base + 1 + depth) + (not right)) % VOCAB)
        claims = [self.claim or max(1e-3, self.rate(depth)) for depth in range(length)]
        tree = types_pb2.TokenTree(
            token_ids=tokens,
            parents=range(-1, length - 1),
            log_probs=[math.log(claim) for claim in claims],
            parts=[types_pb2.DRAFT_PART_ARGMAX] * length,
        )
        return drafter_pb2.Proposal(key=key, tree=tree, block_size=length + 1, reason=1)

    def _answer(self, sequence: int, proposals: list[drafter_pb2.Proposal], due: float) -> None:
        self.answers += 1
        message = drafter_pb2.StepResponse(
            sequence=self.answers, ack_sequence=sequence, proposals=proposals
        )
        self.world.engine.lanes.response(self.lane_id, message, due)


class World:
    """Everything, with a clock of its own. `step_ms(rows)`: of padded rows."""

    def __init__(self, step_ms: Callable[[int], float], seed: int = 0, profiled: bool = True):
        self.now = 0.0
        self.rng = random.Random(seed)
        self.step_ms = step_ms
        self.session_ms = self.position_ms = 0.0  # of a step, for each session and position of it
        self.steps: list[int] = []
        self.made: dict[int, list[tuple[float, int]]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.engine = Engine(
            Host(self),  # type: ignore[arg-type]
            Letters(),
            PagePool(4096, 16),
            Budgets(64, 1024, 256, 64),
            EngineLimits(longest_draft_wait=0.5),
            vocab_size=VOCAB,
            max_context=10_000,
            clock=lambda: self.now,
            emit=self._take,
        )
        if profiled:
            for rows in BUCKETS:
                for drafted in (False, True):
                    self.engine.policy.costs.profile(rows, step_ms(rows), drafted=drafted)

    def at(self, delay: float, action: Callable[[], None]) -> None:
        """Something that happens later."""
        self._count += 1
        heapq.heappush(self._events, (self.now + delay, self._count, action))

    def drafter(
        self,
        draft_ms: Callable[[int], float],
        rate: Callable[[int], float],
        claim: float | None = None,
        **options: Any,
    ) -> Drafter:
        """A lane more."""
        number = len(self.engine.lanes.lanes) + 1
        drafter = Drafter(self, number, draft_ms, rate, claim, **options)
        self.engine.lane_up(drafter)
        return drafter

    def ask(self, number: int, tokens: int, mode: int = ADAPTIVE, **options: Any) -> None:
        """A request with a prompt of 5 tokens."""
        options = {"max_block_size": 16, "max_nodes": 15, **options}
        off = mode == types_pb2.SPECULATION_MODE_OFF
        speculation = Speculation(not off, mode=mode, **options)
        prompt = tuple(token_at(i) for i in range(5))
        request = Request(str(number), prompt, Sampling(temperature=0), tokens, speculation)
        self.made[number] = []
        self.engine.submit(number, request)

    def run(self, until: float = math.inf) -> float:
        """Until all is done, or the clock shows `until`; the time."""
        engine = self.engine
        while (engine.sessions or engine.roster.out) and self.now < until:
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            decision = engine._decide(self.now)
            if decision.until is None or decision.until <= self.now:
                engine.turn()
            else:
                first = self._events[0][0] if self._events else math.inf
                self.now = max(self.now, min(decision.until, first))
        return self.now

    def speed(self, number: int, start: float = 0.0) -> float:
        """Tokens a second of a request from `start` on."""
        after = [(at, count) for at, count in self.made[number] if at >= start]
        return sum(count for _, count in after[1:]) / max(1e-9, after[-1][0] - after[0][0])

    def _take(self, batch: list[Emitted]) -> None:
        for item in batch:
            assert item.error is None
            if item.delta is not None and item.delta.tokens:
                self.made[item.session_id].append((self.now, len(item.delta.tokens)))
            if item.finished is not None:
                self.finished = item.finished

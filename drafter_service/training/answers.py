"""Makes the target answer, in one of two ways: the verifier's engine in this process, or a running
verifier through the SDK. Both give the same tokens, because both are the same engine.

Knows how to keep many requests under way. Does not know files.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field

from drafter_service.training.prompts import Job
from drafter_service.training.store import Response
from drafter_service.training.target import Target
from draftwire.v1 import types_pb2, verifier_pb2
from draftwire_client import AsyncClient, FinishReason
from draftwire_kernels.sampling import Sampling
from verifier_service.cache import PagePool
from verifier_service.engine import Engine, EngineLimits
from verifier_service.reports import Emitted
from verifier_service.scheduler import Budgets
from verifier_service.session import Request, Speculation

_OFF = Speculation(
    enabled=False, max_block_size=1, max_nodes=0, mode=types_pb2.SPECULATION_MODE_OFF
)
_TIMEOUT_S = 3600.0
_STOPPED = (
    verifier_pb2.FINISH_REASON_STOP_TOKEN,
    verifier_pb2.FINISH_REASON_EOS,
)


@dataclass(slots=True)
class _Pending:
    job: Job
    prompt: tuple[int, ...]
    answer: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class EngineAnswers:
    """Answers made by the verifier's engine, here, without drafters."""

    def __init__(
        self, target: Target, *, sessions: int, max_tokens: int, max_prompt: int, page: int = 16
    ) -> None:
        """`sessions` at a time, `max_tokens` each; prompts longer than `max_prompt` are skipped."""
        self._target = target
        self._sessions, self._max_tokens, self._max_prompt = sessions, max_tokens, max_prompt
        pages = sessions * (-(-(max_prompt + max_tokens + 1) // page) + 1)
        self._emitted: queue.SimpleQueue[list[Emitted]] = queue.SimpleQueue()
        self._engine = Engine(
            target.host,
            target.tokenizer,
            PagePool(pages + 1, page),
            Budgets(sessions, max(1024, 4 * sessions), 256, 4 * sessions),
            EngineLimits(),
            vocab_size=target.vocab_size,
            max_context=max_prompt + max_tokens + 1,
            clock=time.monotonic,
            emit=self._emitted.put,
        )

    def answer(self, jobs: Sequence[Job]) -> Iterator[Response]:
        """The answers as they get ready, in no particular order. Raises what a request failed
        with.
        """
        thread = threading.Thread(target=self._engine.run, name="answers", daemon=True)
        thread.start()
        try:
            yield from self._collect(iter(jobs))
        finally:
            self._engine.stop()
            thread.join()

    def _collect(self, jobs: Iterator[Job]) -> Iterator[Response]:
        pending: dict[int, _Pending] = {}
        number = 0
        while True:
            # One engine's worth waits behind the one that runs, so that no step is short.
            while len(pending) < 2 * self._sessions and (job := next(jobs, None)) is not None:
                prompt = self._target.encode(job.prompt)
                if len(prompt) > self._max_prompt:
                    continue
                number += 1
                pending[number] = _Pending(job, prompt)
                self._submit(number, pending[number])
            if not pending:
                return
            for item in self._emitted.get():
                state = pending[item.session_id]
                if item.error is not None:
                    raise item.error
                if item.delta is not None:
                    state.answer.extend(item.delta.tokens)
                    state.logprobs.extend(entry.logprob for entry in item.logprobs)
                if item.finished is not None:
                    del pending[item.session_id]
                    yield _response(
                        state.job,
                        state.prompt,
                        state.answer,
                        state.logprobs,
                        item.finished.reason in _STOPPED,
                    )

    def _submit(self, number: int, state: _Pending) -> None:
        recipe = state.job.recipe
        request = Request(
            request_id=str(number),
            prompt=state.prompt,
            sampling=Sampling(
                temperature=recipe.temperature,
                top_k=recipe.top_k,
                top_p=recipe.top_p,
                seed=state.job.seed,
            ),
            max_tokens=self._max_tokens,
            speculation=_OFF,
            eos_ids=self._target.eos_ids,
            logprobs=True,
        )
        self._engine.post(lambda: self._engine.submit(number, request))


class VerifierAnswers:
    """Answers of a running verifier, through the SDK. The drafters it has only make it faster."""

    def __init__(
        self, address: str, target: Target, *, sessions: int, max_tokens: int, max_prompt: int
    ) -> None:
        self._address, self._target = address, target
        self._sessions, self._max_tokens, self._max_prompt = sessions, max_tokens, max_prompt

    def answer(self, jobs: Sequence[Job]) -> Iterator[Response]:
        """As EngineAnswers.answer."""
        with asyncio.Runner() as runner:
            stream = self._stream(jobs)
            try:
                while True:
                    try:
                        yield runner.run(_next(stream))
                    except StopAsyncIteration:
                        return
            finally:
                runner.run(stream.aclose())

    async def _stream(self, jobs: Sequence[Job]) -> AsyncGenerator[Response]:
        waiting = iter(jobs)
        running: set[asyncio.Task[Response]] = set()
        async with AsyncClient.connect(self._address) as client:
            try:
                while True:
                    while len(running) < self._sessions and (job := next(waiting, None)):
                        prompt = self._target.encode(job.prompt)
                        if len(prompt) <= self._max_prompt:
                            running.add(asyncio.create_task(self._one(client, job, prompt)))
                    if not running:
                        return
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        yield task.result()
            finally:
                for task in running:
                    task.cancel()

    async def _one(self, client: AsyncClient, job: Job, prompt: tuple[int, ...]) -> Response:
        recipe = job.recipe
        result = await client.generate(
            prompt,
            temperature=recipe.temperature,
            top_k=recipe.top_k,
            top_p=recipe.top_p,
            seed=job.seed,
            max_tokens=self._max_tokens,
            logprobs=True,
            timeout=_TIMEOUT_S,
        )
        stopped = result.finish_reason in (FinishReason.EOS, FinishReason.STOP_TOKEN)
        logprobs = [entry.logprob for entry in result.logprobs]
        return _response(job, prompt, result.token_ids, logprobs, stopped)


async def _next(stream: AsyncGenerator[Response]) -> Response:
    return await anext(stream)


def _response(
    job: Job,
    prompt: tuple[int, ...],
    answer: Sequence[int],
    logprobs: Sequence[float],
    finished: bool,
) -> Response:
    recipe = job.recipe
    return Response(
        key=job.key,
        source=job.prompt.source,
        prompt=prompt,
        answer=tuple(answer),
        logprobs=tuple(logprobs),
        temperature=recipe.temperature,
        top_k=recipe.top_k,
        top_p=recipe.top_p,
        seed=job.seed,
        finished=finished,
    )

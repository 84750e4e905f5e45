"""A sweep through a running pair: every prompt with every block size, timed by the verifier.

Knows the SDK. Does not know the replayed way, files or statistics. The drafter has to be started
with `--block-size` of the largest candidate, for a request can only ask for less.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass

from drafter_service.training.block_size_table import Run, prompt_of
from drafter_service.training.errors import TrainingError
from drafter_service.training.prompts import Job
from draftwire_client import AsyncClient
from draftwire_client.types import Result

_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class LiveJob:
    """One answer to be made with one block size; `prompt` are token ids."""

    job: Job
    prompt: tuple[int, ...]
    size: int


class LiveRuns:
    """Runs of the pair behind a verifier's address."""

    def __init__(
        self, address: str, *, parts: Sequence[str], max_nodes: int, max_tokens: int, sessions: int
    ) -> None:
        """`sessions` under way at a time: times of more than one depend on each other."""
        self._address, self._parts = address, tuple(parts)
        self._max_nodes, self._max_tokens, self._sessions = max_nodes, max_tokens, sessions

    def runs(self, jobs: Iterator[LiveJob]) -> Iterator[Run]:
        """The runs as they get ready. Raises what a call failed with, or TrainingError for a size
        that the pair never used.
        """
        with asyncio.Runner() as runner:
            stream = self._stream(jobs)
            try:
                while (run := runner.run(_next(stream))) is not None:
                    yield run
            finally:
                runner.run(stream.aclose())

    async def _stream(self, jobs: Iterator[LiveJob]) -> AsyncGenerator[Run]:
        running: set[asyncio.Task[Run]] = set()
        async with AsyncClient.connect(self._address) as client:
            try:
                while True:
                    while len(running) < self._sessions and (job := next(jobs, None)):
                        running.add(asyncio.create_task(self._one(client, job)))
                    if not running:
                        return
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        yield task.result()
            finally:
                for task in running:
                    task.cancel()

    async def _one(self, client: AsyncClient, live: LiveJob) -> Run:
        recipe = live.job.recipe
        result = await client.generate(
            live.prompt,
            temperature=recipe.temperature,
            top_k=recipe.top_k,
            top_p=recipe.top_p,
            seed=live.job.seed,
            max_tokens=self._max_tokens,
            speculation="fixed",
            max_block_size=live.size,
            max_nodes=self._max_nodes,
            draft_parts=self._parts or None,
            timeout=_TIMEOUT_S,
        )
        return live_run(live, result)


def live_run(live: LiveJob, result: Result) -> Run:
    """The run that an answer was. Raises TrainingError if its rounds were all of smaller blocks
    than asked for, or all plain.
    """
    stats, made = result.acceptance, result.usage.completion_tokens
    largest = max((count.block_size for count in stats.block_sizes if count.rounds), default=0)
    if stats.rounds >= 4 and largest < live.size:
        raise TrainingError(
            f"block size {live.size} was asked for and {largest} was the largest used: start the "
            f"drafter with --block-size {live.size} and the verifier with limits that allow it"
        )
    if made >= 8 and not stats.rounds:
        raise TrainingError("the verifier decoded plainly: it has no drafter that is ready")
    recipe = live.job.recipe
    return Run(
        key=live.job.key,
        prompt=prompt_of(live.job.key),
        source=live.job.prompt.source,
        temperature=recipe.temperature,
        top_k=recipe.top_k,
        top_p=recipe.top_p,
        seed=live.job.seed,
        size=live.size,
        tokens=max(made - 1, 0),
        # A plain round is a round too: it took a step of the target.
        rounds=stats.rounds + stats.plain_rounds,
        accepted=stats.accepted,
        drafted=stats.drafted,
        seconds=result.timing.decode_s,
    )


async def _next(stream: AsyncGenerator[Run]) -> Run | None:
    return await anext(stream, None)

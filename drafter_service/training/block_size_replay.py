"""Stored answers decoded again with each block size: the drafter's own engine, told what the target
said.

Under the `follow` rule the target's tokens do not depend on the drafter, so acceptance at every
size follows from one stored answer, exactly and without the target. The engine that serves makes
the proposals: same contexts, same noise, same trees. Knows the drafter's messages. Does not know
files, prompts or statistics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from drafter_service.engine import Engine, EngineSettings, LaneLimits
from drafter_service.messages import (
    Budget,
    DraftSampling,
    End,
    Features,
    Open,
    Outcome,
    Speculation,
)
from drafter_service.messages import Step as Said
from drafter_service.model import DraftModel
from drafter_service.training.block_size_table import Run, Step, prompt_of, visited
from drafter_service.training.errors import TrainingError
from drafter_service.training.features import Trajectory
from drafter_service.tree import Part, Tree

SHORTEST = 3  # answer tokens; a shorter answer has no round worth counting


@dataclass(frozen=True, slots=True)
class Drafting:
    """How trees are made: parts, and most nodes a round (a chain of one part has size - 1)."""

    parts: frozenset[Part]
    max_nodes: int


@dataclass(slots=True)
class _Course:
    """One answer under way with one size; `at` is the anchor's position."""

    trajectory: Trajectory
    size: int
    at: int
    tokens: list[int]
    steps: list[Step] = field(default_factory=list)


def kept(tree: Tree, truth: Sequence[int]) -> int:
    """How many nodes of `tree` the tokens `truth` follow from the anchor. The last token is left to
    the target, for nothing comes after it.
    """
    nodes = {
        (parent, token): node
        for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))
    }
    at, accepted = -1, 0
    for token in truth[:-1]:
        found = nodes.get((at, token))
        if found is None:
            break
        at, accepted = found, accepted + 1
    return accepted


class Replay:
    """Replays answers with a drafter whose target is attached."""

    def __init__(
        self,
        model: DraftModel,
        drafting: Drafting,
        sizes: Sequence[int],
        *,
        longest: int,
        max_tokens: int = 0,
        at_once: int = 32,
        every_position: bool = False,
    ) -> None:
        """`longest`: tokens of the longest sequence; `max_tokens` of each answer count (0: all).
        With `every_position` a draft is made at each position of an answer instead of where
        decoding would come by.
        """
        assert model.embedding is not None
        self._at_once, self._every, self._max_tokens = at_once, every_position, max_tokens
        room = longest + max(sizes) + 256
        self._engine = Engine(
            model,
            EngineSettings(
                block_size=max(sizes),
                max_nodes=drafting.max_nodes,
                parts=drafting.parts,
                cache_rows=at_once * room,
                max_sessions=at_once,
                max_context=model.config.max_position_embeddings,
                max_tokens=room,
                # A session is silent while others are read from disk; none may lose its rows.
                evict_idle_s=float("inf"),
            ),
        )
        limits = LaneLimits(embedding_rows=model.embedding.shape[0], raw_features=True)
        self._lane = self._engine.add_lane(limits, lambda result: None)
        self._sequence = 0
        self._courses: dict[int, _Course] = {}

    @torch.inference_mode()
    def runs(self, jobs: Iterator[tuple[Trajectory, int]]) -> Iterator[Run]:
        """A run for each (answer, size), as they get ready. Answers under `SHORTEST` tokens give
        none.
        """
        number = 0
        waiting = (job for job in jobs if len(job[0].response.answer) >= SHORTEST)
        more = True
        said = Said(0)
        while more or self._courses:
            while more and len(self._courses) < self._at_once:
                job = next(waiting, None)
                more = job is not None
                if job is not None:
                    number += 1
                    self._courses[number] = self._begin(*job)
                    self._open(number, said)
            if not self._courses:
                return
            proposed = self._step(said)
            said = Said(0)
            for number_of, tokens in proposed.items():
                run = self._take(number_of, tokens, said)
                if run is not None:
                    yield run

    def _begin(self, trajectory: Trajectory, size: int) -> _Course:
        first, tokens = trajectory.prompt_length, trajectory.tokens.tolist()
        if self._max_tokens:
            tokens = tokens[: first + self._max_tokens]
        return _Course(trajectory, size, first, tokens)

    def _step(self, said: Said) -> dict[int, tuple[int, int]]:
        """(accepted, drafted) of each session's proposal."""
        self._sequence += 1
        whole = Said(self._sequence, said.ends, said.opens, said.features, said.outcomes)
        ((_, result),) = self._engine.step([(self._lane, whole)])
        if result.faults:
            raise TrainingError(f"the drafter gave up on an answer: {result.faults[0].detail}")
        found = {}
        for proposal in result.proposals:
            course = self._courses[proposal.session_id]
            truth = course.tokens[course.at + 1 :]
            found[proposal.session_id] = (kept(proposal.tree, truth), len(proposal.tree.tokens))
        if found.keys() != self._courses.keys():
            raise TrainingError("the drafter did not propose for every answer")
        return found

    def _take(self, number: int, step: Step, said: Said) -> Run | None:
        """Count a round and tell the engine what was committed; the run, if that was the end."""
        course = self._courses[number]
        course.steps.append(step)
        previous, moved = course.at, 1 if self._every else step[0] + 1
        course.at = previous + moved
        tokens = course.tokens
        if course.at >= len(tokens) - 1:
            del self._courses[number]
            said.ends.append(End(number, 1))
            return self._run(course)
        said.outcomes.append(
            Outcome(
                number,
                1,
                course.at,
                previous,
                tokens[previous + 1 : course.at + 1],
                course.trajectory.features[previous : course.at],
                accepted=moved - 1,
                had_proposal=True,
            )
        )
        return None

    def _open(self, number: int, said: Said) -> None:
        course = self._courses[number]
        answer, first = course.trajectory.response, course.at
        said.opens.append(
            Open(
                number,
                1,
                first,
                course.tokens[: first + 1],
                first,
                DraftSampling(answer.temperature, answer.seed),
                Speculation(max_block_size=course.size),
                Budget(),
            )
        )
        said.features.append(Features(number, 1, 0, course.trajectory.features[:first]))

    def _run(self, course: _Course) -> Run:
        answer = course.trajectory.response
        steps = visited(course.steps) if self._every else tuple(course.steps)
        return Run(
            key=answer.key,
            prompt=prompt_of(answer.key),
            source=answer.source,
            temperature=answer.temperature,
            top_k=answer.top_k,
            top_p=answer.top_p,
            seed=answer.seed,
            size=course.size,
            tokens=sum(accepted + 1 for accepted, _ in steps),
            rounds=len(steps),
            accepted=sum(accepted for accepted, _ in steps),
            drafted=sum(drafted for _, drafted in steps),
            steps=steps,
            everywhere=tuple(course.steps) if self._every else (),
        )

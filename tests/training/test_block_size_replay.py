"""Sweeps of block sizes: replayed rounds, what is kept on disk, costs, and the running pair."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from drafter.peer import drafter as drafting_service
from fakes import eventually, running
from training import kit

from drafter_service import checkpoint
from drafter_service.checkpoint import Checkpoint
from drafter_service.training import block_size_costs as costs
from drafter_service.training.__main__ import main
from drafter_service.training.block_size_inputs import PromptReader
from drafter_service.training.block_size_live import LiveJob, live_run
from drafter_service.training.block_size_replay import Drafting, Replay, kept
from drafter_service.training.block_size_sweep import limited
from drafter_service.training.block_size_table import Run, SweepWriter, read_sweep, visited
from drafter_service.training.errors import TrainingError
from drafter_service.training.features import Trajectory, read_features
from drafter_service.training.prompts import Job, Prompt, Recipe
from drafter_service.training.store import StoreError
from drafter_service.training.target import Target
from drafter_service.tree import Part, Tree
from draftwire.config import ConfigError
from draftwire.v1 import verifier_pb2
from draftwire_client.enums import BlockSizeReason, FinishReason
from draftwire_client.types import Acceptance, BlockSizeCount, Result, Settings, Timing, Usage
from verifier_service.config import VerifierConfig
from verifier_service.service import VerifierService

SIZES = (3, 4, 6)
CHAIN = Drafting(frozenset({Part.ARGMAX}), 8)
TREES = Drafting(frozenset({Part.RANK_TREE, Part.NGRAM}), 8)


@pytest.fixture(scope="module")
def folder(tiny: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.write_random(
        tmp_path_factory.mktemp("drafter") / "tiny",
        tiny.host.model.config,
        seed=1,
        block_size=4,
        target_layer_ids=kit.LAYERS,
    )


@pytest.fixture(scope="module")
def found(tiny: Target, folder: Path) -> Checkpoint:
    loaded = checkpoint.load(str(folder), device=torch.device("cpu"), dtype=torch.float32)
    embedding = tiny.host.tensor("embed_tokens.weight")
    loaded.model.attach_target(embedding, None, vocab_size=tiny.vocab_size)
    return loaded


@pytest.fixture(scope="module")
def answers(tiny: Target, tmp_path_factory: pytest.TempPathFactory) -> list[Trajectory]:
    """Answers that go round in circles of four tokens, so that repetition is accepted at times."""
    made = []
    for one in kit.made_up(6):
        circle = [(one.tokens[at % 4] + at // 9) % 256 for at in range(len(one.tokens))]
        cut = len(one.prompt)
        made.append(replace(one, prompt=tuple(circle[:cut]), answer=tuple(circle[cut:])))
    folder = kit.write_features(tiny, tmp_path_factory.mktemp("circles"), made)
    return list(read_features(folder))


def runs(
    found: Checkpoint,
    answers: list[Trajectory],
    drafting: Drafting,
    sizes: tuple[int, ...] = SIZES,
    **changes: object,
) -> dict[tuple[str, int], Run]:
    longest = max(len(answer.tokens) for answer in answers)
    replay = Replay(found.model, drafting, sizes, longest=longest, **changes)  # type: ignore[arg-type]
    jobs = ((answer, size) for answer in answers for size in sizes)
    return {(run.key, run.size): run for run in replay.runs(jobs)}


def test_a_walk_follows_children_and_leaves_the_last_token_to_the_target() -> None:
    tree = Tree()
    first = tree.add(-1, 5, 0.0, Part.RANK_TREE)
    tree.add(-1, 6, 0.0, Part.RANK_TREE)
    second = tree.add(first, 7, 0.0, Part.RANK_TREE)
    tree.add(second, 8, 0.0, Part.RANK_TREE)
    assert kept(tree, [5, 7, 9, 9]) == 2
    assert kept(tree, [6, 7, 8]) == 1
    assert kept(tree, [5, 7, 8]) == 2
    assert kept(tree, [4, 7]) == 0
    assert kept(tree, [5]) == 0


@pytest.mark.parametrize("drafting", [CHAIN, TREES])
def test_rounds_cover_every_answer_once_at_every_size(
    found: Checkpoint, answers: list[Trajectory], drafting: Drafting
) -> None:
    by_job = runs(found, answers, drafting)
    assert len(by_job) == len(answers) * len(SIZES)
    for answer in answers:
        for size in SIZES:
            run = by_job[answer.response.key, size]
            assert run.tokens == len(answer.response.answer) - 1
            assert run.tokens == run.rounds + run.accepted
            assert run.drafted == sum(drafted for _, drafted in run.steps)
            assert all(accepted < size for accepted, _ in run.steps)


def test_a_chain_drafts_one_token_less_than_the_block_has_slots(
    found: Checkpoint, answers: list[Trajectory]
) -> None:
    for (_, size), run in runs(found, answers, CHAIN).items():
        assert {drafted for _, drafted in run.steps} == {size - 1}


@pytest.mark.parametrize("drafting", [CHAIN, TREES])
def test_drafting_everywhere_finds_the_rounds_that_decoding_takes(
    found: Checkpoint, answers: list[Trajectory], drafting: Drafting
) -> None:
    taken = runs(found, answers, drafting)
    everywhere = runs(found, answers, drafting, every_position=True)
    assert taken.keys() == everywhere.keys()
    for job, run in taken.items():
        other = everywhere[job]
        assert other.steps == run.steps
        assert len(other.everywhere) == run.tokens
        assert run.everywhere == ()
    assert drafting is CHAIN or any(run.accepted for run in taken.values())


def test_how_many_answers_run_side_by_side_changes_nothing(
    found: Checkpoint, answers: list[Trajectory]
) -> None:
    assert runs(found, answers, TREES, at_once=1) == runs(found, answers, TREES, at_once=7)


def test_only_the_first_tokens_of_an_answer_count_if_a_limit_is_set(
    found: Checkpoint, answers: list[Trajectory]
) -> None:
    for run in runs(found, answers, TREES, max_tokens=5).values():
        assert run.tokens == 4


def test_answers_too_short_for_a_round_give_none(
    found: Checkpoint, answers: list[Trajectory]
) -> None:
    answer = answers[0]
    cut = replace(answer, response=replace(answer.response, answer=answer.response.answer[:2]))
    replay = Replay(found.model, CHAIN, SIZES, longest=40)
    assert list(replay.runs(iter([(cut, 3)]))) == []


def test_visited_rounds_start_where_the_last_one_ended() -> None:
    assert visited([(2, 5), (9, 9), (9, 9), (0, 5), (1, 4), (9, 9)]) == ((2, 5), (0, 5), (1, 4))


def test_the_readers_row_is_the_one_that_answers_were_stored_with(
    tiny: Target, answers: list[Trajectory]
) -> None:
    reader = PromptReader(tiny.host.model, kit.LAYERS, tiny.vocab_size)
    for answer in answers[:2]:
        features, logits = reader.read(answer.response.prompt)
        at = answer.prompt_length - 1
        torch.testing.assert_close(features, answer.features[at].float(), atol=2e-2, rtol=2e-2)
        best = answer.top_ids[at][0]
        assert int(logits.argmax()) == int(best)
        assert logits.shape == (tiny.vocab_size,)


def sweep_words(folder: Path, features: Path, target: Path, out: Path, *more: str) -> list[str]:
    return [
        "block-size", "sweep", "--features", str(features), "--checkpoint", str(folder), "--out",
        str(out), "--target", str(target), "--reach", "2", "--max-nodes", "8", *more,
    ]  # fmt: skip


def test_a_sweep_that_was_killed_goes_on_where_it_was(
    folder: Path, made_features: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    words = sweep_words(folder, made_features, tiny_folder, tmp_path / "one", "--limit", "4")
    assert main(words) == 0
    whole = read_sweep(tmp_path / "one")
    assert whole.candidates == (2, 3, 4, 5, 6)
    assert len(whole.runs) == 4 * 5
    path = tmp_path / "one" / "runs.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:7]) + lines[7][:20])
    assert main(words) == 0
    assert set(read_sweep(tmp_path / "one").runs) == set(whole.runs)
    assert whole.inputs(whole.runs[0].prompt, "context").shape == (48,)


def test_a_folder_made_with_other_settings_is_not_continued(
    folder: Path,
    made_features: Path,
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "one"
    words = sweep_words(folder, made_features, tiny_folder, out, "--limit", "1")
    assert main(words) == 0
    assert main([*words, "--parts", "argmax"]) == 1
    assert "made with another parts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--candidates", "1"], "--candidates"),
        (["--candidates", "4"], "--candidates"),
        (["--parts", "guess"], "--parts"),
        (["--inputs", "hidden"], "--inputs"),
        (["--verifier", "localhost:1"], "--features"),
        (["--temperatures", "cold"], "--temperatures"),
    ],
)
def test_settings_that_cannot_be_used_are_named(
    folder: Path,
    made_features: Path,
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    named: str,
) -> None:
    words = sweep_words(folder, made_features, tiny_folder, tmp_path / "one", *more)
    assert main(words) == 2
    assert named in capsys.readouterr().err


def test_answers_of_a_prompt_stay_together_and_each_source_has_its_share(
    answers: list[Trajectory],
) -> None:
    def named(answer: Trajectory, key: str, source: str) -> Trajectory:
        return replace(answer, response=replace(answer.response, key=key, source=source))

    many = [named(answers[0], f"{p}|t1|{s}", p[0]) for s in (1, 2) for p in ("a1", "a2", "b1")]
    few = limited(many, 1)
    assert sorted(a.response.key for a in few if a.response.source == "b") == ["b1|t1|1", "b1|t1|2"]
    assert len({a.response.key.split("|")[0] for a in few if a.response.source == "a"}) == 1
    order = [a.response.key.split("|")[0] for a in limited(many, 0)]
    assert order == sorted(order, key=order.index)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    SweepWriter(tmp_path, {"candidates": [2, 3]}).close()
    (tmp_path / "runs.jsonl").write_text('{"key": 1}\n')
    with pytest.raises(StoreError, match=r"runs\.jsonl: line 1 is damaged"):
        read_sweep(tmp_path)


def a_run(size: int, steps: tuple[tuple[int, int], ...], seconds: float | None = None) -> Run:
    accepted = sum(one for one, _ in steps)
    return Run(
        "p|t1|1", "p", "s", 1.0, 0, 1.0, 1, size, accepted + len(steps), len(steps), accepted,
        sum(drafted for _, drafted in steps), seconds, steps,
    )  # fmt: skip


def test_a_runs_cost_is_the_sum_of_its_rounds_and_costs_run_straight_between_points() -> None:
    table = costs.CostTable({4: 2.0, 8: 4.0}, {1: 10.0, 9: 18.0, 17: 34.0}, 0.5)
    assert table.round(6, 4) == pytest.approx(3.0 + 14.0 + 0.5)
    assert table.round(8, 16) == pytest.approx(4.0 + 34.0 + 0.5)
    assert table.verify(25) == pytest.approx(50.0)  # the last slope goes on
    assert table.round(2, 0) == pytest.approx(2.0 + 10.0 + 0.5)  # the first figure holds below
    run = a_run(6, ((2, 4), (0, 4)))
    assert table.run(run) == pytest.approx(35.0)
    assert table.per_token(run) == pytest.approx(35.0 / 4)
    assert table.per_token(a_run(6, ((2, 4),), seconds=0.3)) == pytest.approx(100.0)


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"draft_ms": {}, "verify_ms": {"1": 1}}', "no",
                '{"draft_ms": {"8": -1}, "verify_ms": {"1": 1}}']
)  # fmt: skip
def test_a_table_that_says_too_little_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="--costs"):
        costs.read_costs(path)


def test_costs_are_measured_and_read_back(folder: Path, tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "costs.json"
    words = [
        "block-size", "costs", "--checkpoint", str(folder), "--out", str(out), "--target",
        str(tiny_folder), "--sizes", "2,6", "--rows", "1,4", "--context", "40", "--repeats", "2",
    ]  # fmt: skip
    assert main(words) == 0
    table = costs.read_costs(out)
    assert sorted(table.draft_ms) == [2, 6]
    assert sorted(table.verify_ms) == [1, 4]
    assert all(ms > 0 for ms in (*table.draft_ms.values(), *table.verify_ms.values()))
    assert str(tmp_path) not in out.read_text()


def result(rounds: int, made: int, largest: int) -> Result:
    counted = (BlockSizeCount(largest, BlockSizeReason.FIXED, rounds),)
    return Result(
        "", (), (), FinishReason.MAX_TOKENS, "", Usage(4, made, 0),
        Acceptance(rounds=rounds, drafted=3 * rounds, accepted=rounds, block_sizes=counted),
        Timing(decode_s=0.5), Settings("r", 4),
    )  # fmt: skip


def test_a_pair_that_never_used_the_size_is_found_out() -> None:
    job = Job("p|t1|1", Prompt("p", "s", "text"), Recipe(1, 1.0), 1)
    live = LiveJob(job, (1, 2), 8)
    run = live_run(live, result(5, 11, 8))
    assert (run.tokens, run.rounds, run.accepted, run.seconds) == (10, 5, 5, 0.5)
    with pytest.raises(TrainingError, match="block size 8 was asked for and 6 was the largest"):
        live_run(live, result(5, 11, 6))
    with pytest.raises(TrainingError, match="no drafter that is ready"):
        live_run(live, result(0, 11, 1))


@pytest.fixture
def pair(tiny_folder: Path, folder: Path) -> Iterator[str]:
    """The address of a running pair, in a thread of its own, whose drafter has blocks of 6."""
    address: queue.SimpleQueue[str] = queue.SimpleQueue()
    stops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        stop = asyncio.Event()
        stops.append((asyncio.get_running_loop(), stop))
        async with drafting_service(folder, block_size=6) as (_, at):
            config = VerifierConfig(
                listen="127.0.0.1:0",
                model=str(tiny_folder),
                dtype="float32",
                drafters=(at,),
                kv_tokens=4096,
                draft_wait_ms=20000,
                drain_grace_s=0.5,
                log_level="error",
            )
            service = VerifierService(config)
            async with running(service, config) as mine:
                await eventually(partial(lane_is_ready, service))
                address.put(mine)
                await stop.wait()

    async def lane_is_ready(service: VerifierService) -> bool:
        lanes = (await service.describe()).lanes
        return any(lane.state == verifier_pb2.LANE_STATE_READY for lane in lanes)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield address.get(timeout=120)
    finally:
        for loop, stop in stops:
            loop.call_soon_threadsafe(stop.set)
        thread.join()


def test_a_running_pair_is_swept_with_measured_times(
    pair: str, folder: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "asked.jsonl"
    prompts.write_text(
        "".join(json.dumps({"id": f"q{n}", "turns": [f"question {n}"]}) + "\n" for n in range(2))
    )
    words = [
        "block-size", "sweep", "--verifier", pair, "--prompts", str(prompts), "--recipes", "1:1",
        "--seeds", "2", "--max-tokens", "12", "--checkpoint", str(folder), "--target",
        str(tiny_folder), "--out", str(tmp_path / "live"), "--candidates", "4,6", "--max-nodes",
        "8", "--inputs", "context,logits",
    ]  # fmt: skip
    assert main(words) == 0
    swept = read_sweep(tmp_path / "live")
    assert {(run.prompt, run.size) for run in swept.runs} == {
        (f"q{n}", size) for n in range(2) for size in (4, 6)
    }
    assert len(swept.runs) == 2 * 2 * 2
    for run in swept.runs:
        assert run.seconds is not None
        assert run.seconds > 0
        assert run.rounds > 0
        assert costs.measured_only(run) == pytest.approx(1000 * run.seconds / run.tokens)
    assert swept.inputs("q0", "logits").exp().sum() == pytest.approx(1.0, abs=1e-2)

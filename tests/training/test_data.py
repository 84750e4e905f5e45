"""Prompts, answers on disk, and a data job that is killed and started again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import running
from training import kit

from drafter_service.training.__main__ import main
from drafter_service.training.answers import EngineAnswers, VerifierAnswers
from drafter_service.training.prompts import Job, collect, parse_recipe, plan, plan_all
from drafter_service.training.store import (
    DataStore,
    Response,
    StoreError,
    read_responses,
    read_target,
)
from drafter_service.training.target import Target
from draftwire.config import ConfigError
from draftwire_kernels import sampling as sampling_module
from draftwire_kernels.walk import target_logprobs
from verifier_service.config import VerifierConfig
from verifier_service.service import VerifierService

TARGET = {"name": "t", "weights_sha256": "0"}


def write_prompts(path: Path, texts: list[str]) -> Path:
    rows = [{"id": f"{path.stem}/{i}", "turns": [text]} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_each_text_is_asked_once_and_none_that_is_excluded(tmp_path: Path) -> None:
    first = write_prompts(tmp_path / "a.jsonl", ["One", "two", "three"])
    second = write_prompts(tmp_path / "b.jsonl", ["one ", "four", "Two"])
    tests = write_prompts(tmp_path / "tests.jsonl", ["THREE"])
    found = collect([str(first), str(second)], seed=1, exclude=[tests])
    assert sorted(p.text for p in found) == ["One", "four", "two"]
    assert found == collect([str(first), str(second)], seed=1, exclude=[tests])


def test_a_file_may_give_some_of_its_prompts_drawn_by_the_seed(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "a.jsonl", [str(i) for i in range(50)])
    one, two = collect([f"{path}=7"], seed=1), collect([f"{path}=7"], seed=2)
    assert len(one) == len(two) == 7
    assert {p.key for p in one} != {p.key for p in two}


@pytest.mark.parametrize("line", ["{}", "[]", "no json", '{"id": 1, "turns": []}'])
def test_a_bad_prompt_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"p\.jsonl line 1"):
        collect([str(path)], seed=0)


def test_recipes_are_shared_out_and_do_not_move_when_prompts_are_added(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "a.jsonl", [f"question {i}" for i in range(400)])
    recipes = [parse_recipe("0.25:0"), parse_recipe("0.75:0.7:20:0.8")]
    prompts = collect([str(path)], seed=1)
    jobs = plan(prompts, recipes, seed=1)
    greedy = sum(job.recipe.temperature == 0 for job in jobs)
    assert 70 < greedy < 130
    assert {j.key for j in plan(prompts[:100], recipes, seed=1)} < {j.key for j in jobs}
    assert len(plan_all(prompts[:3], recipes, seed=1)) == 6


@pytest.mark.parametrize("text", ["1", "x:0", "0:1", "1:-1", "1:1:0:2", "1:1:1:1:1"])
def test_a_recipe_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--recipes"):
        parse_recipe(text)


def test_answers_come_back_from_shards_and_journal_as_they_went_in(tmp_path: Path) -> None:
    answers = kit.made_up(7)
    store = DataStore(tmp_path / "d", TARGET, shard_size=3)
    for answer in answers:
        assert store.add(answer)
        assert not store.add(answer)
    store.close()
    back = list(read_responses(tmp_path / "d"))
    assert [r.key for r in back] == [r.key for r in answers]
    for got, want in zip(back, answers, strict=True):
        assert replace(got, logprobs=()) == replace(want, logprobs=())
        assert got.logprobs == pytest.approx(want.logprobs)
    assert read_target(tmp_path / "d") == TARGET
    assert len(list((tmp_path / "d").glob("shard-*.safetensors"))) == 2


@pytest.mark.parametrize("cut", [1, 25, 200])
def test_a_journal_cut_off_in_a_line_loses_that_line_only(tmp_path: Path, cut: int) -> None:
    answers = kit.made_up(3)
    store = DataStore(tmp_path, TARGET)
    for answer in answers:
        store.add(answer)
    store.close()
    journal = tmp_path / "open.jsonl"
    journal.write_bytes(journal.read_bytes()[:-cut])
    store = DataStore(tmp_path, TARGET)
    assert store.keys == {r.key for r in answers[:2]}
    assert store.add(answers[2])
    store.close()
    assert [r.key for r in read_responses(tmp_path)] == [r.key for r in answers]


def test_killed_between_shard_and_journal_an_answer_is_kept_once(tmp_path: Path) -> None:
    answers = kit.made_up(3)
    store = DataStore(tmp_path, TARGET, shard_size=3)
    store.add(answers[0])
    store.add(answers[1])
    before = (tmp_path / "open.jsonl").read_bytes()
    store.add(answers[2])
    store.close()
    (tmp_path / "open.jsonl").write_bytes(before)
    assert [r.key for r in read_responses(tmp_path)] == [r.key for r in answers]
    again = DataStore(tmp_path, TARGET)
    assert again.answer_tokens == sum(len(r.answer) for r in answers)
    again.close()


def test_a_damaged_shard_and_another_targets_folder_are_refused(tmp_path: Path) -> None:
    store = DataStore(tmp_path, TARGET, shard_size=1)
    store.add(kit.made_up(1)[0])
    store.close()
    with pytest.raises(StoreError, match="another target"):
        DataStore(tmp_path, {"name": "other"})
    (tmp_path / "shard-00000.safetensors").write_bytes(b"not a shard")
    with pytest.raises(StoreError, match="shard-00000"):
        list(read_responses(tmp_path))


@pytest.fixture(scope="module")
def engine_jobs(tmp_path_factory: pytest.TempPathFactory) -> list[Job]:
    path = write_prompts(
        tmp_path_factory.mktemp("p") / "p.jsonl", [f"number {i * 17}" for i in range(12)]
    )
    recipes = [parse_recipe(text) for text in ("1:0", "1:0.8:20:0.9", "1:1")]
    return plan(collect([str(path)], seed=3), recipes, seed=3)


def test_the_engine_answers_every_job_with_its_log_probabilities(
    tiny: Target, engine_jobs: list[Job]
) -> None:
    maker = EngineAnswers(tiny, sessions=4, max_tokens=9, max_prompt=64)
    answers = {r.key: r for r in maker.answer(engine_jobs)}
    assert set(answers) == {job.key for job in engine_jobs}
    for job in engine_jobs:
        answer = answers[job.key]
        assert answer.prompt == tiny.encode(job.prompt)
        assert len(answer.answer) == 9 or answer.finished
        assert len(answer.logprobs) == len(answer.answer)
        check_logprobs(tiny, answer)


def test_a_running_verifier_gives_the_same_answers_as_the_engine_here(
    tiny: Target, tiny_folder: Path, engine_jobs: list[Job]
) -> None:
    config = VerifierConfig(
        listen="127.0.0.1:0",
        model=str(tiny_folder),
        dtype="float32",
        kv_tokens=4096,
        drain_grace_s=0.5,
        log_level="error",
    )

    async def ask() -> dict[str, Response]:
        async with running(VerifierService(config), config) as address:
            remote = VerifierAnswers(address, tiny, sessions=3, max_tokens=9, max_prompt=64)
            return await asyncio.to_thread(lambda: {r.key: r for r in remote.answer(engine_jobs)})

    got = asyncio.run(ask())
    here = EngineAnswers(tiny, sessions=4, max_tokens=9, max_prompt=64)
    want = {r.key: r for r in here.answer(engine_jobs)}
    assert got.keys() == want.keys()
    for key in want:
        assert got[key].answer == want[key].answer
        assert got[key].finished == want[key].finished
        assert got[key].logprobs == pytest.approx(want[key].logprobs, abs=1e-3)


def check_logprobs(tiny: Target, answer: Response) -> None:
    """Against a plain forward pass of the target and the reference distribution."""
    import torch

    settings = sampling_module.Sampling(
        temperature=answer.temperature,
        top_k=answer.top_k,
        top_p=answer.top_p,
        seed=answer.seed,
    )
    if answer.temperature == 0:
        settings = sampling_module.Sampling()
    with torch.inference_mode():
        tiny.host.model.set_attn_implementation("sdpa")  # type: ignore[operator]
        ids = torch.tensor([answer.tokens])
        logits = tiny.host.model(ids, use_cache=False).logits[0]
        tiny.host.model.set_attn_implementation("draftwire_paged")  # type: ignore[operator]
    first = len(answer.prompt)
    for offset, (token, logprob) in enumerate(zip(answer.answer, answer.logprobs, strict=True)):
        row = target_logprobs(
            logits[first + offset - 1, : tiny.vocab_size], settings, position=first + offset
        )
        assert logprob == pytest.approx(float(row[token]), abs=5e-3)


def test_a_data_job_killed_half_way_goes_on_where_it_was(tiny_folder: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [f"prompt {i}" for i in range(12)])
    words = [
        "generate", "--out", str(tmp_path / "d"), "--prompts", str(prompts),
        "--target", str(tiny_folder), "--sessions", "2", "--max-tokens", "30",
        "--shard-size", "2", "--threads", "1", "--numerics", "fast",
    ]  # fmt: skip
    job = subprocess.Popen(
        [sys.executable, "-m", "drafter_service.training", *words],
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    first_shard = tmp_path / "d" / "shard-00000.safetensors"
    while not first_shard.exists():
        assert job.poll() is None, "the job ended before its first shard"
    job.send_signal(signal.SIGKILL)
    job.wait()
    kept = {r.key: r for r in read_responses(tmp_path / "d")}
    assert 2 <= len(kept) < 12
    assert main(words) == 0
    everything = {r.key: r for r in read_responses(tmp_path / "d")}
    assert len(everything) == 12
    for key, answer in kept.items():
        assert everything[key] == answer
    fresh = [*words]
    fresh[2] = str(tmp_path / "fresh")
    assert main(fresh) == 0
    assert {r.key: r.answer for r in read_responses(tmp_path / "fresh")} == {
        key: r.answer for key, r in everything.items()
    }

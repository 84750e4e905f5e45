"""The training loop: resuming, learning, and checkpoints that serve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from training import kit

from drafter_service import checkpoint
from drafter_service.training.__main__ import main
from drafter_service.training.blocks import collate
from drafter_service.training.export import ExportConfig, export
from drafter_service.training.features import read_features
from drafter_service.training.network import BlockNetwork
from drafter_service.training.order import Order, held_out
from drafter_service.training.run_config import TrainConfig
from drafter_service.training.schedule import learning_rate
from drafter_service.training.target import Target
from drafter_service.training.train import train
from draftwire.config import ConfigError


class Killed(Exception):
    """What a test stops a run with."""


def silent(_line: str) -> None:
    return None


def die_at(step: int, said: Sequence[str] = ()) -> object:
    def say(line: str) -> None:
        if line.startswith(f"step {step}/"):
            raise Killed

    return say


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state = torch.load(folder / "state.pt", weights_only=True)
    found: dict[str, torch.Tensor] = state["model"]
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"branches": 3, "objective": "al", "anchors": 4},
        {"vocabulary": 60, "extra_tokens": 10, "accumulate": 2, "weights": "decay"},
        {
            "vocabulary": 30,
            "local_top": 4,
            "average": 0.9,
            "schedule": "level",
            "short_block": 3,
            "short_share": 0.5,
        },
    ],
    ids=["kl", "branches with AL", "cut vocabulary and accumulation", "short blocks and a mean"],
)
def test_a_run_that_was_killed_and_resumed_equals_one_that_was_not(
    made_features: Path, tiny_folder: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    settings = {"steps": 14, "save_every": 4, **changes}
    whole = kit.run_config(made_features, tiny_folder, tmp_path / "whole", **settings)
    train(whole, silent)
    parts = kit.run_config(made_features, tiny_folder, tmp_path / "parts", **settings)
    with pytest.raises(Killed):
        train(parts, die_at(10))  # type: ignore[arg-type]
    train(parts, silent)
    left, right = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name
    whole_last, parts_last = (
        checkpoint.load(str(tmp_path / name / "last"), device=torch.device("cpu")).model
        for name in ("whole", "parts")
    )
    for name, tensor in whole_last.state_dict().items():
        assert torch.equal(tensor, parts_last.state_dict()[name]), name


def test_other_seeds_train_other_weights(
    made_features: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    for seed in (0, 1):
        config = kit.run_config(
            made_features, tiny_folder, tmp_path / str(seed), seed=seed, steps=2
        )
        train(config, silent)
    left, right = weights(tmp_path / "0"), weights(tmp_path / "1")
    assert any(not torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def counting(tiny: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Features of sequences that count on: something that can be learned in seconds."""
    answers = kit.made_up(48, counting=True)
    return kit.write_features(tiny, tmp_path_factory.mktemp("counting"), answers)


@pytest.fixture(scope="module")
def trained(counting: Path, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run")
    torch.set_num_threads(1)
    config = kit.run_config(
        counting, tiny_folder, run, objective="label", steps=120, batch=8, lr=5e-3,
        validate_every=40,
    )  # fmt: skip
    train(config, silent)
    return run


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_short_run_shows_a_falling_loss_and_a_rising_acceptance_length(trained: Path) -> None:
    rows = metrics(trained)
    loss = [row["loss"] for row in rows if "loss" in row]
    lengths = [row["acceptance_length"] for row in rows if "acceptance_length" in row]
    assert sum(loss[-20:]) < 0.6 * sum(loss[:20])
    assert lengths[-1] > lengths[0] + 1.0


def test_an_exported_checkpoint_drafts_what_was_trained(trained: Path, tmp_path: Path) -> None:
    export(ExportConfig(run=trained, out=tmp_path / "out", which="last", dtype="float32"), silent)
    found = checkpoint.load(str(tmp_path / "out"), device=torch.device("cpu"))
    state = weights(trained)
    assert found.config.trained
    assert len(found.config.vocabulary_sha256) == 64
    assert found.config.target_layer_ids == kit.LAYERS
    for name, tensor in found.model.state_dict().items():
        # The run's own checkpoints are bfloat16, as published ones are.
        assert torch.equal(tensor, state[name].bfloat16().float()), name
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    for name in ("architectures", "block_size", "dflash_config", "num_target_layers"):
        assert name in raw


DOCUMENTED = (
    "architectures", "model_type", "auto_map", "block_size", "num_target_layers", "dflash_config",
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling",
    "max_position_embeddings", "vocab_size", "attention_bias", "layer_types", "sliding_window",
    "tie_word_embeddings", "dtype",
)  # fmt: skip


def test_the_documented_fields_alone_load_to_the_same_logits(
    trained: Path, counting: Path, tiny: Target, tmp_path: Path
) -> None:
    export(ExportConfig(run=trained, out=tmp_path / "out", which="last"), silent)
    file = tmp_path / "out" / "config.json"
    raw = json.loads(file.read_text())
    public = tmp_path / "public"
    public.mkdir()
    (public / "config.json").write_text(json.dumps({name: raw[name] for name in DOCUMENTED}))
    (public / "model.safetensors").write_bytes((tmp_path / "out/model.safetensors").read_bytes())
    some = list(read_features(counting))[:3]
    batch = collate(some, [[t.prompt_length, t.prompt_length + 3] for t in some], 4)
    logits = []
    for folder in (tmp_path / "out", public):
        found = checkpoint.load(str(folder), device=torch.device("cpu"), dtype=torch.float32)
        embedding = tiny.host.model.get_input_embeddings().weight.detach()
        found.model.attach_target(embedding, None, vocab_size=tiny.vocab_size)
        with torch.no_grad():
            logits.append(found.model.logits(BlockNetwork(found.model, embedding)(batch)))
    assert torch.equal(*logits)


def test_an_export_over_the_size_limit_is_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--max-mib"):
        export(ExportConfig(run=trained, out=tmp_path / "out", max_mib=0.001), silent)
    assert not (tmp_path / "out").exists()


def test_branches_start_from_a_trained_base_and_train_on(
    trained: Path, counting: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    config = kit.run_config(
        counting, tiny_folder, tmp_path, base=str(trained / "last"), branches=2, objective="al",
        steps=10, lr=1e-4,
    )  # fmt: skip
    train(config, silent)
    first = next(row for row in metrics(tmp_path) if "acceptance_length" in row)
    base = [r["acceptance_length"] for r in metrics(trained) if "acceptance_length" in r][-1]
    # The branches' offsets start small, so the first validation is near the base's last.
    assert first["acceptance_length"] > 1 + 0.5 * (base - 1)
    assert checkpoint.load(str(tmp_path / "last"), device=torch.device("cpu")).config.branches == 2


def test_early_stopping_ends_a_run_that_does_not_gain(
    made_features: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    config = kit.run_config(
        made_features, tiny_folder, tmp_path, steps=40, lr=0.0, validate_every=2, patience=2
    )
    assert train(config, silent).step == 4


def test_features_of_another_target_or_other_layers_are_refused(
    made_features: Path, tiny: Target, tiny_folder: Path, tmp_path: Path
) -> None:
    manifest = made_features / "manifest.json"
    other = tmp_path / "other"
    other.mkdir()
    content = json.loads(manifest.read_text())
    content["target"] = content["target"] | {"weights_sha256": "1"}
    (other / "manifest.json").write_text(json.dumps(content))
    config = kit.run_config(other, tiny_folder, tmp_path / "run")
    with pytest.raises(ConfigError, match="--target"):
        train(config, silent)


def test_every_sequence_comes_once_an_epoch_and_epochs_differ() -> None:
    lengths = [5 + i % 7 for i in range(23)]
    order = Order(lengths, 4, seed=1)
    assert order.per_epoch == 6
    epochs = [[order.micro_batch(e * 6 + i) for i in range(6)] for e in range(2)]
    for number, epoch in enumerate(epochs):
        assert {e for e, _ in epoch} == {number}
        seen = [i for _, members in epoch for i in members]
        assert set(seen) == set(range(23))
        assert len(seen) == 24
    assert epochs[0] != [(0, members) for _, members in epochs[1]]


def test_ranks_share_an_epoch_without_overlap() -> None:
    orders = [Order([9] * 32, 4, seed=1, rank=rank, world=2) for rank in range(2)]
    seen = [i for o in orders for n in range(o.per_epoch) for i in o.micro_batch(n)[1]]
    assert sorted(seen) == list(range(32))


def test_a_prompt_stays_on_its_side_when_data_is_added() -> None:
    keys = [f"p/{i}|t0|1" for i in range(300)]
    training, held = held_out(keys, 0.1, 7)
    more_training, more_held = held_out([*keys, *(f"q/{i}|t0|1" for i in range(300))], 0.1, 7)
    assert set(held) <= set(more_held)
    assert set(training) <= set(more_training)
    assert 10 < len(held) < 60


def test_the_rate_rises_linearly_and_falls_to_nothing() -> None:
    rates = [learning_rate(step, 100, 1.0, 0.1) for step in range(101)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.5)
    assert rates[100] == pytest.approx(0.0, abs=1e-9)


# What torchrun does, without its rendezvous server, which may come up too late on a busy machine.
JOIN = """
import sys, torch.distributed as dist
from drafter_service.training.__main__ import main
dist.init_process_group(
    "gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2
)
sys.exit(main(sys.argv[3:]))
"""


def test_a_level_rate_stays_and_then_falls_in_a_line() -> None:
    rates = [learning_rate(step, 100, 1.0, 0.1, fall=0.2) for step in range(101)]
    assert rates[9:81] == pytest.approx([1.0] * 72)
    assert rates[90] == pytest.approx(0.5)
    assert rates[100] == 0.0


def test_the_checkpoint_of_a_run_with_a_mean_is_the_mean_of_its_steps(
    made_features: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    config = kit.run_config(
        made_features, tiny_folder, tmp_path, average=0.99, steps=10, save_every=1
    )
    train(config, silent)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    model = checkpoint.load(str(tmp_path / "last"), device=torch.device("cpu")).model
    names = [name for name, _ in model.named_parameters()]
    for name, mean in zip(names, state["average"], strict=True):
        assert torch.equal(model.get_parameter(name).data, mean.bfloat16()), name
    assert any(
        not torch.equal(mean, state["model"][name])
        for name, mean in zip(names, state["average"], strict=True)
    )


@pytest.mark.slow
def test_two_processes_train_what_one_trains_with_two_micro_batches(
    made_features: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    count = len(list(read_features(made_features)))
    assert count % 8 == 0
    config = kit.run_config(
        made_features, tiny_folder, tmp_path / "one", accumulate=2, steps=6, validation=0.0
    )
    train(config, silent)
    words = [
        "train", "--features", str(made_features), "--target", str(tiny_folder),
        "--out", str(tmp_path / "two"), "--layers", "2", "--block-size", "4", "--anchors", "6",
        "--batch", "4", "--steps", "6", "--lr", "2e-3", "--validation", "0", "--threads", "1",
    ]  # fmt: skip
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    store = str(tmp_path / "store")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN, store, str(rank), *words],
            cwd=Path(__file__).parents[2],
            env=env,
        )
        for rank in range(2)
    ]
    try:
        # The second one ends with the first: neither can go on alone.
        assert [process.wait() for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=1e-4, rtol=1e-3)


def test_the_command_names_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--features", "x", "--out", "y", "--lr", "-1"]) == 2
    assert "--lr" in capsys.readouterr().err
    assert main(["nonsense"]) == 2
    assert main(["train", "--features", "/not/there", "--out", str(tmp_path)]) == 1
    assert "/not/there/manifest.json" in capsys.readouterr().err
    assert main(["--help"]) == 0
    with pytest.raises(ConfigError, match="--prompt-anchors"):
        TrainConfig(features=("x",), out=Path("y"), objective="al", prompt_anchors=True).check()

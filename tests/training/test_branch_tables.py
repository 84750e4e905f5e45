"""One run of the branch comparison with its backbone, as `tests/bench/dblast_tables.py` does it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
import torch
from training import kit

from drafter_service import checkpoint
from drafter_service.training.features import Trajectory
from drafter_service.training.network import BlockNetwork
from drafter_service.training.target import Target
from drafter_service.training.vocabulary import Vocabulary, most_used

BENCH = Path(__file__).parents[1] / "bench"


@pytest.mark.parametrize("loss", ["NLL", "D-PACE", "AL"])
@pytest.mark.parametrize("branches", [1, 4])
def test_expander_prior_and_backbone_learn_together(
    tiny: Target, trajectories: list[Trajectory], tmp_path: Path, loss: str, branches: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCH)])
    import dblast_joint as joint

    made = checkpoint.write_random(
        tmp_path / "drafter", tiny.host.model.config, seed=1, block_size=4,
        target_layer_ids=kit.LAYERS,
    )  # fmt: skip
    embedding = tiny.host.tensor("embed_tokens.weight").float()
    vocabulary = Vocabulary(most_used(trajectories, tiny.vocab_size, 128), tiny.vocab_size, 64)
    losses: dict[int, float] = {}
    for steps in (1, 40):
        drafter = checkpoint.load(str(made), device=torch.device("cpu"), dtype=torch.float32)
        drafter.model.attach_target(embedding, None, vocab_size=tiny.vocab_size)
        network = BlockNetwork(drafter.model, embedding)
        before = {k: v.clone() for k, v in network.model.state_dict().items()}
        args = argparse.Namespace(steps=steps, blocks=32, lr=5e-3, backbone_lr=2e-3)
        run = joint.Run(branches, loss, 0)
        seen: list[float] = []
        whole = joint.mixture_loss

        def kept(*given: object, whole: object = whole, seen: list[float] = seen) -> torch.Tensor:
            total: torch.Tensor = whole(*given)  # type: ignore[operator]
            seen.append(float(total.detach()))
            return total

        monkeypatch.setattr(joint, "mixture_loss", kept)
        model = joint.train(
            run, network, trajectories, embedding[: tiny.vocab_size], vocabulary, args
        )
        monkeypatch.setattr(joint, "mixture_loss", whole)
        losses[steps] = sum(seen[-5:]) / len(seen[-5:])
        moved = [k for k, v in network.model.state_dict().items() if not torch.equal(v, before[k])]
        assert any(name.startswith("layers.") for name in moved), "the backbone is trained"
        assert model.branches == branches
        assert not any(p.requires_grad for p in network.model.parameters())
    assert losses[40] < losses[1]

"""One run of the branch comparison: the expander, its loss, and training it with its backbone.

Knows the mixture's losses, the order of blocks and rates. Does not know files, evaluation or which
runs there are.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from drafter_service.training import losses
from drafter_service.training.blocks import NO_LABEL, collate, draw_anchors
from drafter_service.training.features import Trajectory
from drafter_service.training.network import BlockNetwork
from drafter_service.training.order import Order
from drafter_service.training.vocabulary import Vocabulary

DOCUMENTS = 8  # answers of a step, when the backbone is trained


@dataclass(frozen=True)
class Run:
    """One training run."""

    branches: int
    loss: str
    seed: int

    @property
    def cell(self) -> str:
        """Branches and loss."""
        return f"k{self.branches}-{self.loss.lower()}"

    @property
    def name(self) -> str:
        """The cell and the seed."""
        return f"{self.cell}-{self.seed}"


class Expander(nn.Module):
    """What is trained on top of the backbone."""

    def __init__(self, size: int, branches: int, seed: int) -> None:
        super().__init__()
        self.branches = branches
        self.offsets = nn.Linear(size, branches * size, bias=False)
        self.prior = nn.Linear(size, branches, bias=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            # Not zero: branches that are alike get like gradients and never part.
            self.offsets.weight.normal_(0.0, 0.005, generator=generator)
            self.prior.weight.zero_()

    def expand(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, branches, hidden]."""
        offsets = self.offsets(rows).view(rows.shape[0], self.branches, -1)
        out: torch.Tensor = rows[:, None] + offsets
        return out


def learning_rate(highest: float, step: int, steps: int) -> float:
    """A tenth of the steps to rise, then down to 0 in a line."""
    return highest * min(1.0, (step + 1) / max(1, steps // 10)) * (1 - step / steps)


def mixture_loss(
    run: Run,
    model: Expander,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    chances: torch.Tensor,
    head: torch.Tensor,
    vocabulary: Vocabulary,
    draw: int,
) -> torch.Tensor:
    """Sum over blocks. hidden float32 [blocks, size, hidden]; labels and chances (log, of the label
    under the sampling) [blocks, size - 1]; head [vocabulary, hidden]; `draw`: which other tokens
    stand for the rest in this step.
    """
    mask = labels != NO_LABEL
    columns = vocabulary.cut(draw, labels.reshape(-1))
    logits = F.linear(model.expand(hidden[:, 1:][mask]), head[columns.ids])
    assert columns.shift is not None
    logprobs = torch.log_softmax(logits + columns.shift, dim=-1)
    wanted = columns.columns(labels[mask])[:, None, None].expand(-1, run.branches, 1)
    table = torch.zeros(*labels.shape, run.branches)
    table[mask] = logprobs.gather(2, wanted)[:, :, 0]
    prior = torch.log_softmax(model.prior(hidden[:, 0]), dim=-1)
    mixture = losses.Mixture(prior, table.transpose(1, 2), mask)
    said = mixture.conditionals()
    if run.loss == "AL":
        return losses.accepted_length_loss(said, chances, mask)
    if run.loss == "D-PACE":
        return mixture.nll(losses.dpace_weights(said, mask, 0.5))
    return mixture.nll()


def train(
    run: Run,
    network: BlockNetwork,
    chosen: Sequence[Trajectory],
    head: torch.Tensor,
    vocabulary: Vocabulary,
    args: argparse.Namespace,
) -> Expander:
    """`args.steps` steps of `args.blocks` blocks of 8 answers: expander, prior and the network, all
    at once. The network is left as trained.
    """
    backbone = network.model.train().requires_grad_(True)
    size = backbone.config.block_size
    model = Expander(backbone.config.hidden_size, run.branches, run.seed)
    groups = [
        {"params": list(model.parameters()), "highest": args.lr},
        {"params": list(backbone.parameters()), "highest": args.backbone_lr},
    ]
    optimiser = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.99))
    order = Order([len(t.tokens) for t in chosen], DOCUMENTS, seed=100 + run.seed)
    for step in range(args.steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(group["highest"], step, args.steps)
        epoch, members = order.micro_batch(step)
        anchors = [
            draw_anchors(
                chosen[i], max(1, args.blocks // DOCUMENTS), seed=run.seed, epoch=epoch, index=i,
                prompts=False,
            )
            for i in members
        ]  # fmt: skip
        batch = collate([chosen[i] for i in members], anchors, size)
        real = batch.anchors.view(-1) >= 0
        hidden = network(batch).view(len(real), size, -1)[real]
        total = mixture_loss(
            run, model, hidden, batch.labels.view(len(real), -1)[real],
            batch.label_logprobs.view(len(real), -1)[real],
            head, vocabulary, run.seed * 7919 + step,
        )  # fmt: skip
        optimiser.zero_grad(set_to_none=True)
        (total / len(hidden)).backward()  # type: ignore[no-untyped-call]
        for group in optimiser.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
        optimiser.step()
    backbone.eval().requires_grad_(False)
    return model.eval()

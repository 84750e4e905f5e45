"""From hidden states to a loss: head, labels, and the objective that was chosen.

Knows the frozen head and the losses. Does not know optimisers, files or ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from drafter_service.model import DraftModel
from drafter_service.training import losses
from drafter_service.training.blocks import NO_LABEL, Batch
from drafter_service.training.vocabulary import Columns

OBJECTIVES = ("kl", "label", "al", "chain")
WEIGHTS = ("dpace", "decay", "none")


@dataclass(frozen=True, slots=True)
class Objective:
    """What is minimised. `kl` and `label` are sums over slots with position weights; `al` and
    `chain` look at whole blocks. With several branches `label` is the mixture's likelihood and
    `kl` the distance of the prior-weighted mixture.
    """

    kind: str = "kl"
    weights: str = "dpace"
    gamma: float = 4.0
    alpha: float = 0.5
    tau: float = 0.1
    detach_acceptance: bool = False
    balance: float = 0.0
    head_rows: int = 2048


@dataclass(frozen=True, slots=True)
class Loss:
    """`total` and `scale` are sums: total / scale is the mean loss. `label_nll` and `blocks` are
    for the log: sum of the labels' -log q at slot 1, and blocks with a label.
    """

    total: torch.Tensor
    scale: torch.Tensor
    label_nll: torch.Tensor
    blocks: torch.Tensor
    use: losses.BranchUse | None = None


def block_loss(
    model: DraftModel,
    hidden: torch.Tensor,
    batch: Batch,
    head: torch.Tensor,
    columns: Columns,
    objective: Objective,
) -> Loss:
    """The loss of a batch. hidden as BlockNetwork gives it; head [columns, hidden], cut to
    `columns`.
    """
    size = batch.size
    labels = batch.labels.view(-1, size - 1)
    mask = labels != NO_LABEL
    slots = hidden.view(-1, size, hidden.shape[-1])
    if objective.kind == "kl":
        # Slots whose every likely token has no column teach nothing; labels alone decide the rest.
        top_columns = columns.columns(batch.top_ids.view(*labels.shape, -1)[mask])
        top = batch.top_logprobs.view(*labels.shape, -1)[mask]
    else:
        top_columns, top = None, None
    rows = slots[:, 1:][mask]
    wanted = columns.columns(labels[mask])
    branches = model.config.branches
    if branches > 1:
        prior = _log_prior(model, slots[:, 0])
        at = mask.nonzero()[:, 0]
        label_rows, distance = _through_head(
            model,
            rows,
            head,
            columns.shift,
            wanted,
            top_columns,
            top,
            prior[at],
            objective.head_rows,
        )
        table = labels.new_zeros(*labels.shape, branches, dtype=torch.float32)
        table[mask] = label_rows
        mixture = losses.Mixture(prior, table.transpose(1, 2), mask)
        said = mixture.conditionals()
    else:
        mixture = None
        label_rows, distance = _through_head(
            model, rows, head, columns.shift, wanted, top_columns, top, None, objective.head_rows
        )
        said = torch.zeros_like(labels, dtype=torch.float32)
        said[mask] = label_rows[:, 0]
    blocks = mask[:, 0].sum()
    total, scale = _total(objective, said, distance, mask, batch, blocks)
    if mixture is not None and objective.balance:
        total = total + objective.balance * scale * losses.balance_loss(mixture.responsibilities())
    return Loss(
        total,
        scale.detach(),
        -said[:, 0].sum().detach(),
        blocks,
        None if mixture is None else losses.branch_use(mixture),
    )


def _total(
    objective: Objective,
    said: torch.Tensor,
    distance: torch.Tensor | None,
    mask: torch.Tensor,
    batch: Batch,
    blocks: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    if objective.kind == "al":
        target = batch.label_logprobs.view_as(said)
        total = losses.accepted_length_loss(
            said,
            target,
            mask,
            tau=objective.tau,
            detach_acceptance=objective.detach_acceptance,
        )
        return total, blocks.float()
    if objective.kind == "chain":
        return losses.chain_loss(said, mask), blocks.float()
    if objective.weights == "dpace":
        weights = losses.dpace_weights(said, mask, objective.alpha)
    elif objective.weights == "decay":
        decay = losses.decay_weights(said.shape[1], objective.gamma, said.device)
        weights = decay.expand_as(said) * mask
    else:
        weights = mask.float()
    if distance is None:
        return losses.weighted(-said, weights, mask), weights.sum()
    placed = torch.zeros_like(said)
    placed[mask] = distance
    return losses.weighted(placed, weights, mask), weights.sum()


def _log_prior(model: DraftModel, anchors: torch.Tensor) -> torch.Tensor:
    """The raw prior: its temperature is a matter of serving."""
    return torch.log_softmax(model.branch_prior(anchors).float(), dim=-1)


def _through_head(
    model: DraftModel,
    rows: torch.Tensor,
    head: torch.Tensor,
    shift: torch.Tensor | None,
    wanted: torch.Tensor,
    top_columns: torch.Tensor | None,
    top: torch.Tensor | None,
    prior: torch.Tensor | None,
    step: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Label log-probabilities [rows, branches] and, if asked, distances [rows]. Pieces of `step`
    rows are computed again in the backward pass, which bounds memory.
    """
    said, distances = [], []
    for first in range(0, rows.shape[0], step):
        window = slice(first, first + step)
        parts = (
            model,
            rows[window],
            head,
            shift,
            wanted[window],
            None if top_columns is None else top_columns[window],
            None if top is None else top[window],
            None if prior is None else prior[window],
        )
        if rows.shape[0] > step:
            piece = checkpoint(_piece, *parts, use_reentrant=False)
        else:
            piece = _piece(*parts)
        said.append(piece[0])
        if piece[1] is not None:
            distances.append(piece[1])
    if not said:
        empty = rows.new_zeros(0, model.config.branches, dtype=torch.float32)
        return empty, None if top is None else empty[:, 0]
    return torch.cat(said), torch.cat(distances) if distances else None


def _piece(
    model: DraftModel,
    rows: torch.Tensor,
    head: torch.Tensor,
    shift: torch.Tensor | None,
    wanted: torch.Tensor,
    top_columns: torch.Tensor | None,
    top: torch.Tensor | None,
    prior: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    branches = model.config.branches
    # Contiguous rows: a strided input makes the head's product many times slower on CPU.
    logits = F.linear(model.expand(rows).contiguous(), head)
    config = model.config
    if config.output_scale != 1.0:
        logits = logits * config.output_scale
    if config.softcap is not None:
        logits = torch.tanh(logits / config.softcap) * config.softcap
    if shift is not None:
        logits = logits + shift
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    expanded = logprobs.view(rows.shape[0], branches, -1)
    index = wanted[:, None, None].expand(-1, branches, 1)
    said = expanded.gather(2, index)[:, :, 0]
    if top_columns is None or top is None:
        return said, None
    if prior is not None:
        expanded = torch.logsumexp(expanded + prior[:, :, None], dim=1, keepdim=True)
    return said, losses.distribution_loss(expanded[:, 0], top_columns, top)

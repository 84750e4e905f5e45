"""How long the accepted prefix of an argmax chain is on held-out sequences: what training stops by.

Uses fixed anchors and the whole vocabulary. Does not know trees, coupling or rounds; evaluation
does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drafter_service.training.blocks import Batch, collate, even_anchors
from drafter_service.training.features import Trajectory
from drafter_service.training.network import BlockNetwork
from drafter_service.training.run_config import TrainConfig

_HEAD_ROWS = 1024


@torch.no_grad()
def acceptance_length(
    network: BlockNetwork,
    head: torch.Tensor,
    held: Sequence[Trajectory],
    config: TrainConfig,
    device: torch.device,
) -> float:
    """Mean over blocks of 1 + the labels that the likeliest tokens of the slots hit in a row."""
    ordered = sorted(held, key=lambda t: len(t.tokens))
    reached, blocks = 0, 0
    for first in range(0, len(ordered), config.batch):
        part = ordered[first : first + config.batch]
        anchors = [even_anchors(t, config.validation_anchors) for t in part]
        batch = collate(part, anchors, config.block_size).to(device)
        hits = argmax_hits(network, head, batch)
        reached += int(hits.cumprod(dim=1).sum())
        blocks += int((batch.anchors >= 0).sum())
    return 1.0 + reached / max(blocks, 1)


def argmax_hits(network: BlockNetwork, head: torch.Tensor, batch: Batch) -> torch.Tensor:
    """int64 [blocks, size - 1]: 1 where the likeliest branch's likeliest token is the label."""
    model, size = network.model, batch.size
    hidden = network(batch)
    slots = hidden.view(-1, size, hidden.shape[-1])
    rows = slots[:, 1:].reshape(-1, hidden.shape[-1])
    if model.config.branches > 1:
        best = model.log_prior(slots[:, 0]).argmax(dim=1).repeat_interleave(size - 1)
        expanded = model.expand(rows).view(rows.shape[0], model.config.branches, -1)
        rows = expanded[torch.arange(rows.shape[0], device=rows.device), best]
    tokens = torch.cat([(part @ head.T).argmax(dim=1) for part in rows.split(_HEAD_ROWS)])
    return (tokens.view(-1, size - 1) == batch.labels.view(-1, size - 1)).long()

"""Training blocks: which positions are drafted from, what each block sees and what it should say.

Knows anchors, masks, positions, labels and the borders of documents. Does not know the network,
losses or files.

A batch holds documents side by side, padded to the longest, each with the same number of blocks.
Slot j of a block with anchor at position a stands for position a + j: slot 0 is the anchor, the
others are masks, and slot j's label is the token AT a + j (same position, not the next one). The
target's distribution of that token is the one after position a + j - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafter_service.draft_config import LayerAttention
from drafter_service.training.features import Trajectory

NO_LABEL = -1


@dataclass(frozen=True, slots=True)
class Batch:
    """Documents [docs] with `blocks` blocks of `size` slots each.

    tokens int64 [docs, longest]; features [docs, longest, width]; lengths int64 [docs];
    anchors int64 [docs, blocks], -1 where a document has fewer;
    labels int64 [docs, blocks, size - 1], NO_LABEL past the end or where the anchor is -1;
    top_ids int64 and top_logprobs float32 [docs, blocks, size - 1, top]: the target's likeliest
    tokens at the labels' positions;
    label_logprobs float32 [docs, blocks, size - 1]: of the labels under the sampling settings they
    were drawn with, 0 where the label is a prompt token.
    """

    tokens: torch.Tensor
    features: torch.Tensor
    lengths: torch.Tensor
    anchors: torch.Tensor
    labels: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor
    label_logprobs: torch.Tensor

    @property
    def size(self) -> int:
        """Slots of a block, anchor included."""
        return self.labels.shape[2] + 1

    def to(self, device: torch.device) -> Batch:
        """The batch on another device."""
        return Batch(
            *(getattr(self, name).to(device, non_blocking=True) for name in Batch.__slots__)
        )


def candidates(trajectory: Trajectory, *, prompts: bool) -> range:
    """Positions that may be anchors: they and the position after them are answer tokens, so that
    slot 1 has a label. With `prompts`, prompt tokens count as well.
    """
    first = 1 if prompts else trajectory.prompt_length
    return range(first, len(trajectory.tokens) - 1)


def draw_anchors(
    trajectory: Trajectory, count: int, *, seed: int, epoch: int, index: int, prompts: bool
) -> list[int]:
    """Up to `count` different anchors of the sequence, in rising order; another draw for each
    (seed, epoch, index), always the same one for the same three.
    """
    allowed = candidates(trajectory, prompts=prompts)
    if len(allowed) <= count:
        return list(allowed)
    generator = torch.Generator().manual_seed(_mixed(seed, epoch, index))
    picked = torch.randperm(len(allowed), generator=generator)[:count]
    return sorted(allowed[i] for i in picked.tolist())


def even_anchors(trajectory: Trajectory, count: int) -> list[int]:
    """`count` answer positions spread evenly: the same ones always, for validation."""
    allowed = candidates(trajectory, prompts=False)
    if len(allowed) <= count:
        return list(allowed)
    return [allowed[i * len(allowed) // count] for i in range(count)]


def collate(
    trajectories: Sequence[Trajectory], anchors: Sequence[Sequence[int]], size: int
) -> Batch:
    """Put sequences and their anchors into a batch on the CPU."""
    docs, longest = len(trajectories), max(len(t.tokens) for t in trajectories)
    blocks = max(1, max(len(found) for found in anchors))
    top = trajectories[0].top_ids.shape[1]
    tokens = torch.zeros(docs, longest, dtype=torch.int64)
    width = trajectories[0].features.shape[1]
    features = torch.zeros(docs, longest, width, dtype=trajectories[0].features.dtype)
    placed = torch.full((docs, blocks), -1, dtype=torch.int64)
    labels = torch.full((docs, blocks, size - 1), NO_LABEL, dtype=torch.int64)
    top_ids = torch.zeros(docs, blocks, size - 1, top, dtype=torch.int64)
    top_logprobs = torch.zeros(docs, blocks, size - 1, top)
    label_logprobs = torch.zeros(docs, blocks, size - 1)
    for row, (trajectory, found) in enumerate(zip(trajectories, anchors, strict=True)):
        length, count = len(trajectory.tokens), len(found)
        tokens[row, :length] = trajectory.tokens
        features[row, :length] = trajectory.features
        if not count:
            continue
        own = torch.tensor(list(found), dtype=torch.int64)
        placed[row, :count] = own
        where = own[:, None] + torch.arange(1, size)[None, :]
        inside = where < length
        labels[row, :count] = torch.where(
            inside, trajectory.tokens[where.clamp(max=length - 1)], NO_LABEL
        )
        before = (where - 1).clamp(max=length - 1)
        top_ids[row, :count] = trajectory.top_ids[before].long()
        top_logprobs[row, :count] = trajectory.top_logprobs[before].float()
        drawn = torch.zeros(length)
        drawn[trajectory.prompt_length :] = torch.tensor(trajectory.response.logprobs)
        label_logprobs[row, :count] = torch.where(
            inside, drawn[where.clamp(max=length - 1)], torch.zeros(())
        )
    lengths = torch.tensor([len(t.tokens) for t in trajectories], dtype=torch.int64)
    return Batch(tokens, features, lengths, placed, labels, top_ids, top_logprobs, label_logprobs)


def visible(batch: Batch, rule: LayerAttention) -> torch.Tensor:
    """bool [docs, blocks * size, longest + blocks * size]: what each slot sees among the document's
    context and all block slots: context strictly before its anchor, and its own block.

    A block without anchor sees itself, so that no row of a softmax is empty.
    """
    docs, blocks = batch.anchors.shape
    size, longest = batch.size, batch.tokens.shape[1]
    device = batch.anchors.device
    query = slot_positions(batch).view(docs, -1, 1)
    anchor = batch.anchors.repeat_interleave(size, dim=1)[:, :, None]
    context = torch.arange(longest, device=device)[None, None, :]
    before = (context < anchor) & (context < batch.lengths[:, None, None])
    block = torch.arange(blocks, device=device).repeat_interleave(size)
    own = (block[:, None] == block[None, :])[None].expand(docs, -1, -1)
    key = query.transpose(1, 2)
    if rule.causal:
        own = own & (key <= query)
    if rule.window is not None:
        before = before & (query - context < rule.window)
        own = own & (query - key < rule.window) & (key - query < rule.window)
    return torch.cat([before, own], dim=-1)


def slot_positions(batch: Batch) -> torch.Tensor:
    """int64 [docs, blocks, size]: the absolute position of every slot."""
    offsets = torch.arange(batch.size, device=batch.anchors.device)
    return batch.anchors.clamp(min=0)[:, :, None] + offsets


def slot_tokens(batch: Batch, mask_token_id: int) -> torch.Tensor:
    """int64 [docs, blocks, size]: the anchor's token, then masks."""
    ids = torch.full((*batch.anchors.shape, batch.size), mask_token_id, device=batch.anchors.device)
    ids[:, :, 0] = batch.tokens.gather(1, batch.anchors.clamp(min=0))
    return ids


def _mixed(seed: int, epoch: int, index: int) -> int:
    """One number of three, so that neighbours draw unlike each other."""
    return (seed * 1_000_003 + epoch * 7_368_787 + index * 2_654_435_761 + 97) % 2**63

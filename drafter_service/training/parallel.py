"""Data parallel training: who of how many we are, and sums over all.

Knows torch.distributed and nothing else. Started by torchrun; alone otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist


class Ranks:
    """The processes that train together."""

    def __init__(self, device: torch.device) -> None:
        """Join the group if torchrun started us (WORLD_SIZE is set)."""
        self._ours = False
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
            self._ours = True
        joined = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if joined else 0
        self.world = dist.get_world_size() if joined else 1

    @property
    def first(self) -> bool:
        """Whether this process writes files."""
        return self.rank == 0

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace each tensor by its sum over all processes, in one message."""
        if self.world == 1:
            return
        parts = list(tensors)
        flat = torch.cat([part.reshape(-1).float() for part in parts])
        dist.all_reduce(flat)
        first = 0
        for part in parts:
            part.copy_(flat[first : first + part.numel()].view_as(part))
            first += part.numel()

    def wait(self) -> None:
        """Return when all are here."""
        if self.world > 1:
            dist.barrier()

    def leave(self) -> None:
        """End the group, if we began it."""
        if self._ours:
            dist.destroy_process_group()


def local_device(name: str) -> torch.device:
    """The device of this process: `cuda` becomes the GPU with its local rank."""
    if name == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device(name)

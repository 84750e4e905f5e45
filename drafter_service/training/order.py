"""Which sequences come when: an order that depends on nothing but the seed and the step.

Knows epochs, batches of like length, ranks and held-out prompts. Does not know tensors; a run that
is resumed finds its place by the step number alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

_WINDOW = 16  # batches sorted by length together


class Order:
    """The micro-batches of all epochs, one after another."""

    def __init__(
        self, lengths: Sequence[int], batch: int, *, seed: int, rank: int = 0, world: int = 1
    ) -> None:
        """lengths of all sequences; `batch` sequences a micro-batch; this process is `rank` of
        `world`.
        """
        self._lengths, self._batch, self._seed = list(lengths), batch, seed
        self._rank, self._world = rank, world
        self.per_epoch = -(-len(self._lengths) // (batch * world))
        self._epoch: tuple[int, list[list[int]]] = (-1, [])

    def micro_batch(self, number: int) -> tuple[int, list[int]]:
        """The epoch and the sequences of this rank's micro-batch `number`."""
        epoch, place = divmod(number, self.per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._shuffled(epoch))
        return epoch, self._epoch[1][place * self._world + self._rank]

    def _shuffled(self, epoch: int) -> list[list[int]]:
        draw = random.Random(f"{self._seed} {epoch}")
        order = list(range(len(self._lengths)))
        draw.shuffle(order)
        # Every rank needs a batch in every step: the last ones repeat the first sequences.
        wanted = self.per_epoch * self._world * self._batch
        order = (order * (wanted // len(order) + 1))[:wanted]
        batches: list[list[int]] = []
        window = _WINDOW * self._batch
        for first in range(0, wanted, window):
            part = sorted(order[first : first + window], key=lambda i: (self._lengths[i], i))
            batches.extend(part[at : at + self._batch] for at in range(0, len(part), self._batch))
        draw.shuffle(batches)
        return batches


def held_out(keys: Sequence[str], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Indices of training and of validation sequences; a sequence's side depends on the prompt in
    its key and the seed alone, so that more data does not move it.
    """
    training: list[int] = []
    validation: list[int] = []
    for index, key in enumerate(keys):
        side = random.Random(f"{seed} {key.partition('|')[0]}").random() < share
        (validation if side else training).append(index)
    if not training:
        training, validation = validation, []
    return training, validation


def split_of(raw_config: Mapping[str, Any], share: float, seed: int) -> tuple[float, int]:
    """Share and seed of the prompts that a drafter's training held out, from its config.json; those
    given if that does not say. Every later step must hold out the same ones: what is fitted to
    prompts that the drafter was trained on takes it for better than it is.
    """
    known = (raw_config.get("draftwire") or {}).get("held_out") or {}
    return float(known.get("share", share)), int(known.get("seed", seed))


def spread(indices: Sequence[int], count: int) -> list[int]:
    """`count` of the indices, evenly spread over them; all if `count` is 0 or not less."""
    if not 0 < count < len(indices):
        return list(indices)
    return [indices[i * len(indices) // count] for i in range(count)]

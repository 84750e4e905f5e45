"""Rotary position embedding: inverse frequencies of each published kind, and the rotation.

Knows positions and head sizes. Does not know layers, caches or checkpoints.
"""

from __future__ import annotations

import math

import torch

from drafter_service.draft_config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> tuple[torch.Tensor, float]:
    """float32 [head_dim / 2] and the factor on cos and sin."""
    base = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "default":
        return base, 1.0
    factor = float(rope.scaling["factor"])
    if rope.kind == "linear":
        return base / factor, 1.0
    if rope.kind == "yarn":
        return _yarn(rope, base, factor, head_dim)
    return _llama3(rope, base, factor), 1.0


def _yarn(
    rope: Rope, base: torch.Tensor, factor: float, head_dim: int
) -> tuple[torch.Tensor, float]:
    original = float(rope.scaling["original_max_position_embeddings"])

    def dimension_of(rotations: float) -> float:
        return (
            head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    low = dimension_of(float(rope.scaling.get("beta_fast") or 32))
    high = dimension_of(float(rope.scaling.get("beta_slow") or 1))
    if rope.scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    interpolated = ramp.clamp(0, 1)
    frequencies = base / factor * interpolated + base * (1 - interpolated)

    def scale_of(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = rope.scaling.get("attention_factor")
    if attention is None:
        mscale, mscale_all = rope.scaling.get("mscale"), rope.scaling.get("mscale_all_dim")
        attention = scale_of(1.0)
        if mscale and mscale_all:
            attention = scale_of(float(mscale)) / scale_of(float(mscale_all))
    return frequencies, float(attention)


def _llama3(rope: Rope, base: torch.Tensor, factor: float) -> torch.Tensor:
    original = float(rope.scaling["original_max_position_embeddings"])
    low = float(rope.scaling.get("low_freq_factor", 1.0))
    high = float(rope.scaling.get("high_freq_factor", 4.0))
    turns = original * base / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * base / factor + smooth * base


class RotaryTable:
    """cos and sin at any positions, from frequencies held on one device."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device) -> None:
        frequencies, self.factor = inverse_frequencies(rope, head_dim)
        self.frequencies = frequencies.to(device)

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int64 [n] -> cos, sin [n, 1, head_dim], ready to multiply [n, heads,
        head_dim].
        """
        angles = positions.to(torch.float32)[:, None] * self.frequencies[None, :]
        angles = torch.cat((angles, angles), dim=-1)[:, None, :]
        return (angles.cos() * self.factor).to(dtype), (angles.sin() * self.factor).to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate-half layout: [n, heads, head_dim] with cos, sin [n, 1, head_dim]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin

"""What a draft layer is made of: norms, the projections of attention, the MLP.

The parameters bear the published tensor names. Does not know how rows attend to each other, caches
or sessions.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from drafter_service.draft_config import DraftConfig
from drafter_service.rope import rotate


class Norm(nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> the same."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Projections of one layer; queries and keys are normalised per head."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        bias, size = config.attention_bias, config.hidden_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(size, q_size, bias=bias)
        self.k_proj = nn.Linear(size, kv_size, bias=bias)
        self.v_proj = nn.Linear(size, kv_size, bias=bias)
        self.o_proj = nn.Linear(q_size, size, bias=bias)
        self.q_norm = Norm(config.head_dim, config.rms_norm_eps)
        self.k_norm = Norm(config.head_dim, config.rms_norm_eps)
        if config.attention_sink:
            self.attention_sink_bias = nn.Parameter(torch.zeros(config.num_heads))
        self.head_dim = config.head_dim
        self.has_sink = config.attention_sink

    @property
    def sink(self) -> torch.Tensor | None:
        """float [heads], or None where the config has no sinks."""
        return self.attention_sink_bias if self.has_sink else None

    def queries(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, heads, head_dim], rotated."""
        return rotate(self.q_norm(self.q_proj(x).view(x.shape[0], -1, self.head_dim)), cos, sin)

    def keys_values(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, hidden] -> keys (rotated) and values, each [kv_heads, rows, head_dim]."""
        keys = self.k_norm(self.k_proj(x).view(x.shape[0], -1, self.head_dim))
        values = self.v_proj(x).view(x.shape[0], -1, self.head_dim)
        return rotate(keys, cos, sin).transpose(0, 1), values.transpose(0, 1)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> the same."""
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out

"""flash-attn behind the attention interface: for chains on CUDA, where bits need not repeat.

Knows the two packages, imported when first asked for: flash_attn_interface (FlashAttention 3, any
page size) and flash_attn (FlashAttention 2, pages of a multiple of 256). Knows nothing of trees:
those, and machines without either package, are attention_triton's.
"""

import functools
import importlib
from types import ModuleType

import torch

from draftwire_kernels.attention import AttentionPlan

FA2_PAGE = 256
"""FlashAttention 2 takes pages of a multiple of this."""


@functools.cache
def backend() -> ModuleType | None:
    """The newest flash-attn that can be imported, or None."""
    for name in ("flash_attn_interface", "flash_attn"):
        try:
            return importlib.import_module(name)
        except (ImportError, OSError):  # OSError: built for another torch or CUDA
            continue
    return None


def takes(query: torch.Tensor, plan: AttentionPlan) -> bool:
    """Whether flash-attn can do this forward: half precision, chains, no padding rows, page
    size."""
    module = backend()
    if module is None or not plan.is_chain or plan.padded or plan.base.shape[0] == 0:
        return False
    if query.dtype not in (torch.float16, torch.bfloat16) or query.shape[2] > 256:
        return False
    return module.__name__ == "flash_attn_interface" or plan.page_size % FA2_PAGE == 0


def attend(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
) -> torch.Tensor:
    """Arguments and result as attention.paged_attention, for plans that `takes` accepts."""
    module = backend()
    if module is None:
        raise RuntimeError("neither flash_attn_interface nor flash_attn can be imported")
    pages = key_pool.shape[0] // plan.page_size
    paged = (pages, plan.page_size, key_pool.shape[1], key_pool.shape[2])
    keys = key_pool[: pages * plan.page_size].view(paged)
    values = value_pool[: pages * plan.page_size].view(paged)
    # A session's keys: its context and its own rows.
    lengths = plan.base + plan.row_start[1:] - plan.row_start[:-1]
    if module.__name__ == "flash_attn_interface":
        out = module.flash_attn_with_kvcache(
            query,
            keys,
            values,
            cache_seqlens=lengths,
            page_table=plan.page_tables,
            cu_seqlens_q=plan.row_start,
            max_seqlen_q=plan.max_rows,
            softmax_scale=scale,
            causal=True,
        )
    else:
        out = module.flash_attn_varlen_func(
            query,
            keys,
            values,
            cu_seqlens_q=plan.row_start,
            cu_seqlens_k=torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
            max_seqlen_q=plan.max_rows,
            max_seqlen_k=plan.max_keys,
            softmax_scale=scale,
            causal=True,
            block_table=plan.page_tables,
        )
    result: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return result

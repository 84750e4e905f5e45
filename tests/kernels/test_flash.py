"""flash-attn behind the attention interface: what is asked of either package, and when."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from draftwire_kernels import attention_cpu, flash
from draftwire_kernels.attention import AttentionPlan, plan, row_parents


class Asked(ModuleType):
    """Either package: notes how it was called and computes the same by SDPA, session by session."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[dict[str, Any]] = []

    def flash_attn_with_kvcache(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **how: Any
    ) -> torch.Tensor:
        """FlashAttention 3's."""
        self.calls.append(how)
        return self._attend(query, keys, values, how["cache_seqlens"], how["page_table"], how)

    def flash_attn_varlen_func(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **how: Any
    ) -> torch.Tensor:
        """FlashAttention 2's."""
        self.calls.append(how)
        lengths = how["cu_seqlens_k"].diff()
        return self._attend(query, keys, values, lengths, how["block_table"], how)

    @staticmethod
    def _attend(
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        lengths: torch.Tensor,
        tables: torch.Tensor,
        how: dict[str, Any],
    ) -> torch.Tensor:
        assert how["causal"]
        out = torch.empty_like(query)
        starts = how["cu_seqlens_q"].tolist()
        for s, length in enumerate(lengths.tolist()):
            first, end = starts[s], starts[s + 1]
            flat = [pool[tables[s].long()].flatten(0, 1)[:length] for pool in (keys, values)]
            # Causal from the bottom right corner: row i sees length - rows + i keys before it.
            rows = torch.arange(length - end + first, length)
            ages = torch.arange(length)[None, :] - rows[:, None]
            mixed = torch.nn.functional.scaled_dot_product_attention(
                query[first:end].transpose(0, 1)[None],
                *(pool.transpose(0, 1)[None] for pool in flat),
                attn_mask=ages <= 0,
                scale=how["softmax_scale"],
                enable_gqa=True,
            )
            out[first:end] = mixed[0].transpose(0, 1)
        return out


@pytest.fixture(params=["flash_attn_interface", "flash_attn"])
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    module = Asked(request.param)
    monkeypatch.setitem(sys.modules, request.param, module)
    flash.backend.cache_clear()
    yield module
    flash.backend.cache_clear()


def chains(page: int, **pad: int) -> tuple[AttentionPlan, torch.Tensor, torch.Tensor, torch.Tensor]:
    tables = torch.randperm(4).view(2, 2).int()
    planned = plan(tables, [page + 3, 5], [4, 1], page, **pad)
    keys, values = torch.randn(2, 4 * page, 2, 16).bfloat16()
    query = torch.randn(planned.row_session.shape[0], 4, 16).bfloat16()
    return planned, query, keys, values


def test_chains_give_what_our_attention_gives(package: Asked) -> None:
    planned, query, keys, values = chains(256)
    assert flash.takes(query, planned)
    got = flash.attend(query, keys, values, planned, 0.25)
    want = attention_cpu.attend(query, keys, values, planned, 0.25)
    assert torch.allclose(got.float(), want.float(), atol=2e-2)
    assert package.calls[0]["max_seqlen_q"] == 4


def test_small_pages_are_left_to_the_version_that_takes_them(package: Asked) -> None:
    planned, query, _, _ = chains(16)
    assert flash.takes(query, planned) is (package.__name__ == "flash_attn_interface")


@pytest.mark.usefixtures("package")
def test_trees_padding_rows_and_fp32_are_left_to_our_kernel() -> None:
    planned, query, _, _ = chains(256)
    assert not flash.takes(query.float(), planned)
    padded, longer, _, _ = chains(256, pad_rows=2)
    assert not flash.takes(longer, padded)
    tree = plan(planned.page_tables, [3, 4], [row_parents([-1, -1]), 1], 256)
    assert not flash.takes(query[:4], tree)


def test_without_either_package_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn_interface", "flash_attn"):
        monkeypatch.setitem(sys.modules, name, None)
    flash.backend.cache_clear()
    planned, query, _, _ = chains(256)
    assert not flash.takes(query, planned)
    flash.backend.cache_clear()

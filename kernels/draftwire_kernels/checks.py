"""Checks of arguments that the kernels' launch functions share, and their error.

Knows shapes and dtypes of torch tensors; knows no kernel, no service and no device.
"""

from collections.abc import Sequence

import torch

LOGIT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class KernelArgumentError(ValueError):
    """An argument a kernel cannot take; carries the field, what was allowed and what came."""

    def __init__(self, field: str, limit: object, value: object) -> None:
        super().__init__(f"{field}: expected {limit}, got {value}")
        self.field = field
        self.limit = limit
        self.value = value


def expect(ok: bool, field: str, limit: object, value: object) -> None:
    """Raise KernelArgumentError naming `field` unless `ok`."""
    if not ok:
        raise KernelArgumentError(field, limit, value)


def expect_shape(field: str, tensor: torch.Tensor, shape: Sequence[int | None]) -> None:
    """Check `tensor`'s shape; None stands for any size."""
    got = tuple(tensor.shape)
    same = len(got) == len(shape) and all(
        want is None or want == have for want, have in zip(shape, got, strict=True)
    )
    expect(same, field, f"shape {tuple('any' if s is None else s for s in shape)}", got)


def expect_dtype(field: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype]) -> None:
    """Check `tensor`'s dtype against a list."""
    expect(tensor.dtype in allowed, field, [str(d) for d in allowed], str(tensor.dtype))


def next_power_of_two(n: int) -> int:
    """Smallest power of two >= n, for n >= 1."""
    return 1 << (n - 1).bit_length()

"""On a machine with a GPU: every kernel against its reference. The figures are gpu_kernels.py's
own."""

import pytest


@pytest.mark.gpu
@pytest.mark.timeout(400)
def test_every_kernel_agrees_with_its_reference_on_this_gpu() -> None:
    pytest.importorskip("triton")
    from bench.gpu_checks import failures
    from bench.kernel_cases import Sizes

    assert failures("cuda", Sizes()) == []

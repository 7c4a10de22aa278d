"""Contract D4 and case B22 on a CUDA machine: dispatch follows the tensors, not the process's current device."""

from __future__ import annotations

import copy

import pytest
import torch

from opmux.core.errors import DeviceMismatchError
from opmux.ops import RMSNorm, SiluAndMul

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def no_grad() -> object:
    with torch.no_grad():
        yield


def test_d4_cpu_tensors_on_a_cuda_machine() -> None:
    op, x = RMSNorm(64), torch.randn(3, 64)
    assert op.decision(x).platform == "cpu"
    torch.testing.assert_close(op(x), op.forward_native(x))


def test_d4_to_cuda_and_back() -> None:
    op, x = RMSNorm(64), torch.randn(3, 64)
    ref = op(x)
    op.cuda()
    assert op.decision(x.cuda()).method == "forward_cuda"
    torch.testing.assert_close(op(x.cuda()).cpu(), ref, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(copy.deepcopy(op)(x.cuda()).cpu(), ref, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(op.cpu()(x), ref)
    assert op.decision().platform == "cpu", "an op with weights is where its weights are"
    assert SiluAndMul().decision().platform == "cuda", "one without is on the current platform"


def test_d4_weight_on_one_device_input_on_the_other() -> None:
    op, x = RMSNorm(64), torch.randn(3, 64)
    op(x)
    for call in (lambda: op(x.cuda()), lambda: op(x, x.cuda()), lambda: op(x, residual=x.cuda())):
        with pytest.raises(DeviceMismatchError, match=r"on cpu.*on cuda:0|on cuda:0.*on cpu"):
            call()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_b22_two_gpus_and_the_current_one_is_the_other() -> None:
    x = torch.randn(3, 128, device="cuda:1")
    op = SiluAndMul()
    with torch.cuda.device(0):
        out = op(x)
        assert torch.cuda.current_device() == 0
    assert out.device == x.device
    torch.testing.assert_close(out, op.forward_native(x), rtol=1e-5, atol=1e-5)

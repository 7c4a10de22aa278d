from __future__ import annotations

import math

import pytest
import torch

from opmux.ops.quant.fp8 import GroupShape
from opmux.ops.quant.quant_fp8 import QuantFP8
from opmux.ops.quant.rms_norm_quant import RMSNormQuant
from opmux.ops.quant.silu_and_mul_quant import SiluAndMulQuant

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
KINDS = [GroupShape.PER_TENSOR, GroupShape.PER_TOKEN, GroupShape(1, 128), GroupShape(1, 5)]


def same(got, want, inside=0.0):
    """Scales and values are equal to the bit, or with ``inside``, the relative error of a rounding on the way to them,
    values in all but a few roundings."""
    (q, scale), (want_q, want_scale) = got[:2], want[:2]
    assert q.shape == want_q.shape
    assert q.dtype == want_q.dtype
    assert scale.shape == want_scale.shape
    assert torch.allclose(scale, want_scale, rtol=inside, atol=0, equal_nan=True)
    assert torch.equal(q.float().isnan(), want_q.float().isnan())
    numbers = ~q.float().isnan()  # the sign of a NaN is nobody's
    bits, want_bits = q.view(torch.uint8).int()[numbers], want_q.view(torch.uint8).int()[numbers]
    apart = (bits - want_bits).abs()
    assert int(apart.max() if apart.numel() else 0) <= 1
    assert int(apart.sum()) <= (1 + apart.numel() // 20 if inside else 0)


@pytest.mark.parametrize("format_", [FN, FNUZ])
def test_every_value_that_matters_rounds_as_torch_does(format_):
    every = torch.arange(256, dtype=torch.uint8).view(format_).float()
    every = every[every.isfinite()].unique()
    middle = (every[1:] + every[:-1]) / 2
    x = torch.cat((every, middle, torch.nextafter(middle, every[1:]), torch.nextafter(middle, every[:-1])))
    x = torch.cat((x, torch.tensor([0.0, -0.0, 1e-9, -1e-9, 1e9, -1e9, math.inf, -math.inf, math.nan])))
    op = QuantFP8(True, GroupShape.PER_TENSOR, dtype=format_)
    got, _ = op.forward_cuda(x[None], torch.ones(1))
    want, _ = op.forward_native(x[None], torch.ones(1))
    got, want = got.view(torch.uint8) & 0x7F, want.view(torch.uint8) & 0x7F
    assert torch.equal(got, want)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("width", [1, 7, 128, 200, 769, 33000])
@pytest.mark.parametrize("format_", [FN, FNUZ])
def test_dynamic_scales(kind, width, format_):
    x = (torch.randn(3, width + 1) * 3).half()[:, 1:]
    x[1] = 0.0
    op = QuantFP8(False, kind, dtype=format_)
    same(op.forward_cuda(x), op.forward_native(x))


@pytest.mark.parametrize(
    ("kind", "shape"),
    [(GroupShape.PER_TENSOR, (1,)), (GroupShape.PER_TOKEN, (6,)), (GroupShape.PER_CHANNEL, (12,)), ((1, 4), (3, 3))],
)
def test_static_scales(kind, shape):
    x, scale = torch.randn(2, 3, 12), torch.rand(shape) + 0.1
    op = QuantFP8(True, kind)
    same(op.forward_cuda(x, scale), op.forward_native(x, scale))


def test_powers_of_two_bound_and_column_major():
    x = torch.randn(5, 256)
    for options in ({"use_ue8m0": True}, {"column_major_scales": True, "tma_aligned_scales": True}):
        op = QuantFP8(False, GroupShape(1, 128), **options)
        got, want = op.forward_cuda(x), op.forward_native(x)
        same(got, want)
        assert got[1].stride() == want[1].stride()
    op, bound = QuantFP8(False, GroupShape.PER_TOKEN), torch.tensor([0.7])
    same(op.forward_cuda(x, None, bound), op.forward_native(x, None, bound))


@pytest.mark.parametrize("kind", KINDS[:3], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_no_number(kind, value):
    x = torch.randn(3, 256)
    x[1, 7] = value
    op = QuantFP8(False, kind)
    same(op.forward_cuda(x), op.forward_native(x))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 8)])
def test_nothing(kind, shape):
    op = QuantFP8(False, kind)
    same(op.forward_cuda(torch.randn(shape)), op.forward_native(torch.randn(shape)))


@pytest.mark.parametrize(
    ("static", "kind"), [(True, KINDS[0]), (False, KINDS[1]), (False, KINDS[2]), (False, KINDS[3])]
)
@pytest.mark.parametrize("width", [1, 200, 256, 33000])
def test_behind_a_gate_and_a_norm(static, kind, width):
    scale = (torch.tensor([0.02]),) if static else ()
    x, residual = torch.randn(3, 2 * width).half(), torch.randn(3, width).half()
    gated = SiluAndMulQuant(static, kind)
    same(gated.forward_cuda(x, *scale), gated.forward_native(x, *scale), 1e-3)
    norm = RMSNormQuant(width, static=static, group_shape=kind)
    norm.norm.weight.data = torch.rand(width).half() + 0.5
    y = x[:, width:]
    same(norm.forward_cuda(y, None, *scale), norm.forward_native(y, None, *scale), 1e-3)
    got, want = norm.forward_cuda(y, residual, *scale), norm.forward_native(y, residual, *scale)
    same(got, want, 1e-3)
    assert torch.equal(got[2], want[2])

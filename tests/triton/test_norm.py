from __future__ import annotations

import pytest
import torch
from torch import Tensor

from opmux.ops.norm.kernels_triton import (
    add_layer_norm_triton,
    add_rms_norm_triton,
    layer_norm_triton,
    rms_norm_gated_triton,
    rms_norm_triton,
    tile,
)
from opmux.ops.norm.rms_norm import RMSNorm

EPS = 1e-6


def reference(x: Tensor, weight: Tensor | None, n: int, offset: float = 0.0) -> Tensor:
    x = x.double()
    y = x * torch.rsqrt(x[..., :n].square().mean(-1, keepdim=True) + EPS)
    return y if weight is None else y * (weight.double() + offset)


@pytest.mark.parametrize("width", [1, 2, 3, 7, 63, 65, 769, 32769])
def test_odd_widths_and_row_strides(width, dtype, close):
    x, weight = torch.randn(7, width + 3).to(dtype)[:, 1 : width + 1], torch.randn(width).to(dtype)
    close(rms_norm_triton(x, weight, EPS, width, 0.0, False), reference(x, weight, width))


@pytest.mark.parametrize("shape", [(5,), (2, 3, 5), (2, 3, 2, 5), (0, 5), (3, 0, 5), (4, 0)])
def test_any_rank_and_no_rows(shape, close):
    x = torch.randn(shape)
    y = rms_norm_triton(x, None, EPS, max(1, shape[-1]), 0.0, False)
    assert y.shape == x.shape
    if x.numel():
        close(y, reference(x, None, shape[-1]))


def test_heads_of_packed_rows(dtype, close):
    packed = torch.randn(5, 6, 16).to(dtype)
    heads = packed[:, 1:4]  # no single row stride
    close(rms_norm_triton(heads, None, EPS, 16, 0.0, False), reference(heads, None, 16))


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_partial_variance_gemma_offset_and_weight_dtype(weight_dtype, dtype, close):
    x, weight = torch.randn(3, 65).to(dtype), torch.randn(65).to(weight_dtype)
    close(rms_norm_triton(x, weight, EPS, 20, 1.0, False), reference(x, weight, 20, 1.0))


@pytest.mark.parametrize("width", [33, 40001])
def test_residual(width, close):
    x, residual = torch.randn(3, width).half(), torch.randn(3, width).half()
    y, total = add_rms_norm_triton(x, residual, None, EPS, width, 0.0, False, False)
    close(y, reference(x.double() + residual.double(), None, width))
    assert torch.equal(total, (x.float() + residual.float()).half())


def test_norm_of_a_sum_that_overflows_fp16():
    x = torch.full((1, 8), 40000.0, dtype=torch.float16)
    y, total = add_rms_norm_triton(x, x, None, EPS, 8, 0.0, False, False)
    assert torch.equal(y, torch.ones_like(y))
    assert bool(total.isinf().all())


@pytest.mark.parametrize(("value", "expected"), [(300.0, 1.0), (1e-4, 0.0995), (0.0, 0.0)])
def test_fp16_squares_are_fp32(value, expected):
    y = rms_norm_triton(torch.full((1, 8), value, dtype=torch.float16), None, EPS, 8, 0.0, False)
    assert torch.allclose(y.float(), torch.full((1, 8), expected), rtol=2e-3)


@pytest.mark.parametrize("round_sum", [False, True])
@pytest.mark.parametrize("cast_order", ["cast_first", "cast_last"])
def test_the_definition_to_one_unit(cast_order, round_sum):
    torch.manual_seed(0)
    x, residual = torch.randn(4, 64).half(), torch.randn(4, 64).half()
    op = RMSNorm(64, EPS, dtype=torch.float16, cast_order=cast_order, round_sum=round_sum)
    op.weight.data = (torch.rand(64) * 4).half()
    y, total = add_rms_norm_triton(x, residual, op.weight.data, EPS, 64, 0.0, op.cast_first, round_sum)
    want, want_total = op.forward_native(x, residual)
    assert torch.equal(total, want_total)
    assert int((y.view(torch.int16).int() - want.view(torch.int16).int()).abs().max()) <= 2


@pytest.mark.parametrize("width", [1, 64, 128, 4096, 8192, 32768])
@pytest.mark.parametrize("n_rows", [1, 16384])
@pytest.mark.parametrize("adds", [False, True])
def test_tiles_hold_whole_rows(width, n_rows, adds):
    cut = tile(width, n_rows, adds)
    assert cut.block >= width
    assert cut.rows * cut.block >= cut.warps * 32


@pytest.mark.parametrize(("width", "group"), [(1, 1), (6, 3), (64, 16), (65, 65), (4096, 4096)])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("by_sigmoid", [True, False])
def test_gate_and_groups(width, group, norm_first, by_sigmoid, dtype, close):
    x, z = torch.randn(3, width + 1).to(dtype)[:, 1:], torch.randn(3, width).to(dtype)
    weight = torch.randn(width)
    gate = torch.sigmoid(z.double()) * (1 if by_sigmoid else z.double())

    def normed(v: Tensor) -> Tensor:
        groups = v.double().unflatten(-1, (-1, group))
        return (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + EPS)).flatten(-2) * weight.double()

    want = normed(x) * gate if norm_first else normed(x * gate)
    close(rms_norm_gated_triton(x, z, weight, EPS, group, norm_first, by_sigmoid), want)
    close(rms_norm_gated_triton(x, None, weight, EPS, group, norm_first, by_sigmoid), normed(x))


@pytest.mark.parametrize("width", [1, 3, 65, 4096, 32769])
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm(width, affine, dtype, close):
    x = torch.randn(3, width + 1).to(dtype)[:, 1:]
    weight, bias = (torch.randn(width), torch.randn(width).half()) if affine else (None, None)
    want = torch.nn.functional.layer_norm(
        x.double(), (width,), weight if weight is None else weight.double(), bias if bias is None else bias.double(),
        EPS,
    )  # fmt: skip
    close(layer_norm_triton(x, weight, bias, EPS), want)


@pytest.mark.parametrize("width", [3, 65, 4096])
@pytest.mark.parametrize("round_sum", [True, False])
def test_layer_norm_of_a_sum(width, round_sum, dtype, close):
    x, residual = torch.randn(3, width + 1).to(dtype)[:, 1:], torch.randn(3, width).to(dtype)
    weight, bias = torch.randn(width), torch.randn(width)
    got, total = add_layer_norm_triton(x, residual, weight, bias, EPS, 1.0, round_sum)
    close(total, x.double() + residual.double())
    exact = total.double() if round_sum else x.double() + residual.double()
    close(got, torch.nn.functional.layer_norm(exact, (width,), weight.double() + 1, bias.double(), EPS))


def test_layer_norm_of_a_large_mean():
    x = torch.randn(2, 512) + 1e4
    want = torch.nn.functional.layer_norm(x.double(), (512,), eps=EPS)
    assert float((layer_norm_triton(x, None, None, EPS) - want).abs().max()) < 1e-3

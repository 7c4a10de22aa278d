"""Gated activation, embedding gather, cap and scale of logits, one-row linear."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from opmux.ops.activation.kernels_triton import silu_and_mul_triton
from opmux.ops.embedding.kernels_triton import embedding_triton
from opmux.ops.linear.kernels_triton import linear_one_row_triton
from opmux.ops.logits.kernels_triton import softcap_scale_triton


@pytest.mark.parametrize("width", [1, 2, 3, 7, 63, 65, 769, 2049])
def test_silu_and_mul_on_odd_widths_and_strides(width, dtype, close):
    x = (3 * torch.randn(7, 2 * width + 3)).to(dtype)[:, 2 : 2 * width + 2]
    gate, up = x.double().chunk(2, -1)
    close(silu_and_mul_triton(x, False), F.silu(gate) * up)
    close(silu_and_mul_triton(x.unflatten(0, (7, 1)), False), (F.silu(gate) * up).unsqueeze(1))


def test_silu_rounded_before_the_product():
    x = (3 * torch.randn(5, 130)).half()
    gate, up = x.chunk(2, -1)
    got, want = silu_and_mul_triton(x, True), F.silu(gate.float()).half() * up
    assert int((got.view(torch.int16).int() - want.view(torch.int16).int()).abs().max()) <= 2
    assert not torch.equal(got, silu_and_mul_triton(x, False))


def test_silu_edges():
    gate = torch.tensor([-65504.0, -1000.0, -40.0, -0.0, 0.0, 40.0, 65504.0, float("inf"), float("nan")])
    got = silu_and_mul_triton(torch.cat((gate, torch.full_like(gate, 2.0))), False)
    assert torch.allclose(got, 2 * F.silu(gate), atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (2, 0, 6)])
def test_silu_of_nothing(shape):
    assert silu_and_mul_triton(torch.randn(shape), False).shape == (*shape[:-1], shape[-1] // 2)


@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("width", [1, 65, 512, 4099])
def test_embedding_and_ids_outside(width, ids_dtype, dtype):
    table = torch.randn(10, width + 2).to(dtype)[:, 1:-1]
    ids = torch.tensor([[0, 9, 10], [-1, 3, 10**9]], dtype=ids_dtype)
    got = embedding_triton(ids, table)
    assert got.shape == (2, 3, width)
    assert torch.equal(got[0, :2], table[[0, 9]])
    assert torch.equal(got[1, 1], table[3])
    assert not got[0, 2].any()
    assert not got[1, [0, 2]].any()


def test_embedding_of_a_shard_with_added_tokens():
    table = torch.randn(8, 5)  # ids 20..23 in rows 0..3, rows 4 and 5 are padding, ids 100 and 101 in rows 6 and 7
    got = embedding_triton(torch.tensor([19, 20, 23, 24, 99, 100, 101, 102]), table, 20, 24, 100, 102, 6)
    want = torch.zeros(8, 5)
    want[[1, 2, 5, 6]] = table[[0, 3, 6, 7]]
    assert torch.equal(got, want)


def test_embedding_of_no_ids():
    assert embedding_triton(torch.zeros(2, 0, dtype=torch.long), torch.randn(3, 4)).shape == (2, 0, 4)


@pytest.mark.parametrize(("scale_first", "expected"), [(True, 6.1611), (False, 1.8702)])
def test_order_of_cap_and_scale(scale_first, expected):
    got = softcap_scale_triton(torch.tensor([[100.0]]), 1, 30.0, 0.0625, scale_first, None)
    assert abs(got.item() - expected) < 1e-4


def test_logits_cut_padding_and_change_dtype(dtype, close):
    x = (20 * torch.randn(3, 131)).to(dtype)
    x[:, 100:] = float("nan")
    close(softcap_scale_triton(x, 100, 30.0, 0.5, False, None), 15 * torch.tanh(x[:, :100].double() / 30))
    close(softcap_scale_triton(x, 100, None, 0.5, False, torch.float32), 0.5 * x[:, :100].double())


def test_cap_is_exact_for_small_and_large_values(close):
    x = torch.cat((torch.logspace(-8, 3, 200), -torch.logspace(-8, 3, 200), torch.tensor([float("inf"), 0.0])))
    got = softcap_scale_triton(x[None], x.numel(), 1.0, 1.0, False, None)[0]
    assert torch.allclose(got, torch.tanh(x.double()).float(), rtol=2e-6, atol=0.0)


@pytest.mark.parametrize("shape", [(1,), (), (1, 1)])
@pytest.mark.parametrize(("n_in", "n_out"), [(7, 5), (4097, 3), (2048, 8), (3, 0), (0, 2)])
def test_linear_on_one_row(n_in, n_out, shape, close):
    x, weight, bias = torch.randn(*shape, n_in).half(), torch.randn(n_out, n_in + 1).half(), torch.randn(n_out).half()
    weight = weight[:, 1:]
    close(linear_one_row_triton(x, weight, bias), x.double() @ weight.double().T + bias.double())
    close(linear_one_row_triton(x, weight, None), x.double() @ weight.double().T)


def test_linear_refuses_more_rows():
    with pytest.raises(ValueError, match="takes one row"):
        linear_one_row_triton(torch.randn(2, 4), torch.randn(3, 4), None)

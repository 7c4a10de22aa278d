"""The norms that the catalogue's small-kernel tests do not hold, and RMS norms whose operands differ in dtype."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from guards import LAYOUTS, Guard
from torch import Tensor

from opmux.native import library
from opmux.native.loader import Kernels, NativeLibrary
from opmux.ops import LayerNorm, RMSNorm, RMSNormGated
from opmux.ops.norm import kernels_cpu as norm

pytestmark = pytest.mark.skipif(not library.available, reason=f"compiled CPU library: {library.reason}")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 2, 3, 7, 63, 65, 769, 3584, 65537]


@pytest.fixture(params=library.supported(), autouse=True)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    kernels, guard = Kernels(NativeLibrary(variant=request.param)), Guard()
    monkeypatch.setattr(norm, "kernels", kernels)
    monkeypatch.setattr(norm, "new_like", guard.new_like)
    monkeypatch.setattr(norm, "torch", guard)
    yield request.param
    guard.check()


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def agree(out: Tensor, native: Tensor, share: float = 0.0) -> None:
    """Equal, but where an fp32 sum in another order moves a value over a boundary, in ``share`` of the elements."""
    assert out.dtype == native.dtype
    assert out.shape == native.shape
    if out.dtype == torch.float32:
        torch.testing.assert_close(out, native, rtol=3e-6, atol=3e-6)
        return
    torch.testing.assert_close(out, native, rtol=2 * torch.finfo(out.dtype).eps, atol=1e-6)
    assert (out != native).sum() <= share * out.numel()


# ---- RMS norm: the weight's dtype and the residual's (cases B20, B25) ----


@pytest.mark.parametrize(("dtype", "weight_dtype"), itertools.product(DTYPES, DTYPES))
@pytest.mark.parametrize("cast_order", ["cast_first", "cast_last"])
def test_product_is_taken_in_the_weights_dtype(dtype: torch.dtype, weight_dtype: torch.dtype, cast_order: str) -> None:
    op = RMSNorm(769, dtype=weight_dtype, cast_order=cast_order).requires_grad_(False)
    op.weight.copy_(torch.rand(769) * 4)
    x = random(7, 769, dtype=dtype)
    with torch.no_grad():
        out, native = op(x), op.forward_native(x)
        assert op.decision(x).method == "forward_cpu"
    if torch.float32 in (dtype, weight_dtype) and dtype != torch.float32:
        assert torch.equal(out, native) or (out != native).double().mean() < 1e-3
    if cast_order == "cast_first" and dtype == torch.float32 and weight_dtype != torch.float32:
        # Two roundings to the weight's dtype: a value on the other side of a boundary is one step of that dtype away.
        assert torch.equal(out, out.to(weight_dtype).float())
        assert (out != native).double().mean() <= 2e-3
        torch.testing.assert_close(out, native, rtol=2 * torch.finfo(weight_dtype).eps, atol=0)
    else:
        agree(out, native, share=2e-3)


def test_fp32_weight_rounds_the_value_once() -> None:
    """x bf16, weight fp32: no rounding before the product, so the answer is not the one of a bf16 weight."""
    x, weight = random(4, 64, dtype=torch.bfloat16), torch.rand(64).mul(4).bfloat16()
    wide = norm.rms_norm_cpu(x, weight.float(), 1e-6, 0, 0.0, True)
    assert torch.equal(wide, norm.rms_norm_cpu(x, weight.float(), 1e-6, 0, 0.0, False))
    assert 0.05 < (wide != norm.rms_norm_cpu(x, weight, 1e-6, 0, 0.0, True)).double().mean() < 0.5


@pytest.mark.parametrize(("dtype", "residual_dtype"), itertools.product(DTYPES, DTYPES))
@pytest.mark.parametrize("round_sum", [False, True])
def test_residual_of_another_dtype_is_added_unrounded(
    dtype: torch.dtype, residual_dtype: torch.dtype, round_sum: bool
) -> None:
    op = RMSNorm(769, dtype=dtype, cast_order="cast_last", round_sum=round_sum).requires_grad_(False)
    op.weight.copy_(random(769, dtype=dtype))
    x, residual = random(7, 769, dtype=dtype), random(7, 769, dtype=residual_dtype, seed=1)
    for layout in LAYOUTS[:3]:
        (out, summed), (native, native_sum) = op(layout(x), layout(residual)), op.forward_native(x, residual)
        assert summed.dtype == dtype
        assert torch.equal(summed, native_sum)
        agree(out, native, share=5e-3)


@pytest.mark.parametrize("shape", [(96,), (3, 96), (2, 3, 96), (2, 2, 3, 96)])
@pytest.mark.parametrize("has_weight", [False, True])
def test_every_rank_runs_on_the_kernel(shape: tuple[int, ...], has_weight: bool) -> None:  # case B25
    op = RMSNorm(96, has_weight=has_weight, dtype=torch.float32).requires_grad_(False)
    x = random(*shape, dtype=torch.bfloat16)
    agree(op(x), op.forward_native(x), share=1e-2)
    assert [route.decision.method for route in op.routes] == ["forward_cpu"]
    assert not op.routes[0].refusals


# ---- Gated RMS norm ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 5, 3, 64), (1, 1, 1, 80), (3, 0, 2, 16), (0, 4, 2, 16), (7, 2, 33), (2, 2, 5, 3, 7)])
def test_heads_of_a_wider_product_are_not_copied(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    *outer, heads, width = shape
    wide = torch.full((*outer, heads + 4, width), float("nan"), dtype=dtype)
    wide[..., 1 : heads + 1, :] = random(*shape, dtype=dtype)
    x, op = wide[..., 1 : heads + 1, :], RMSNorm(width, dtype=dtype).requires_grad_(False)
    op.weight.copy_(random(width, dtype=dtype))
    agree(op(x), op.forward_native(x), share=0.01)
    agree(op(x.transpose(0, 1)), op.forward_native(x.transpose(0, 1)), share=0.01)
    sparse = wide[..., 1 : heads + 1 : 2, :]
    agree(op(sparse), op.forward_native(sparse), share=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_gated(width: int, dtype: torch.dtype) -> None:
    rows = 7 if width < 60000 else 2
    x, z, weight = (
        random(rows, width, dtype=dtype),
        random(rows, width, dtype=dtype, seed=3),
        random(width, dtype=dtype),
    )
    for group in {width, 7 if width % 7 == 0 else 1 if width < 100 else width}:
        for before, activation in itertools.product((False, True), ("silu", "sigmoid")):
            op = RMSNormGated(width, 1e-5, group, before, dtype=dtype, activation=activation).requires_grad_(False)
            op.weight.copy_(weight)
            agree(op(x, z), op.forward_native(x, z), share=5e-3)
        agree(op(x), op.forward_native(x), share=5e-3)
    for layout in LAYOUTS[:3]:
        assert torch.equal(op(layout(x), layout(z)), op(x, z))


@pytest.mark.parametrize(("dtype", "other"), itertools.product(DTYPES, DTYPES))
def test_gate_and_weight_of_another_dtype(dtype: torch.dtype, other: torch.dtype) -> None:
    op = RMSNormGated(130, group_size=65, dtype=other).requires_grad_(False)
    op.weight.copy_(random(130, dtype=other))
    x, z = random(3, 130, dtype=dtype), random(3, 130, dtype=other, seed=3)
    agree(op(x, z), op.forward_native(x, z), share=1e-2)


def test_groups_are_normalised_on_their_own() -> None:  # case B28
    x = torch.tensor([[1.0, 1.0, 10.0, 10.0]])
    one = torch.tensor(1.2784645)  # silu of it is 1
    for group, want in ((2, [1.0, 1.0, 1.0, 1.0]), (4, [0.1407, 0.1407, 1.4072, 1.4072])):
        for before in (False, True):
            out = RMSNormGated(4, 0.0, group, before)(x, one.expand(1, 4)).detach()
            torch.testing.assert_close(out, torch.tensor([want]), atol=1e-4, rtol=0)


def test_gated_norm_refuses_at_construction() -> None:
    with pytest.raises(ValueError, match="cannot be split into groups of 5"):
        RMSNormGated(8, group_size=5)
    with pytest.raises(ValueError, match="'relu'; rms_norm_gated knows"):
        RMSNormGated(8, activation="relu")
    with pytest.raises(ValueError, match="takes a gate of x's shape"):
        RMSNormGated(8)(torch.ones(2, 8), torch.ones(1, 8))


# ---- Layer norm ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm_is_torchs(width: int, dtype: torch.dtype) -> None:
    rows = 7 if width < 60000 else 2
    x, weight, bias = random(rows, width, dtype=dtype), random(width, dtype=dtype), random(width, dtype=dtype, seed=5)
    for w, b in ((weight, bias), (weight, None), (None, None)):
        want = torch.nn.functional.layer_norm(
            x.double(), (width,), None if w is None else w.double(), None if b is None else b.double(), 1e-5
        )
        out = norm.layer_norm_cpu(x, w, b, 1e-5)
        assert out.dtype == dtype
        step = torch.finfo(dtype).eps if dtype != torch.float32 else 2e-6
        torch.testing.assert_close(out.double(), want, rtol=step, atol=step / 2)
    for layout in LAYOUTS[:3]:
        assert torch.equal(
            norm.layer_norm_cpu(layout(x), weight, bias, 1e-5), norm.layer_norm_cpu(x, weight, bias, 1e-5)
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3, 130, 769])
def test_layer_norm_of_a_rounded_sum_is_two_steps(width: int, dtype: torch.dtype) -> None:
    op = LayerNorm(width, dtype=dtype, weight_offset=1.0, round_sum=True).requires_grad_(False)
    op.weight.copy_(random(width, dtype=dtype))
    x, residual = random(5, width, dtype=dtype), random(5, width, dtype=dtype, seed=3)
    for layout in LAYOUTS[:3]:
        y, total = op(layout(x), layout(residual))
        assert torch.equal(total, x + residual)
        assert torch.equal(y, op(x + residual))


def test_layer_norm_refuses_another_residual() -> None:
    for other in (torch.ones(3, 8), torch.ones(2, 8).double()):
        with pytest.raises(ValueError, match="residual is"):
            LayerNorm(8)(torch.ones(2, 8), other)


@pytest.mark.parametrize(("dtype", "other"), itertools.product(DTYPES, DTYPES))
def test_layer_norm_with_parameters_of_another_dtype(dtype: torch.dtype, other: torch.dtype) -> None:
    op = LayerNorm(130, dtype=other).requires_grad_(False)
    op.weight.copy_(random(130, dtype=other))
    op.bias.copy_(random(130, dtype=other, seed=2))
    x = random(3, 130, dtype=dtype)
    agree(op(x), op.forward_native(x), share=1e-2)


def test_large_mean_costs_no_digits() -> None:  # case B58
    noise = random(2, 4096, dtype=torch.float32)
    x = (noise + 1e4).bfloat16()
    want = torch.nn.functional.layer_norm(x.double(), (4096,))
    torch.testing.assert_close(norm.layer_norm_cpu(x, None, None, 1e-5).double(), want, rtol=2**-8, atol=1e-4)
    half = torch.full((1, 64), 300.0, dtype=torch.float16)
    assert (norm.layer_norm_cpu(half, None, None, 1e-5) == 0).all()
    assert (norm.rms_norm_gated_cpu(half, None, torch.ones(64), 1e-5, 64, False, False) == 1).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_stay_in_their_rows(dtype: torch.dtype) -> None:
    x = random(3, 65, dtype=dtype)
    x[0, 64], x[1, 3] = float("nan"), float("inf")
    for out in (
        norm.layer_norm_cpu(x, None, None, 1e-5),
        norm.rms_norm_gated_cpu(x, torch.ones_like(x), torch.ones(65), 1e-5, 65, False, False),
    ):
        assert torch.isnan(out[0]).all()
        assert torch.isnan(out[1, 3])
        assert torch.isfinite(out[2]).all()

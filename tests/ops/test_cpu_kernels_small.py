"""The small CPU kernels against float64 references: odd widths, strides, offsets, special values, every variant.

Outputs are poisoned: they lie in the middle of larger buffers full of a sentinel, which must survive around them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from guards import LAYOUTS, Guard, offset, strided, transposed
from torch import Tensor

from opmux.native import library
from opmux.native.loader import Kernels, NativeLibrary
from opmux.ops.activation import kernels_cpu as activation
from opmux.ops.embedding import kernels_cpu as embedding
from opmux.ops.norm import kernels_cpu as norm
from opmux.ops.rope import kernels_cpu as rope

pytestmark = pytest.mark.skipif(not library.available, reason=f"compiled CPU library: {library.reason}")

WIDTHS = [1, 2, 3, 7, 63, 65, 576, 769, 4096, 65537]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Half a unit in the last place, and a little for fp32 arithmetic.
RTOL = {torch.float32: 3e-6, torch.bfloat16: 2**-8 * 1.01, torch.float16: 2**-11 * 1.02}
# Seven rows, so that a width that is no multiple of a vector gives rows at every alignment; fewer where rows are long.
ROWS = {65537: 2, 4096: 3}
ATOL = {torch.float32: 1e-7, torch.bfloat16: 1e-7, torch.float16: 6e-8}


@pytest.fixture(params=library.supported(), autouse=True)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each variant that this processor runs, side by side in one process, with guarded outputs."""
    kernels, guard = Kernels(NativeLibrary(variant=request.param)), Guard()
    for module in (norm, activation, rope, embedding):
        monkeypatch.setattr(module, "kernels", kernels)
        monkeypatch.setattr(module, "new_like", guard.new_like, raising=False)
        monkeypatch.setattr(module, "new_rows", guard.new_rows, raising=False)
        monkeypatch.setattr(module, "torch", guard, raising=False)
    yield request.param
    guard.check()


def close(out: Tensor, reference: Tensor, scale: Tensor | None = None) -> None:
    """Compare with a float64 reference; ``scale`` is the size of the terms that were added, where they may cancel."""
    assert torch.isfinite(out).all()
    assert reference.dtype == torch.float64
    size = reference.abs() if scale is None else torch.maximum(reference.abs(), scale * 1e-4)
    error = (out.double() - reference).abs()
    assert (error <= size * RTOL[out.dtype] + ATOL[out.dtype]).all(), f"worst {(error / (size + 1e-30)).max().item()}"


# ---- RMS norm ----


def norm_reference(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, size: int = 0, shift: float = 0.0, first: bool = False
) -> Tensor:
    v = x.double()
    y = v / torch.sqrt(v[..., : size or x.shape[-1]].square().mean(-1, keepdim=True) + eps)
    if first:
        y = y.to(x.dtype).double()
    return y if weight is None else y * (weight.double() + shift)


def llama(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """transformers' LlamaRMSNorm.forward."""
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x, weight = torch.randn(ROWS.get(width, 7), width).to(dtype), torch.randn(width).to(dtype)
    out = norm.rms_norm_cpu(x, weight, 1e-6, 0, 0.0, False)
    assert out.dtype == dtype
    close(out, norm_reference(x, weight))
    close(norm.rms_norm_cpu(x, None, 1e-6, 0, 0.0, True), norm_reference(x, None))
    close(norm.rms_norm_cpu(x, weight, 1e-6, 0, 1.0, False), norm_reference(x, weight, shift=1.0))
    size = max(1, width // 3)
    close(norm.rms_norm_cpu(x, weight, 1e-6, size, 0.0, False), norm_reference(x, weight, size=size))
    for layout in LAYOUTS:
        y = layout(x)
        assert torch.equal(
            norm.rms_norm_cpu(y, weight, 1e-6, 0, 0.0, True),
            norm.rms_norm_cpu(y.contiguous(), weight, 1e-6, 0, 0.0, True),
        )


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_in_bf16_is_the_transformers_body_bit_for_bit(width: int) -> None:
    torch.manual_seed(width)
    x, weight = torch.randn(ROWS.get(width, 7), width).bfloat16(), torch.randn(width).bfloat16()
    out, body = norm.rms_norm_cpu(x, weight, 1e-5, 0, 0.0, True), llama(x, weight, 1e-5)
    # Only where the fp32 mean differs in its last place may a value fall on the other side of a rounding boundary.
    assert (out != body).double().mean() <= 1e-4
    close(out, norm_reference(x, weight, 1e-5, first=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("round_sum", [False, True])
def test_add_rms_norm(width: int, dtype: torch.dtype, round_sum: bool) -> None:
    torch.manual_seed(width)
    x, residual, weight = (
        torch.randn(*shape).to(dtype) for shape in ((ROWS.get(width, 7), width), (ROWS.get(width, 7), width), (width,))
    )
    total = x.float() + residual.float()
    for layout in (lambda t: t, offset, strided, transposed):
        out, new_residual = norm.add_rms_norm_cpu(layout(x), layout(residual), weight, 1e-6, 0, 0.0, False, round_sum)
        assert torch.equal(new_residual, total.to(dtype))
        close(out, norm_reference(new_residual if round_sum else total, weight))


def test_cast_orders_differ_and_each_is_as_declared() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 64).bfloat16(), (torch.rand(64) * 4).bfloat16()
    first = norm.rms_norm_cpu(x, weight, 1e-6, 0, 0.0, True)
    last = norm.rms_norm_cpu(x, weight, 1e-6, 0, 0.0, False)
    assert torch.equal(first, llama(x, weight, 1e-6))
    assert torch.equal(last, norm_reference(x, weight).bfloat16())
    assert 0.05 < (first != last).double().mean() < 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_weight_of_another_dtype_keeps_the_input_dtype(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 65).to(dtype), torch.randn(65).to(weight_dtype)
    out = norm.rms_norm_cpu(x, weight, 1e-6, 0, 0.0, False)
    assert out.dtype == dtype
    close(out, norm_reference(x, weight))
    every_second = torch.randn(130).to(weight_dtype)[::2]
    close(norm.rms_norm_cpu(x, every_second, 1e-6, 0, 0.0, False), norm_reference(x, every_second))


def test_gemma_offset_is_added_in_fp32() -> None:  # case B05
    x = torch.tensor([[3.0]])
    assert norm.rms_norm_cpu(x, torch.tensor([15.8125]).bfloat16(), 0.0, 0, 1.0, False).item() == 16.8125
    assert norm.rms_norm_cpu(x, torch.tensor([0.00390625]).bfloat16(), 0.0, 0, 1.0, False).item() == 1.00390625


def test_half_precision_does_not_overflow_or_underflow() -> None:  # case B58
    half, ones = torch.float16, torch.ones(8).half()
    assert (norm.rms_norm_cpu(torch.full((1, 8), 300.0, dtype=half), ones, 1e-6, 0, 0.0, True) == 1).all()
    small = norm.rms_norm_cpu(torch.full((1, 8), 1e-4, dtype=half), ones, 1e-6, 0, 0.0, True)
    assert (small.float() - 0.0995).abs().max() < 1e-4
    big = torch.full((1, 8), 40000.0, dtype=half)
    out, residual = norm.add_rms_norm_cpu(big, big, ones, 1e-6, 0, 0.0, True, False)
    assert (out == 1).all()
    assert torch.isinf(residual).all()
    assert (norm.rms_norm_cpu(torch.full((1, 65536), 30.0, dtype=half), None, 1e-6, 0, 0.0, True) == 1).all()
    assert (norm.rms_norm_cpu(torch.zeros(2, 8, dtype=half), ones, 1e-6, 0, 0.0, True) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_nan_and_infinity(dtype: torch.dtype) -> None:
    x = torch.ones(3, 65).to(dtype)
    x[0, 64], x[1, 3] = float("nan"), float("inf")
    out = norm.rms_norm_cpu(x, None, 0.0, 0, 0.0, True)
    assert torch.isnan(out[0]).all()
    assert torch.isnan(out[1, 3])
    assert (out[1, :3] == 0).all()
    assert (out[2] == 1).all()


# ---- Activations ----

GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda g: g * torch.sigmoid(g),
    "gelu": lambda g: 0.5 * g * torch.special.erfc(-g / math.sqrt(2)),
    "gelu_tanh": lambda g: g * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)),
    "fatrelu": lambda g: torch.where(g > 0.25, g, 0.0),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", GATED)
@pytest.mark.parametrize("width", WIDTHS)
def test_gated_activations(width: int, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x = (torch.randn(ROWS.get(width, 7), 2 * width) * 2).to(dtype)
    reference = GATED[kind](x[:, :width].double()) * x[:, width:].double()
    out = activation.act_and_mul_cpu(x, kind, 0.25, False, False)
    close(out, reference)
    other = GATED[kind](x[:, width:].double()) * x[:, :width].double()
    close(activation.act_and_mul_cpu(x, kind, 0.25, False, True), other)
    assert torch.equal(activation.act_mul_cpu(x[:, :width], x[:, width:], kind, 0.25, False), out)
    for layout in LAYOUTS:
        y = layout(x)
        same = activation.act_and_mul_cpu(y.contiguous(), kind, 0.25, False, False)
        assert torch.equal(activation.act_and_mul_cpu(y, kind, 0.25, False, False), same)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_the_gate_is_what_eager_does(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(64, 2 * 1537) * 3).to(dtype)
    eager = F.silu(x[:, :1537]) * x[:, 1537:]
    out = activation.act_and_mul_cpu(x, "silu", 0.0, True, False)
    assert (out != eager).double().mean() <= 1e-4
    once = activation.act_and_mul_cpu(x, "silu", 0.0, False, False)
    assert 0.01 < (once != eager).double().mean() < 0.5


def every_half(dtype: torch.dtype) -> Tensor:
    """Every value of a 16-bit dtype, NaN and infinities included."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_is_loaded_and_stored_exactly(dtype: torch.dtype) -> None:
    x = every_half(dtype)
    out = activation.activation_cpu(x, "relu2", [])
    reference = torch.where(x < 0, 0.0, x.double()).square().float().to(dtype)  # the square of 11 bits is exact in fp32
    assert torch.equal(out, reference) or ((out == reference) | (out.isnan() & reference.isnan())).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_storing_rounds_to_nearest_even(dtype: torch.dtype) -> None:
    # Midpoints between neighbours, and their fp32 neighbours: products of two 16-bit values reach them all.
    values = every_half(dtype)
    values = values[torch.isfinite(values)]
    for factor in (1.5, 1.0078125, 0.99609375, 2**-9, 3 * 2**-12, 257 * 2**-8):
        other = torch.full_like(values, factor)
        out = activation.act_mul_cpu(values, other, "fatrelu", float("-inf"), False)
        assert torch.equal(out, (values.float() * other.float()).to(dtype))


SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-38, 1e-20, -1e-20, 87.0, -87.0, 88.7, 89.0, -89.0, -100.0,
           -103.9, -104.5, -200.0, 1e30, -1e30, float("inf"), float("nan")]  # fmt: skip


def test_silu_at_special_values() -> None:
    gate = torch.tensor(SPECIAL)
    out = activation.act_mul_cpu(gate, torch.ones_like(gate), "silu", 0.0, False)
    reference = F.silu(gate.double()).float()
    torch.testing.assert_close(out, reference, rtol=2e-6, atol=1e-35, equal_nan=True)
    minus_infinity = torch.tensor([float("-inf")])
    assert activation.act_mul_cpu(minus_infinity, torch.ones(1), "silu", 0.0, False).isnan()  # -inf * 0


@pytest.mark.parametrize(("kind", "approximate"), [("gelu", "none"), ("gelu_tanh", "tanh")])
def test_gelu_at_special_values(kind: str, approximate: str) -> None:
    gate = torch.tensor(SPECIAL)
    out = activation.act_mul_cpu(gate, torch.ones_like(gate), kind, 0.0, False)
    torch.testing.assert_close(
        out,
        F.gelu(gate.double(), approximate=approximate).float(),
        rtol=3e-6,
        atol=1e-30,
        equal_nan=True,
    )


def test_the_exponential_is_within_one_unit_in_the_last_place() -> None:
    x = torch.linspace(-80, 80, 1_000_003)
    # x / (1 + e^-x) with x << 0 is x e^x but for a factor that rounds to 1; xielu gives expm1 itself.
    out = activation.activation_cpu(x, "xielu", [0.0, 1.0, 0.0, 1e30])
    negative = x < 0
    reference = torch.expm1(x.double()) - x.double()
    scale = torch.expm1(x.double()).abs() + x.double().abs()
    assert ((out.double() - reference).abs()[negative] <= 1.5e-7 * scale[negative]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 65, 769])
def test_elementwise_activations(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x = (torch.randn(5, width) * 2).to(dtype)
    v = x.double()
    ap, an, beta, eps = 0.75, 1.25, 0.5, -1e-6
    xielu = torch.where(v > 0, ap * v * v, (torch.expm1(torch.clamp(v, max=eps)) - v) * an) + beta * v
    references = {
        "gelu_tanh": GATED["gelu_tanh"](v),
        "quick_gelu": v * torch.sigmoid(1.702 * v),
        "relu2": torch.relu(v).square(),
        "xielu": xielu,
    }
    for kind, reference in references.items():
        parameters = [ap, an, beta, eps] if kind == "xielu" else []
        for layout in (lambda t: t, offset, strided, transposed):
            close(
                activation.activation_cpu(layout(x), kind, parameters), reference, v.abs() if kind == "xielu" else None
            )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 15, 65, 769])
def test_swigluoai_and_sparse_gelu(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x = (torch.randn(5, 2 * width) * 5).to(dtype)
    v = x.double()
    gate, up = v[:, ::2].clamp(max=7.0), v[:, 1::2].clamp(-7.0, 7.0)
    reference = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    for layout in (lambda t: t, offset, strided, transposed):
        close(activation.swigluoai_and_mul_cpu(layout(x), 1.702, 7.0), reference)
    gate, up = v[:, :width], v[:, width:]
    cutoff = gate.mean(-1, keepdim=True) + 0.5 * gate.std(-1, keepdim=True, unbiased=False)
    reference = GATED["gelu_tanh"](torch.relu(gate - cutoff)) * up
    out = activation.gelu_and_mul_sparse_cpu(x, 0.5, True)
    # Near the cutoff a difference of two near numbers is all that is left.
    assert ((out.double() - reference).abs() <= reference.abs() * 2 * RTOL[dtype] + 3e-5).all()


def test_activation_answers_from_the_specification() -> None:
    assert torch.allclose(
        activation.swigluoai_and_mul_cpu(torch.tensor([[100.0, 100, -100, -100]]), 1.702, 7.0),
        torch.tensor([[56.0, 0.0]]),
        atol=1e-3,
    )
    gate = torch.tensor([0.25, 0.2500001, float("nan"), -1.0])
    out = activation.act_mul_cpu(gate, torch.ones(4), "fatrelu", 0.25, False)
    torch.testing.assert_close(out, torch.tensor([0.0, 0.2500001, float("nan"), 0.0]), rtol=0, atol=0, equal_nan=True)
    assert activation.activation_cpu(torch.tensor([float("-inf")]), "gelu_tanh", []).isnan()
    assert activation.activation_cpu(torch.tensor([float("inf"), -100.0]), "gelu_tanh", []).tolist() == [
        float("inf"),
        0.0,
    ]
    assert torch.isinf(activation.activation_cpu(torch.tensor([300.0]).half(), "relu2", []))


# ---- Rotary embedding ----


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, interleaved: bool) -> Tensor:
    """x [..., D]; cos and sin broadcast to [..., rotary_dim / 2]."""
    v, half = x.double(), rotary_dim // 2
    a, b = (v[..., 0:rotary_dim:2], v[..., 1:rotary_dim:2]) if interleaved else (v[..., :half], v[..., half:rotary_dim])
    rotated = [a * cos.double() - b * sin.double(), b * cos.double() + a * sin.double()]
    y = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    return torch.cat([y, v[..., rotary_dim:]], -1)


def guarded_table(rows: int, rotary_dim: int) -> Tensor:
    """A table at the very end of its allocation, NaN before it."""
    angles = torch.arange(rows)[:, None] * 10000.0 ** (-torch.arange(rotary_dim // 2) * 2 / rotary_dim)
    storage = torch.full(((rows + 1) * rotary_dim,), float("nan"))
    storage[rotary_dim:] = torch.cat([angles.cos(), angles.sin()], -1).flatten()
    return storage[rotary_dim:].view(rows, rotary_dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(2, 2), (64, 64), (256, 64), (80, 32), (96, 0), (130, 66), (1100, 1100)]
)
def test_rotary_embedding(head_dim: int, rotary_dim: int, interleaved: bool, dtype: torch.dtype) -> None:  # B41
    torch.manual_seed(head_dim)
    table = guarded_table(128, max(rotary_dim, 2))[:, :rotary_dim] if rotary_dim else torch.empty(128, 0)
    positions = torch.tensor([127, 0, 5, 127, 64])
    query, key = (torch.randn(5, n, head_dim).to(dtype) for n in (3, 2))
    cos, sin = table[positions][:, None].chunk(2, -1) if rotary_dim else (torch.empty(5, 1, 0),) * 2
    for layout in (lambda t: t, offset, strided, transposed):
        out = rope.rotary_embedding_cpu(
            positions, table, layout(query), layout(key), rotary_dim, interleaved, False, False
        )
        for got, x in zip(out, (query, key), strict=True):
            close(got, rope_reference(x, cos, sin, rotary_dim, interleaved), x.double().abs().amax() * 1e3)
            assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])
            assert got.data_ptr() != x.data_ptr()
    (alone,) = rope.rotary_embedding_cpu(positions.int(), table, query, None, rotary_dim, interleaved, False, False)
    assert torch.equal(alone, out[0])


def test_pairings_from_the_specification() -> None:  # case B10
    table, x = torch.tensor([[0.0, 0, 1, 1]]), torch.tensor([[[1.0, 2, 3, 4]]])
    zero = torch.zeros(1, dtype=torch.int64)
    assert rope.rotary_embedding_cpu(zero, table, x, None, 4, False, False, False)[0].tolist() == [[[-3, -4, 1, 2]]]
    assert rope.rotary_embedding_cpu(zero, table, x, None, 4, True, False, False)[0].tolist() == [[[-2, 1, -4, 3]]]


@pytest.mark.parametrize("position", [128, 10**6, -1, -(2**63), 2**31 + 5])
def test_a_position_outside_the_table_raises(position: int) -> None:  # case B43
    positions, table = torch.tensor([0, 127, position]), guarded_table(128, 8)
    query = torch.randn(3, 1, 8)
    with pytest.raises(IndexError, match=rf"position {position} of token 2 .* 128 positions"):
        rope.rotary_embedding_cpu(positions, table, query, None, 8, False, False, False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batches", [1, 2])
def test_rotate_query_key_is_the_transformers_body_bit_for_bit(dtype: torch.dtype, batches: int) -> None:
    torch.manual_seed(0)
    query, key = (torch.randn(batches, 5, n, 64).to(dtype).transpose(1, 2) for n in (9, 3))
    angles = torch.randn(batches, 5, 64)  # both halves, different on purpose: the body does not need them equal
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def body(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos[:, None] + torch.cat([-x[..., 32:], x[..., :32]], -1) * sin[:, None]

    got = rope.rotate_query_key_cpu(query, key, cos, sin, True)
    for out, x in zip(got, (query, key), strict=True):
        assert torch.equal(out, body(x, cos, sin))
        assert out.stride() == x.stride()
    one = rope.rotate_query_key_cpu(query, key, cos[:1], sin[:1], True)
    assert torch.equal(one[0], body(query, cos[:1], sin[:1]))
    fused = torch.randn(batches, 5, 15 * 64).to(dtype)
    views = [t.unflatten(-1, (-1, 64)).transpose(1, 2) for t in fused.split([9 * 64, 3 * 64, 3 * 64], -1)]
    for out, x in zip(rope.rotate_query_key_cpu(views[0], views[1], cos, sin, True), views, strict=False):
        assert torch.equal(out, body(x, cos, sin))
    once = rope.rotate_query_key_cpu(query, key, cos, sin, False)[0]
    close(once, body(query.double(), cos.double(), sin.double()), query.double().abs().amax() * 1e3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_apply_rotary_emb(dtype: torch.dtype, interleaved: bool) -> None:
    x, angles = torch.randn(2, 7, 3, 80).to(dtype), torch.randn(7, 40)
    cos, sin = angles.cos(), angles.sin()
    reference = rope_reference(x, cos[:, None], sin[:, None], 80, interleaved)
    for layout in (lambda t: t, offset, strided, transposed):
        out = rope.apply_rotary_emb_cpu(layout(x), cos, sin, interleaved, False, False)
        close(out, reference, x.double().abs().amax() * 1e3)
    rounded = rope.apply_rotary_emb_cpu(x, cos, sin, interleaved, True, False)
    low = rope.apply_rotary_emb_cpu(x, cos.to(dtype), sin.to(dtype), interleaved, False, False)
    assert torch.equal(rounded, low)


# ---- Embedding ----


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8, torch.float64])
@pytest.mark.parametrize("width", [1, 7, 576])
def test_embedding(width: int, dtype: torch.dtype) -> None:
    table = (torch.randn(50, width) * 10).to(dtype)
    ids = torch.randint(0, 50, (3, 11))
    for indices in (ids, ids.int(), ids.t()):
        assert torch.equal(embedding.embedding_cpu(indices, table, 0, False), table[indices])
    assert torch.equal(
        embedding.embedding_cpu(ids, strided(table), 0, False) if dtype.is_floating_point else table[ids], table[ids]
    )
    shard = embedding.embedding_cpu(ids, table[10:20], 10, True)
    owned = ((ids >= 10) & (ids < 20))[..., None]
    assert torch.equal(shard, torch.where(owned, table[ids], torch.zeros((), dtype=dtype)))


@pytest.mark.parametrize("bad", [50, -1, 2**40, -(2**63)])
def test_an_id_outside_the_table(bad: int) -> None:
    table, ids = torch.randn(50, 8), torch.tensor([[0, 49], [bad, 3]])
    with pytest.raises(IndexError, match=rf"id {bad} .* 0 to 49"):
        embedding.embedding_cpu(ids, table, 0, False)
    assert (embedding.embedding_cpu(ids, table, 0, True)[1, 0] == 0).all()


# ---- All kernels ----


def test_zero_rows_give_empty_outputs() -> None:  # case B02
    x = torch.empty(0, 14)
    assert norm.rms_norm_cpu(x, torch.ones(14), 1e-6, 0, 0.0, True).shape == (0, 14)
    assert [t.shape for t in norm.add_rms_norm_cpu(x, x, None, 1e-6, 0, 0.0, True, False)] == [(0, 14), (0, 14)]
    assert activation.act_and_mul_cpu(x, "silu", 0.0, False, False).shape == (0, 7)
    assert activation.act_and_mul_cpu(torch.empty(3, 0), "silu", 0.0, False, False).shape == (3, 0)
    assert activation.activation_cpu(x, "relu2", []).shape == (0, 14)
    assert activation.swigluoai_and_mul_cpu(torch.empty(2, 0, 14), 1.702, 7.0).shape == (2, 0, 7)
    assert activation.gelu_and_mul_sparse_cpu(x, 1.0, True).shape == (0, 7)
    none = torch.empty(0, dtype=torch.int64)
    assert rope.rotary_embedding_cpu(none, guarded_table(4, 8), torch.empty(0, 2, 8), None, 8, False, False, False)[
        0
    ].shape == (0, 2, 8)
    assert rope.apply_rotary_emb_cpu(
        torch.empty(1, 0, 2, 8), torch.empty(0, 4), torch.empty(0, 4), False, False, False
    ).shape == (1, 0, 2, 8)
    assert embedding.embedding_cpu(none, torch.randn(5, 8), 0, False).shape == (0, 8)


def test_leading_dimensions() -> None:
    x = torch.randn(2, 3, 5, 16)
    assert norm.rms_norm_cpu(x, None, 1e-6, 0, 0.0, True).shape == x.shape
    assert norm.rms_norm_cpu(x[0, 0, 0], None, 1e-6, 0, 0.0, True).shape == (16,)
    permuted = x.permute(1, 2, 0, 3)
    close(norm.rms_norm_cpu(permuted, None, 1e-6, 0, 0.0, True), norm_reference(permuted, None))
    assert activation.act_and_mul_cpu(x[0, 0, 0], "silu", 0.0, False, False).shape == (8,)
    close(
        activation.act_and_mul_cpu(permuted, "silu", 0.0, False, False),
        F.silu(permuted[..., :8].double()) * permuted[..., 8:].double(),
    )


def test_offsets_beyond_32_bits() -> None:  # case B16: 1025 rows 2^21 elements apart, on memory that is never touched
    rows, stride = 1025, 2**21
    storage = torch.empty(rows * stride, dtype=torch.bfloat16)
    x = storage.as_strided((rows, 64), (stride, 1))
    x.zero_()
    x[-1] = torch.randn(64)
    last = x[-1:].clone()
    assert torch.equal(
        norm.rms_norm_cpu(x, None, 1e-6, 0, 0.0, True)[-1:], norm.rms_norm_cpu(last, None, 1e-6, 0, 0.0, True)
    )
    assert torch.equal(
        activation.act_and_mul_cpu(x, "silu", 0.0, False, False)[-1:],
        activation.act_and_mul_cpu(last, "silu", 0.0, False, False),
    )
    assert torch.equal(embedding.embedding_cpu(torch.tensor([rows - 1]), x, 0, False), last)
    heads, table = x[:, None], guarded_table(rows, 64)
    at = torch.arange(rows)
    (turned,) = rope.rotary_embedding_cpu(at, table, heads, None, 64, False, False, False)
    assert torch.equal(
        turned[-1:], rope.rotary_embedding_cpu(at[-1:], table, last[:, None], None, 64, False, False, False)[0]
    )


def test_repeated_runs_are_identical() -> None:
    x = torch.randn(64, 8192).bfloat16()
    first = norm.rms_norm_cpu(x, None, 1e-6, 0, 0.0, True)
    assert all(torch.equal(norm.rms_norm_cpu(x, None, 1e-6, 0, 0.0, True), first) for _ in range(20))


def test_outputs_never_alias_inputs() -> None:  # case B19
    x = torch.ones(2, 16)
    out, residual = norm.add_rms_norm_cpu(x, torch.zeros(2, 16), None, 0.0, 0, 0.0, True, False)
    pointers = {t.data_ptr() for t in (x, out, residual, norm.rms_norm_cpu(x, None, 0.0, 0, 0.0, True))}
    assert len(pointers) == 4

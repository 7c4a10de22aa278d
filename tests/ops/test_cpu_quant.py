"""fp8 quantization: the kernels are native bit for bit, in every mode, layout and variant, and fused is unfused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from guards import LAYOUTS, Guard, expanded
from torch import Tensor

from opmux.native import library
from opmux.native.loader import Kernels, NativeLibrary
from opmux.ops import GroupShape, QuantFP8, RMSNorm, RMSNormQuant, SiluAndMul, SiluAndMulQuant
from opmux.ops.activation import kernels_cpu as activation
from opmux.ops.norm import kernels_cpu as norm
from opmux.ops.quant import kernels_cpu as quant

pytestmark = pytest.mark.skipif(not library.available, reason=f"compiled CPU library: {library.reason}")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMATS = [torch.float8_e4m3fn, torch.float8_e4m3fnuz]
MOST = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 224.0}
TENSOR, TOKEN, CHANNEL = GroupShape.PER_TENSOR, GroupShape.PER_TOKEN, GroupShape.PER_CHANNEL
DYNAMIC = [TENSOR, TOKEN, GroupShape(1, 128), GroupShape(1, 3)]
WIDTHS = [1, 3, 7, 65, 200, 769, 65537]


@pytest.fixture(params=library.supported(), autouse=True)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    kernels, guard = Kernels(NativeLibrary(variant=request.param)), Guard()
    for module in (activation, norm, quant):
        monkeypatch.setattr(module, "kernels", kernels)
        monkeypatch.setattr(module, "new_like", guard.new_like)
        monkeypatch.setattr(module, "torch", guard)
    yield request.param
    guard.check()


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * 3).to(dtype)


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> None:
    """Equal bit for bit; a NaN is a NaN."""
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert torch.equal(x.isnan(), y.isnan())
        numbers = ~x.float().isnan()
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
        assert torch.equal(x.contiguous().view(width)[numbers], y.contiguous().view(width)[numbers])


# ---- The rounding ----


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_torchs_cast_of_saturated_values(dtype: torch.dtype, form: torch.dtype) -> None:
    """Every number of 16 bits; in fp32 every number of the format, every tie between two, and their neighbours."""
    if dtype == torch.float32:
        codes = torch.arange(256, dtype=torch.uint8).view(form).float()
        codes = codes[codes.isfinite() & (codes.abs() <= MOST[form])].sort().values
        points = torch.cat([codes, (codes[1:] + codes[:-1]) / 2])
        x = torch.cat([points, points.nextafter(torch.tensor(1e9)), points.nextafter(torch.tensor(-1e9))])
        x = torch.cat([x, torch.tensor([1e6, -1e6, 3e38, 1e-40, -1e-40, -0.0, torch.inf, -torch.inf, torch.nan])])
        x = torch.cat([x, torch.randn(20_000) * 2.0 ** torch.randint(-14, 10, (20_000,))])
    else:
        x = torch.arange(65536).to(torch.uint16).view(dtype)
    op = QuantFP8(True, TENSOR, dtype=form)
    out, _ = op(x, torch.ones(1))
    same((out,), (x.float().clamp(-MOST[form], MOST[form]).to(form),))


def test_named_values() -> None:  # case B38
    inf, nan = torch.inf, torch.nan
    x = torch.tensor([447, 448, 449, 464, 480, 1e6, inf, -inf, nan, 224, 240, 256, 2**-9, 2**-10, 3 * 2**-10, 17, 19])
    for form in FORMATS:
        op, most = QuantFP8(True, TENSOR, dtype=form), MOST[form]
        out = op(x, torch.ones(1))[0].float()
        assert (out[:6] == most).all()
        assert out[6:8].tolist() == [most, -most]
        assert out[8].isnan()
        assert out[9:12].tolist() == [min(v, most) for v in (224, 240, 256)]
        assert out[15:].tolist() == [16, 20]  # ties to even
    out = QuantFP8(True, TENSOR)(x, torch.ones(1))[0].float()
    assert out[12:15].tolist() == [2**-9, 0, 2**-8]


# ---- Scales ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_dynamic_is_native_bit_for_bit(width: int, dtype: torch.dtype) -> None:
    x = random(7 if width < 60000 else 2, width, dtype=dtype)
    for shape, form in itertools.product(DYNAMIC, FORMATS):
        if width > 60000 and shape == (1, 3):
            continue
        op = QuantFP8(False, shape, dtype=form)
        same(op(x), op.forward_native(x))
    op = QuantFP8(False, GroupShape(1, 128), use_ue8m0=True)
    same(op(x), op.forward_native(x))
    for layout in LAYOUTS:
        if layout is not expanded:
            same(op(layout(x)), op(x))
            same(QuantFP8(False, TOKEN)(layout(x)), QuantFP8(False, TOKEN)(x))
    assert op.decision(x).method == "forward_cpu"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("group_shape", "shape"),
    [(TENSOR, ()), (TENSOR, (1,)), (TOKEN, (1,)), (TOKEN, (6,)), (TOKEN, (6, 1)), (CHANNEL, (130,)), ((2, 65), (3, 2)),
     ((6, 13), (1, 10))],
)  # fmt: skip
def test_static_scales(group_shape: tuple[int, int], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, scale = random(6, 130, dtype=dtype), torch.rand(shape) * 0.1 + 0.001
    op = QuantFP8(True, group_shape)
    out, returned = op(x, scale)
    same((out, returned), op.forward_native(x, scale))
    assert returned.data_ptr() != scale.data_ptr()
    error = (out.float() * _spread(returned, x) - x.float()).abs()
    saturated = x.float().abs() > 448 * _spread(returned, x)
    assert (error[~saturated] <= (x.float().abs() / 16 + 2**-10 * _spread(returned, x))[~saturated]).all()


def _spread(scale: Tensor, x: Tensor) -> Tensor:
    if scale.dim() < 2:
        return scale
    return scale.repeat_interleave(x.shape[0] // scale.shape[0], 0).repeat_interleave(x.shape[1] // scale.shape[1], 1)


def test_zero_rows_and_tiny_rows() -> None:  # case B08
    buffer = torch.full((5, 200), 1e30).bfloat16()
    x = buffer[1:4]
    x.copy_(random(3, 200, dtype=torch.bfloat16))
    x[1] = 0
    x[2, :100] = 1e-9
    least = 1 / (448 * 512)
    for op in (QuantFP8(False, TOKEN), QuantFP8(False, GroupShape(1, 64))):
        out, scale = op(x)
        assert (out[1].float() == 0).all()
        assert torch.allclose(scale[1], torch.tensor(least))
        assert scale.dtype == torch.float32
        same((out, scale), op.forward_native(x))
    assert (out[2, :64].float() == 0).all()
    out, scale = QuantFP8(False, TENSOR)(torch.zeros(3, 256))
    assert (out.float() == 0).all()
    assert scale.item() == pytest.approx(least)
    power = QuantFP8(False, GroupShape(1, 128), use_ue8m0=True)(torch.zeros(1, 128))[1]
    assert power.item() == 2.0**-17  # the floor is rounded up too


def test_scale_bound_and_remainder() -> None:  # case B38
    x = torch.tensor([[1000.0, 1.0, -3.0]])
    out, scale = QuantFP8(False, TOKEN)(x, None, torch.tensor([100.0]))
    assert scale.item() == pytest.approx(100 / 448)
    assert out.float().tolist() == [[448.0, 4.5, -13.0]]
    x = random(2, 200, dtype=torch.float32)
    out, scale = QuantFP8(False, GroupShape(1, 128))(x)
    rest, rest_scale = QuantFP8(False, GroupShape(1, 128))(x[:, 128:])
    same((out[:, 128:].contiguous(), scale[:, 1:].contiguous()), (rest, rest_scale))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity(dtype: torch.dtype) -> None:
    x = random(3, 65, dtype=dtype)
    x[0, 64], x[1, 3] = torch.nan, torch.inf
    for shape, power in itertools.product(DYNAMIC, (False, True)):
        op = QuantFP8(False, shape, use_ue8m0=power)
        same(op(x), op.forward_native(x))
    out, scale = QuantFP8(False, TOKEN)(x)
    assert scale[0].isnan()
    assert scale[1].isinf()
    assert out[0].float().isnan().all()
    assert out[2].float().isfinite().all()


def test_powers_of_two_are_exact() -> None:
    """Maxima around 448 * 2^k: a logarithm would err at some of them."""
    scales = 2.0 ** torch.arange(-17, 100)
    x = torch.stack([scales, scales.nextafter(torch.tensor(1e38)), scales.nextafter(torch.tensor(0.0))]).T.reshape(
        -1, 1
    )
    out = QuantFP8(False, GroupShape(1, 1), use_ue8m0=True)(x * 448)[1]
    want = torch.stack([scales, scales * 2, scales], 1).reshape(-1, 1)
    assert torch.equal(out, want.clamp(min=2.0**-17))


def test_memory_order_of_group_scales() -> None:
    x = random(7, 384, dtype=torch.bfloat16)
    plain = QuantFP8(False, GroupShape(1, 128))(x)[1]
    for aligned, strides in ((False, (1, 7)), (True, (1, 8))):
        op = QuantFP8(False, GroupShape(1, 128), column_major_scales=True, tma_aligned_scales=aligned)
        for scale in (op(x)[1], op.forward_native(x)[1]):
            assert scale.stride() == strides
            assert torch.equal(scale, plain)
    batch = op(x.expand(2, 7, 384))[1]
    assert batch.stride()[1:] == (1, 8)
    assert torch.equal(batch[1], plain)


def test_padding_adds_rows_of_zeros_without_scales() -> None:
    x = random(3, 64, dtype=torch.bfloat16)
    for op in (QuantFP8(False, TOKEN, num_token_padding=5), QuantFP8(False, TENSOR, 5)):
        out, scale = op(x)
        plain, plain_scale = QuantFP8(False, op.group_shape)(x)
        assert out.shape == (5, 64)
        assert (out[3:].float() == 0).all()
        same((out[:3], scale), (plain, plain_scale))
        same(op(x), op.forward_native(x))
    assert QuantFP8(False, TOKEN, 2)(x)[0].shape == (3, 64)


@pytest.mark.parametrize("shape", [(0, 128), (0,), (3, 0), (2, 0, 128), (130,), (2, 3, 130)])
def test_every_rank_and_no_rows(shape: tuple[int, ...]) -> None:  # case B02
    x = random(*shape, dtype=torch.bfloat16)
    for group in DYNAMIC:
        op = QuantFP8(False, group)
        same(op(x), op.forward_native(x))
    op = QuantFP8(True, TENSOR)
    same(op(x, torch.tensor(0.5)), op.forward_native(x, torch.tensor(0.5)))


def test_refusals() -> None:
    x = torch.ones(4, 6)
    with pytest.raises(ValueError, match="per tensor, per token or per group"):
        QuantFP8(False, CHANNEL)
    with pytest.raises(ValueError, match="quant_fp8 knows"):
        QuantFP8(False, TOKEN, dtype=torch.float8_e5m2)
    with pytest.raises(ValueError, match="needs a scale"):
        QuantFP8(True, TENSOR)(x)
    with pytest.raises(ValueError, match="computes the scale"):
        QuantFP8(False, TENSOR)(x, torch.ones(1))
    with pytest.raises(ValueError, match="does not fit"):
        QuantFP8(True, TOKEN)(x, torch.ones(3))
    with pytest.raises(ValueError, match="scale_ub bounds"):
        QuantFP8(False, TENSOR)(x, None, torch.ones(1))
    with pytest.raises(TypeError, match="floating-point"):
        QuantFP8(False, TENSOR)(x.int())
    for build in (lambda **k: SiluAndMulQuant(**k), lambda **k: RMSNormQuant(6, **k)):
        with pytest.raises(ValueError, match="for a dynamic scale of the whole tensor use quant_fp8"):
            build(static=False, group_shape=TENSOR)


# ---- Fused ----

KINDS = [(True, TENSOR), (False, TOKEN), (False, GroupShape(1, 128))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 65, 769, 3584])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_silu_and_mul_quant_is_the_two_ops(kind: tuple[bool, GroupShape], width: int, dtype: torch.dtype) -> None:
    x = random(7, 2 * width, dtype=dtype)
    scale = (torch.tensor([0.02]),) if kind[0] else ()
    for round_gate, form in itertools.product((False, True), FORMATS):
        fused = SiluAndMulQuant(*kind, round_gate=round_gate, dtype=form)
        out = fused(x, *scale)
        same(out, QuantFP8(*kind, dtype=form)(SiluAndMul(round_gate=round_gate)(x), *scale))
    for layout in LAYOUTS[:3]:
        same(fused(layout(x), *scale), out)
    assert fused.decision(x, *scale).method == "forward_cpu"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 65, 769, 3584])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rms_norm_quant_is_the_two_ops(kind: tuple[bool, GroupShape], width: int, dtype: torch.dtype) -> None:
    x, residual = random(7, width, dtype=dtype), random(7, width, dtype=dtype, seed=2)
    scale = torch.tensor([0.02]) if kind[0] else None
    static, group_shape = kind
    for order, weight_dtype in (("cast_first", dtype), ("cast_last", torch.float32)):
        fused = RMSNormQuant(
            width, static=static, group_shape=group_shape, weight_dtype=weight_dtype, cast_order=order
        ).requires_grad_(False)
        fused.norm.weight.copy_(random(width, dtype=torch.float32))
        parts = RMSNorm(width, dtype=weight_dtype, cast_order=order).requires_grad_(False)
        parts.weight = fused.norm.weight
        quantize = QuantFP8(static, group_shape)
        same(fused(x, None, scale), quantize(parts(x), scale))
        y, summed = parts(x, residual)
        same(fused(x, residual, scale), (*quantize(y, scale), summed))
    for layout in LAYOUTS[:3]:
        same(fused(layout(x), layout(residual), scale), fused(x, residual, scale))
    assert fused.decision(x, residual, scale).method == "forward_cpu"


def test_fused_options_are_quant_fp8s() -> None:
    x = random(5, 512, dtype=torch.bfloat16)
    options = {"use_ue8m0": True, "column_major_scales": True}
    fused = SiluAndMulQuant(False, GroupShape(1, 128), **options)
    out, scale = fused(x)
    same((out, scale), QuantFP8(False, GroupShape(1, 128), **options)(SiluAndMul()(x)))
    assert scale.stride() == (1, 5)
    padded = RMSNormQuant(512, static=False, group_shape=TOKEN, num_token_padding=8, has_weight=False)
    assert padded(x)[0].shape == (8, 512)
    channel = RMSNormQuant(512, static=True, group_shape=CHANNEL, has_weight=False)
    factors = torch.rand(512) + 0.01
    same(channel(x, None, factors), channel.forward_native(x, None, factors))

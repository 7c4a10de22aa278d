"""Checks the Triton kernels of the first ops on a GPU: every dtype, real and odd shapes, strides, 64-bit offsets.

    python benchmarks/gpu_checks.py                     # everything
    python benchmarks/gpu_checks.py norm:bf16 64-bit    # one check for one dtype, one for every dtype

References are float64 on the same inputs. What Triton's interpreter cannot tell (bf16 rounding, matrix units) is here.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from opmux import ops
from opmux.core import registry
from opmux.core.cases import Inputs, Tolerance
from opmux.core.requires import requirements_of
from opmux.ops.activation import kernels_triton as activation
from opmux.ops.attention import kernels_triton as attention
from opmux.ops.embedding import kernels_triton as embedding
from opmux.ops.linear import kernels_triton as linear
from opmux.ops.logits import kernels_triton as logits
from opmux.ops.norm import kernels_triton as norm
from opmux.ops.quant import kernels_triton as quant
from opmux.ops.quant.fp8 import GroupShape
from opmux.ops.quant.quant_fp8 import QuantFP8
from opmux.ops.rope import kernels_triton as rope
from opmux.ops.rope.rotate import rotate

DEVICE = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"fp32": FP32, "fp16": FP16, "bf16": BF16}
EPS = 1e-6
# Relative L2 error against float64: one rounding of uniform mantissas gives 0.0017 in bf16 and 0.0002 in fp16.
TOLERANCE = {FP32: 1e-6, FP16: 4e-4, BF16: 2.6e-3}

_failures: list[str] = []
_checks = 0


def expect(what: str, good: bool, detail: object = "") -> None:
    """Count a check and print it when it fails."""
    global _checks
    _checks += 1
    if not good:
        _failures.append(what)
        print("FAIL", what, detail, flush=True)


def close(what: str, out: Tensor, reference: Tensor, factor: float = 1.0) -> None:
    """The relative L2 error is within the dtype's tolerance, and NaN never passes.

    Of a few numbers the error is no average: one that lies half a unit off may be most of the norm. They are compared
    one by one, in units of their root mean square where they are smaller.
    """
    reference = reference.double()
    if out.numel() < 64 and factor == 1.0:
        worst = Tolerance(1.0, 16.0, scale=1.0).worst(out, reference)
        expect(f"{what} {str(out.dtype)[6:]}", worst <= (16.0 if out.dtype == FP32 else 0.75), f"{worst:.2f} ulp")
        return
    error = ((out.double() - reference).norm() / reference.norm().clamp(min=1e-30)).item()
    expect(
        f"{what} {str(out.dtype)[6:]}", out.shape == reference.shape and error <= factor * TOLERANCE[out.dtype], error
    )


def randn(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    """Random numbers, in memory whose neighbours and earlier contents are NaN."""
    poison = torch.full((2 * max(1, torch.Size(shape).numel()),), float("nan"), device=DEVICE, dtype=dtype)
    del poison
    return torch.randn(*shape, device=DEVICE, dtype=dtype) * scale


def qkv(b: int, s: int, length: int, n: int, k: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random query, key and value."""
    return randn(b, s, n, d), randn(b, length, k, d), randn(b, length, k, d)


def table_of(positions: int, rotary: int) -> Tensor:
    """A rope table [positions, rotary]."""
    frequencies = 1.0 / 10000 ** (torch.arange(0, rotary, 2, device=DEVICE) / rotary)
    angles = torch.arange(positions, device=DEVICE)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1)


def norm_reference(x: Tensor, w: Tensor | None, n: int, offset: float = 0.0) -> Tensor:
    """The RMS norm in float64."""
    y = x * torch.rsqrt(x[..., :n].square().mean(-1, keepdim=True) + EPS)
    return y if w is None else y * (w.double() + offset)


def check_norm(dtype: torch.dtype) -> None:
    """Real sizes, odd widths, strides, mixed weight dtypes, both flags."""
    sizes = [(t, h) for h in (4096, 8192) for t in (1, 64, 1024)]
    odd = [(7, h) for h in (1, 2, 3, 7, 63, 65, 769, 3584, 16384, 65535, 65536, 65537, 131072)] + [
        (65536, 128),
        (33, 96),
    ]
    for t, h in sizes + odd:
        x, r, w = randn(t, h + 1, dtype=dtype)[:, 1:], randn(t, h, dtype=dtype), randn(h, dtype=dtype)
        for source, name in ((x.contiguous(), "dense"), (x, "strided")):
            y = norm.rms_norm_triton(source, w, EPS, h, 0.0, False)
            close(f"rms_norm [{t},{h}] {name}", y, norm_reference(x.double(), w, h))
            y, total = norm.add_rms_norm_triton(source, r, w.float(), EPS, max(1, h // 2), 1.0, False, False)
            close(f"add_rms_norm [{t},{h}] {name}", y, norm_reference(x.double() + r.double(), w, max(1, h // 2), 1.0))
            expect(f"add_rms_norm sum [{t},{h}] {name} {dtype}", torch.equal(total, (x.float() + r.float()).to(dtype)))
        y, total = norm.add_rms_norm_triton(x, r, w, EPS, h, 0.0, True, True)
        body = total.float() * torch.rsqrt(total.float().square().mean(-1, keepdim=True) + EPS)
        body = w * body.to(dtype)
        expect(f"cast_first round_sum [{t},{h}] {dtype}", ulps(y, body) <= (8 if dtype == FP32 else 2), ulps(y, body))


def check_other_norms(dtype: torch.dtype) -> None:
    """Gated and layer norms, and the norm of heads before their rotation."""
    for t, h, group in ((64, 4096, 4096), (1024, 4096, 512), (7, 769, 769), (7, 6, 3), (2, 65537, 65537)):
        x, z, w = randn(t, h + 1, dtype=dtype)[:, 1:], randn(t, h, dtype=dtype), randn(h, dtype=dtype)
        gate = F.silu(z.double())
        for first in (True, False):
            groups = (x.double() if first else x.double() * gate).unflatten(-1, (-1, group))
            want = norm_reference(groups, None, group).flatten(-2) * w.double() * (gate if first else 1.0)
            close(f"gated [{t},{h}] {group}", norm.rms_norm_gated_triton(x, z, w, EPS, group, first, False), want)
        y = norm.layer_norm_triton(x, w, z[0], EPS)
        want = F.layer_norm(x.double(), (h,), w.double(), z[0].double(), EPS)
        close(f"layer_norm [{t},{h}]", y, want, 1.001)  # what cancels has no ulp to count
    for t, n, k, d, r, neox in ((64, 32, 8, 128, 128, True), (9, 3, 2, 80, 32, True), (9, 3, 2, 64, 64, False)):
        table, positions = table_of(4096, r), torch.randint(0, 4096, (t,), device=DEVICE)
        packed, qw, kw = randn(t, (n + 2 * k) * d, dtype=dtype), randn(d, dtype=dtype), randn(d, dtype=dtype)
        q, key, _ = packed.split([n * d, k * d, k * d], -1)
        cos, sin = table[positions].double()[:, None].chunk(2, -1)
        got = rope.qk_norm_rope_triton(positions, q, key, qw, kw, EPS, d, table, neox)
        for y, x, w, heads in zip(got, (q, key), (qw, kw), (n, k), strict=True):
            normed = norm_reference(x.unflatten(-1, (heads, d)).double(), w, d).flatten(1)
            close(f"qk_norm_rope {t} {d} {r} {neox}", y, rope_reference(normed, heads, d, r, cos, sin, neox), 2.0)


def ulps(a: Tensor, b: Tensor) -> int:
    """The largest distance in units in the last place."""
    if a.numel() == 0:
        return 0
    integer = torch.int32 if a.dtype == FP32 else torch.int16
    left, right = (t.contiguous().view(integer).long() for t in (a, b))
    least = torch.iinfo(integer).min
    left, right = (torch.where(t < 0, least - t, t) for t in (left, right))
    return int((left - right).abs().max())


def check_activation(dtype: torch.dtype) -> None:
    """Both roundings, odd widths, strides."""
    for t, d in [(1, 14336), (64, 14336), (1024, 14336)] + [(7, d) for d in (1, 2, 3, 7, 63, 65, 769, 65537)]:
        x = randn(t, 2 * d + 1, dtype=dtype, scale=3.0)[:, 1:]
        gate, up = x.double().chunk(2, -1)
        for source in (x, x.contiguous()):
            close(f"silu_and_mul [{t},{d}]", activation.silu_and_mul_triton(source, False), F.silu(gate) * up)
            y = activation.silu_and_mul_triton(source, True)
            body = F.silu(x[:, :d].float()).to(dtype) * x[:, d:]
            expect(
                f"silu_and_mul rounded gate [{t},{d}] {dtype}",
                ulps(y, body) <= (64 if dtype == FP32 else 2),
                ulps(y, body),
            )
    edge = torch.tensor([-65504.0, -1000, -40, -13.24, -0.0, 0.0, 11, 65504, float("inf"), float("nan")], device=DEVICE)
    x = torch.cat([edge, torch.full_like(edge, 2.0)]).to(dtype)
    y, body = activation.silu_and_mul_triton(x[None], False)[0], F.silu(x[:10].float()) * 2
    expect(
        f"silu_and_mul edges {dtype}", torch.allclose(y.float(), body.to(dtype).float(), 1e-2, 1e-6, equal_nan=True), y
    )


def rope_reference(x: Tensor, heads: int, d: int, r: int, cos: Tensor, sin: Tensor, neox: bool) -> Tensor:
    """The rotation in float64 of x [T, heads * d]."""
    x = x.reshape(-1, heads, d).double()
    return torch.cat([rotate(x[..., :r], cos, sin, neox), x[..., r:]], -1).flatten(1)


def check_rope(dtype: torch.dtype) -> None:
    """Both pairings, partial rotary, packed q and k, 3-D queries, bad positions, transformers' layout."""
    sizes = [(t, 32, 8, 128, 128) for t in (1, 64, 1024)]
    for t, n, k, d, r in [
        *sizes,
        (5, 3, 1, 80, 32),
        (9, 3, 2, 256, 64),
        (7, 1, 1, 6, 2),
        (5, 2, 1, 64, 0),
        (33, 9, 3, 64, 64),
    ]:
        for neox in (True, False):
            cache = table_of(4096, r) if r else torch.empty(4096, 0, device=DEVICE)
            packed = randn(t, (n + 2 * k) * d, dtype=dtype)
            q, key = packed[:, : n * d], packed[:, n * d : (n + k) * d]
            positions = torch.randint(0, 4096, (t,), device=DEVICE)
            positions[-1] = 4095
            cos, sin = cache[positions].double()[:, None].chunk(2, -1)

            reference = functools.partial(rope_reference, d=d, r=r, cos=cos, sin=sin, neox=neox)

            what = f"T={t} {n}+{k}x{d} R={r} neox={neox}"
            a, b = rope.rotary_embedding(positions, q, key, d, cache, neox)
            close(f"rotary q {what}", a, reference(q, n))
            close(f"rotary k {what}", b, reference(key, k))
            expect(f"rotary tail {what} {dtype}", torch.equal(a.view(t, n, d)[..., r:], q.reshape(t, n, d)[..., r:]))
            alone, none = rope.rotary_embedding(positions.int(), q.unflatten(-1, (n, d)), None, d, cache, neox)
            # Another compilation may contract other products into fused multiply-adds: the same to a rounding.
            expect(f"rotary without key {what} {dtype}", none is None)
            close(f"rotary without key {what}", alone.flatten(1), reference(q, n))
            positions[0] = 10**6
            a, _ = rope.rotary_embedding(positions, q, key, d, cache, neox)
            expect(f"rotary bad position {what} {dtype}", bool(a[0].isnan().all()) and not bool(a[1:].isnan().any()))
            if r == d:
                q4, k4 = q.view(1, t, n, d).transpose(1, 2), key.view(1, t, k, d).transpose(1, 2)
                pair = (torch.cat([cos, cos], -1) if neox else cos.repeat_interleave(2, -1)).float()[None, :, 0]
                other = (torch.cat([sin, sin], -1) if neox else sin.repeat_interleave(2, -1)).float()[None, :, 0]
                y, z = rope.rotate_query_key_triton(q4, k4, pair, other, neox)
                close(f"rotate_query_key {what}", y.transpose(1, 2).reshape(t, -1), reference(q, n))
                close(f"rotate_query_key k {what}", z.transpose(1, 2).reshape(t, -1), reference(key, k))


def check_rest(dtype: torch.dtype) -> None:
    """Embedding, logits, few-row linear."""
    for v, h, t in ((128256, 4096, 64), (100, 769, 9), (3, 2, 5)):
        weight = randn(v, h, dtype=dtype)
        ids = torch.randint(-3, v + 3, (t,), device=DEVICE)
        good = (ids >= 0) & (ids < v)
        body = torch.where(good[:, None], weight[ids.clamp(0, v - 1)], 0)
        expect(f"embedding [{v},{h}] {dtype}", torch.equal(embedding.embedding_triton(ids, weight), body))
    for t, padded, v in ((64, 128256, 128256), (3, 128, 100), (2, 64, 3)):
        x = randn(t, padded, dtype=dtype, scale=20.0)
        x[:, v:] = float("nan")
        z = x[:, :v].double()
        y = logits.softcap_scale_triton(x, v, 30.0, 0.0625, False, None)
        close(f"logits cap, scale [{t},{v}]", y, 0.0625 * 30 * torch.tanh(z / 30))
        y = logits.softcap_scale_triton(x, v, 30.0, 0.0625, True, FP32)
        close(f"logits scale, cap [{t},{v}] from {dtype}", y, 30 * torch.tanh(z * 0.0625 / 30))
    for t, i, o in ((1, 4096, 4096), (1, 14336, 4096), (1, 65, 33), (1, 7, 5)):
        x, w, b = randn(t, i, dtype=dtype), randn(o, i, dtype=dtype, scale=i**-0.5), randn(o, dtype=dtype)
        close(
            f"linear [{t},{i}]x{o}", linear.linear_one_row_triton(x, w, b), x.double() @ w.double().T + b.double(), 4.0
        )


def check_quant(dtype: torch.dtype) -> None:
    """Every kind of scale on real and odd widths, both formats, against the definition on the same inputs."""
    kinds = [(True, GroupShape.PER_TENSOR)]
    kinds += [(False, k) for k in (GroupShape.PER_TENSOR, GroupShape.PER_TOKEN, GroupShape(1, 128), GroupShape(1, 5))]
    widths = (1, 7, 128, 200, 769, 4096, 14336, 33000)
    for format_ in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        for (static, kind), width in itertools.product(kinds, widths):
            op = QuantFP8(static, kind, dtype=format_)
            x = randn(65, width + 1, dtype=dtype, scale=3.0)[:, 1:]
            x[3], x[4, 0], x[5, 0] = 0.0, float("nan"), float("inf")
            for source in (x[:3], x[:4].contiguous(), x[6:], x[4:5], x[5:6]):
                scale = (torch.full((1,), 0.0153, device=DEVICE),) if static else ()
                (q, s), (want_q, want_s) = op.forward_cuda(source, *scale), op.forward_native(source, *scale)
                what = f"quant {tuple(source.shape)} {tuple(kind)} {'static' if static else ''} {format_} {dtype}"
                # To the bit, but for NaN, whose sign is the cast's own.
                expect(f"{what} scale", torch.allclose(s, want_s, rtol=0, atol=0, equal_nan=True))
                nan = want_q.float().isnan()
                expect(f"{what} nan", torch.equal(q.float().isnan(), nan))
                apart = (q.view(torch.uint8) != want_q.view(torch.uint8)) & ~nan
                expect(what, not bool(apart.any()), f"{int(apart.sum())} of {apart.numel()} bytes")


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, window: int, soft_cap: float
) -> Tensor:
    """Attention in float64; rows without a visible key are zeros."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    score = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if soft_cap:
        score = soft_cap * torch.tanh(score / soft_cap)
    if mask is not None:
        score = score.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else score + mask.double()
    length, tokens = k.shape[2], q.shape[2]
    distance = torch.arange(length - tokens, length, device=q.device)[:, None] - torch.arange(length, device=q.device)
    if causal:
        score = score.masked_fill((distance < 0) | ((distance >= window) if window else False), float("-inf"))
    weight = torch.softmax(score, -1).masked_fill((score == float("-inf")).all(-1, keepdim=True), 0.0)
    return (weight @ v).transpose(1, 2)


def check_attention(dtype: torch.dtype) -> None:
    """Head sizes, grouped queries, cache offsets, windows, caps, masks, decode with split keys."""
    shapes = [
        (1, 300, 300, 8, 2, 128), (2, 77, 77, 4, 4, 64), (1, 130, 259, 4, 1, 80), (1, 65, 65, 3, 3, 72),
        (2, 1, 1000, 8, 2, 128),
        (1, 3, 517, 6, 2, 96), (1, 200, 200, 2, 1, 256), (3, 1, 5, 4, 4, 32), (1, 1, 4096, 32, 8, 128),
    ]  # fmt: skip
    for b, s, length, n, k, d in shapes:
        q, key = randn(b, s, n, d, dtype=dtype), randn(b, k, length, d, dtype=dtype).transpose(1, 2)
        value = randn(b, length, k, d, dtype=dtype)
        some = torch.rand(b, 1, s, length, device=DEVICE) > 0.3
        some[0, :, 0] = False
        added = torch.randn(1, n, s, length, device=DEVICE)
        variants: Iterable[tuple[Tensor | None, bool, int, float]] = (
            (None, True, 0, 0.0), (None, False, 0, 0.0), (None, True, 37, 0.0), (None, True, 0, 5.0),
            (some, False, 0, 0.0), (some, True, 37, 0.0), (added, True, 0, 0.0),
        )  # fmt: skip
        for i, (mask, causal, window, cap) in enumerate(variants):
            if i >= 2 and d not in (128, 80):  # each is a compile of seconds
                continue
            y = attention.attention_triton(q, key, value, mask, d**-0.5, causal, window, cap)
            close(
                f"attention {(b, s, length, n, k, d)} #{i}",
                y,
                attention_reference(q, key, value, mask, causal, window, cap),
                4,
            )


def check_64_bit(dtype: torch.dtype) -> None:
    """bf16 only, for size. Offsets past 2^31: the last row is the row alone."""
    if dtype != BF16:
        return
    x = torch.zeros(61681, 34816, device=DEVICE, dtype=BF16)
    x[-1].normal_()
    y = activation.silu_and_mul_triton(x, False)
    expect(
        "64-bit silu_and_mul", torch.equal(y[-1:], activation.silu_and_mul_triton(x[-1:], False)) and not y[:-1].any()
    )
    del x, y
    x = torch.zeros(262145, 8192, device=DEVICE, dtype=BF16)
    x[-1].normal_()
    y = norm.rms_norm_triton(x, None, EPS, 8192, 0.0, False)
    expect("64-bit rms_norm", torch.equal(y[-1:], norm.rms_norm_triton(x[-1:], None, EPS, 8192, 0.0, False)))
    table = x.view(524290, 4096)
    ids = torch.tensor([524289, 0], device=DEVICE)
    expect("64-bit embedding", torch.equal(embedding.embedding_triton(ids, table)[0], table[-1]))
    positions = torch.arange(524290, device=DEVICE) % 4096
    a, _ = rope.rotary_embedding(positions, table, None, 128, table_of(4096, 128), True)
    b, _ = rope.rotary_embedding(positions[-1:], table[-1:], None, 128, table_of(4096, 128), True)
    expect("64-bit rotary", torch.equal(a[-1:], b))


def _guarded(part: Callable[[torch.dtype], None], dtype: torch.dtype) -> None:
    try:
        part(dtype)
    except Exception as error:  # the other parts still tell something
        expect(f"{part.__name__} {dtype}", False, f"{type(error).__name__}: {str(error)[:300]}")


def check_ops(dtype: torch.dtype) -> None:
    """Every op with a GPU method, called as a user calls it, on its own cases and within its own tolerance.

    With ``SHARE=i/n`` in the environment, the i-th of every n cases.
    """
    share, of = (int(part) for part in os.environ.get("SHARE", "0/1").split("/"))
    for name, cls in sorted(registry.op_registry.items()):
        if not hasattr(cls.forward_cuda, "__opmux_requires__"):
            continue
        for case in itertools.islice(cls.cases(), share, None, of):
            if cls.cost(case, dtype).size_bytes > 1e8:
                continue
            inputs = Inputs(dtype, DEVICE)
            op = case.build(cls, inputs)
            when = requirements_of(cls.forward_cuda).when
            if when is not None and when(op, *case.args(inputs)):
                continue
            got, want = op(*case.args(inputs)), op.double().forward_native(*(_double(a) for a in case.args(inputs)))
            pairs = zip(_tensors(got), _tensors(want), strict=True)
            for out, reference in pairs:
                worst = cls.tolerance.worst(out, reference)
                expect(f"op {name} {case.name} {dtype}", worst <= cls.tolerance.bound(out.dtype, dtype), f"{worst:.1f}")


def _tensors(value: object) -> list[Tensor]:
    return [t for t in (value if isinstance(value, tuple) else (value,)) if isinstance(t, Tensor)]


def _double(value: object) -> object:
    if isinstance(value, torch.nn.Module):
        return value.double()
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def check_odd(dtype: torch.dtype) -> None:
    """Few, small and odd: what a memory checker can run in a minute."""
    for width in (1, 7, 65, 769, 40001):
        x, w = randn(3, width + 1, dtype=dtype)[:, 1:], randn(width, dtype=dtype)
        y, _ = norm.add_rms_norm_triton(x, x, w, EPS, width, 0.0, False, False)
        close(f"odd add_rms_norm {width}", y, norm_reference(2 * x.double(), w, width))
    x = randn(3, 2 * 1025, dtype=dtype)
    gate, up = x.double().chunk(2, -1)
    close("odd silu_and_mul", activation.silu_and_mul_triton(x, False), F.silu(gate) * up)
    for d, r, neox in ((80, 32, True), (256, 64, False), (6, 2, True)):
        cache, positions = table_of(128, r), torch.tensor([0, 127, 128, 10**6, -1], device=DEVICE)
        q = randn(5, 3 * d, dtype=dtype)
        y, _ = rope.rotary_embedding(positions, q, q[:, :d], d, cache, neox)
        bad = y.isnan().all(1).tolist()
        expect(f"odd rotary {d} {r} {neox} {dtype}", bad == [False, False, True, True, True], bad)
    table, ids = randn(7, 65, dtype=dtype), torch.tensor([6, 7, -1, 10**9, 0], device=DEVICE)
    y = embedding.embedding_triton(ids, table)
    expect(f"odd embedding {dtype}", torch.equal(y[0], table[6]) and not y[1:4].any() and torch.equal(y[4], table[0]))
    z = randn(3, 130, dtype=dtype)
    y = logits.softcap_scale_triton(z, 101, 5.0, 2.0, False, None)
    close("odd logits", y, 10 * torch.tanh(z[:, :101].double() / 5))
    for group in (0, -1, 128, 5):
        q, s = quant.launch(randn(3, 769, dtype=dtype), None, None, torch.float8_e4m3fn, group, False)
        expect(f"odd quant {group} {dtype}", not bool(q.float().isnan().any()) and bool((s > 0).all()))
    x, w, b = randn(1, 65, dtype=dtype), randn(33, 65, dtype=dtype), randn(33, dtype=dtype)
    close("odd linear", linear.linear_one_row_triton(x, w, b), x.double() @ w.double().T + b.double(), 4.0)
    for s, length, d in ((5, 67, 72), (70, 70, 80), (1, 300, 40)):
        q, k, v = qkv(1, s, length, 4, 2, d)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        y = attention.attention_triton(q, k, v, None, d**-0.5, True, 0, 0.0)
        close(f"odd attention {s} {length} {d}", y, attention_reference(q, k, v, None, True, 0, 0.0), 4.0)


def check_streams(dtype: torch.dtype) -> None:
    """A kernel runs on the stream that is current."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = randn(64, 4096, dtype=dtype)
        y = norm.rms_norm_triton(x, None, EPS, 4096, 0.0, False)
    side.synchronize()
    close("side stream", y, norm_reference(x.double(), None, 4096))


CHECKS = {
    "norm": check_norm, "other-norms": check_other_norms, "activation": check_activation, "rope": check_rope,
    "rest": check_rest, "quant": check_quant, "attention": check_attention, "ops": check_ops, "odd": check_odd,
    "64-bit": check_64_bit, "streams": check_streams,
}  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run the checks that are named, or all."""
    torch.set_grad_enabled(False)
    ops.load_all()
    for argument in arguments or CHECKS:
        name, *only = argument.split(":")
        if name not in CHECKS or not set(only) <= set(DTYPES):
            print(
                f"unknown check {argument!r}; there are {', '.join(CHECKS)}, each with :{', :'.join(DTYPES)}",
                file=sys.stderr,
            )
            return 2
        started = time.perf_counter()
        for dtype in only or DTYPES:
            _guarded(CHECKS[name], DTYPES[dtype])
        took = time.perf_counter() - started
        print(f"CHECK {argument}: {_checks} checks so far, {len(_failures)} failed, {took:.0f} s", flush=True)
    return 1 if _failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

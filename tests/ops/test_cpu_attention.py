"""The CPU attention kernel against float64: grouped heads, odd lengths, caches, windows, masks, every variant."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from opmux.native import library
from opmux.native.loader import Kernels, NativeLibrary
from opmux.ops.attention import kernels_cpu as attention

pytestmark = pytest.mark.skipif(not library.available, reason=f"compiled CPU library: {library.reason}")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Weights are rounded to bf16 as well as the result.
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
SENTINEL = 12345.0
GUARD = 64


@pytest.fixture(params=library.supported(), autouse=True)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each variant that this processor runs; outputs lie between two guards."""
    guards: list[Tensor] = []

    def empty_like(template: Tensor) -> Tensor:
        size = template.numel()
        buffer = torch.full((size + 2 * GUARD,), SENTINEL, dtype=template.dtype)
        guards.append(buffer)
        return buffer[GUARD : GUARD + size].view(template.shape)

    guarded = SimpleNamespace(**{**vars(torch), "empty_like": empty_like})
    monkeypatch.setattr(attention, "kernels", Kernels(NativeLibrary(variant=request.param)))
    monkeypatch.setattr(attention, "torch", guarded)
    yield request.param
    for buffer in guards:
        wanted = torch.tensor(SENTINEL, dtype=buffer.dtype)
        assert (buffer[:GUARD] == wanted).all()
        assert (buffer[-GUARD:] == wanted).all()


def make(
    b: int, s: int, length: int, n: int, k: int, d: int, dv: int | None = None, *, dtype: torch.dtype
) -> list[Tensor]:
    g = torch.Generator().manual_seed(b + 7 * s + 11 * length + d)
    shapes = [(b, s, n, d), (b, length, k, d), (b, length, k, d if dv is None else dv)]
    return [torch.randn(shape, generator=g).to(dtype) for shape in shapes]


def exact(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, scale: float | None = None, causal: bool = True,
    window: int = 0, cap: float = 0.0, lengths: Tensor | None = None,
) -> Tensor:  # fmt: skip
    q, k, v = q.double(), k.double(), v.double()
    s, length, groups = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    scores = torch.einsum("bsnd,blnd->bnsl", q, k.repeat_interleave(groups, 2)) * (scale or q.shape[3] ** -0.5)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    ends = torch.full((q.shape[0],), length) if lengths is None else lengths
    at = (ends - s)[:, None, None, None] + torch.arange(s)[:, None]
    key = torch.arange(length)
    hidden = key >= ends[:, None, None, None]
    if causal:
        hidden = hidden | (key > at)
    if window:
        hidden = hidden | (key <= at - window)
    if mask is not None:
        mask = mask[..., :length]
        hidden, scores = (hidden | ~mask, scores) if mask.dtype == torch.bool else (hidden, scores + mask.double())
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1).nan_to_num()
    return torch.einsum("bnsl,blnd->bsnd", weights, v.repeat_interleave(groups, 2))


def run(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, scale: float | None = None, causal: bool = True,
    window: int = 0, cap: float = 0.0, lengths: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return attention.attention_cpu(q, k, v, mask, scale or q.shape[3] ** -0.5, causal, window, cap, lengths)


def check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> None:
    out, expected = run(q, k, v, mask, **options), exact(q, k, v, mask, **options)
    assert (out.shape, out.dtype) == (expected.shape, q.dtype)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[q.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [1, 3, 31, 32, 40, 64, 72, 80, 96, 128, 256])
def test_head_sizes(dtype: torch.dtype, d: int) -> None:
    for causal in (True, False):
        check(*make(2, 5, 9, 4, 2, d, dtype=dtype), causal=causal)
        check(*make(1, 70, 130, 3, 1, d, 48, dtype=dtype), causal=causal)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (8, 1), (5, 5), (70, 1)])
def test_groups_and_lengths(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    for s, length in ((1, 1), (1, 2), (1, 97), (2, 95), (7, 7), (16, 96), (33, 193)):
        check(*make(2, s, length, *heads, 16, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_cache_in_place(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    cache = [torch.randn(2, 3, 3000, 64, generator=g).to(dtype)[:, :, 5:2605].transpose(1, 2) for _ in range(2)]
    wide = torch.randn(2, 2600, 3, 200, generator=g).to(dtype)[..., 7:71]
    for s in (1, 3):
        q = torch.randn(2, 9, s, 64, generator=g).to(dtype).transpose(1, 2)
        check(q, *cache)
        check(q, *cache, window=1000)
        check(q, wide, cache[1], lengths=torch.tensor([2600, 431]))
        check(q[..., ::2], wide[..., ::2], cache[1][..., ::2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 5, 64, 150])
def test_windows(dtype: torch.dtype, window: int) -> None:
    for s, length in ((1, 700), (100, 100), (33, 300)):
        check(*make(1, s, length, 6, 2, 32, dtype=dtype), window=window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_scale_and_soft_cap(dtype: torch.dtype, cap: float) -> None:
    for scale in (0.01, 0.3, -0.2):
        check(*make(1, 20, 110, 4, 2, 64, dtype=dtype), scale=scale, cap=cap)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("floating", [False, True])
def test_masks(dtype: torch.dtype, floating: bool) -> None:
    g = torch.Generator().manual_seed(1)
    q, k, v = make(2, 40, 140, 4, 2, 32, dtype=dtype)
    for shape in ((1, 1, 40, 140), (2, 1, 40, 150), (2, 4, 40, 140), (2, 1, 1, 140)):
        mask = torch.rand(shape, generator=g) < 0.5
        mask[..., :100] = False  # a whole block unseen
        mask[:, :, -1] = True
        if floating:
            mask = torch.randn(shape, generator=g).masked_fill(~mask, float("-inf"))
        for causal in (True, False):
            # A mask of another dtype is rounded to the queries' before it is added.
            check(q, k, v, mask.to(dtype) if floating else mask, causal=causal)
    hidden = torch.rand(1, 1, 40, 140, generator=g) < 0.5
    check(q, k, v, torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min))


@pytest.mark.parametrize("dtype", DTYPES)
def test_left_padding(dtype: torch.dtype) -> None:
    q, k, v = make(3, 120, 120, 9, 3, 64, dtype=dtype)
    kept = torch.arange(120) >= torch.tensor([0, 50, 119])[:, None]
    mask = kept[:, None, None, :] & torch.ones(120, 120, dtype=torch.bool).tril()
    for causal in (True, False):
        check(q, k, v, mask, causal=causal)
    out = run(q, k, v, mask)
    assert (out[1, :50] == 0).all()
    assert (out[2, :119] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_nothing_are_zero(dtype: torch.dtype) -> None:
    q, k, v = make(2, 3, 400, 4, 2, 32, dtype=dtype)
    assert (run(q, k, v, torch.zeros(1, 1, 3, 400, dtype=torch.bool)) == 0).all()
    assert (run(q, k, v, torch.full((1, 1, 3, 400), float("-inf"))) == 0).all()
    check(q, k, v, lengths=torch.tensor([0, 2]))
    assert (run(*make(2, 3, 0, 4, 2, 32, dtype=dtype), causal=False) == 0).all()
    for empty in ((0, 3, 5, 4, 2, 32), (2, 0, 5, 4, 2, 32), (2, 0, 0, 4, 2, 32)):
        assert run(*make(*empty, dtype=dtype)).shape == (*empty[:2], 4, 32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_that_are_not_seen_are_not_read(dtype: torch.dtype) -> None:
    q, k, v = make(1, 2, 203, 4, 2, 64, dtype=dtype)
    expected = exact(q, k[:, :101], v[:, :101])
    k[:, 101:], v[:, 101:] = float("nan"), float("nan")
    out = run(q, k, v, lengths=torch.tensor([101]))
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_in_its_row(dtype: torch.dtype) -> None:
    q, k, v = make(1, 70, 70, 2, 1, 32, dtype=dtype)
    expected = exact(q, k, v)
    q[0, 3, 1, 5] = float("nan")
    out = run(q, k, v)
    assert out[0, 3, 1].isnan().all()
    out[0, 3, 1], expected[0, 3, 1] = 0, 0
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[dtype])


def test_bf16_is_as_accurate_as_torch() -> None:
    q, k, v = make(1, 512, 512, 9, 3, 64, dtype=torch.bfloat16)
    expected = exact(q, k, v)
    heads_first = [t.transpose(1, 2) for t in (q, k, v)]
    torchs = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)
    ours = run(q, k, v)
    assert (ours - expected).pow(2).mean() <= 1.1 * (torchs - expected).pow(2).mean()


def test_repeats_and_thread_counts_agree_bit_for_bit() -> None:
    threads = torch.get_num_threads()
    for s, length in ((1, 3000), (200, 200)):
        q, k, v = make(1, s, length, 9, 3, 64, dtype=torch.bfloat16)
        first = run(q, k, v)
        try:
            for count in (1, 2, 3, 1):
                torch.set_num_threads(count)
                for _ in range(3):
                    assert torch.equal(run(q, k, v), first)
        finally:
            torch.set_num_threads(threads)


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, v = make(2, 3, 5, 4, 2, 32, dtype=torch.float32)
    for bad in ((q, k[:, :4], v), (q, k, v[:1]), (q[:, :, :3], k, v), (q, k[..., :16], v), (q.bfloat16(), k, v)):
        with pytest.raises(ValueError, match="attention_cpu takes"):
            run(*bad)

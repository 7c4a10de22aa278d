"""The CPU linear kernels against float64: odd sizes, strides, offsets, special values, every variant."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from opmux.native import library
from opmux.native.loader import Kernels, NativeLibrary
from opmux.ops.linear import kernels_cpu as linear

pytestmark = pytest.mark.skipif(not library.available, reason=f"compiled CPU library: {library.reason}")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
UNIT = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}
SENTINEL = 12345.0
GUARD = 64


@pytest.fixture(params=library.supported(), autouse=True)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each variant that this processor runs; kernels take any number of tokens; outputs lie between two guards."""
    guards: list[Tensor] = []

    def empty_like(template: Tensor) -> Tensor:
        size = template.numel()
        buffer = torch.full((size + 2 * GUARD,), SENTINEL, dtype=template.dtype)
        guards.append(buffer)
        return buffer[GUARD : GUARD + size].view(template.shape)

    guarded = SimpleNamespace(**{**vars(torch), "empty_like": empty_like})
    linear._plan.cache_clear()
    monkeypatch.setattr(linear, "kernels", Kernels(NativeLibrary(variant=request.param)))
    monkeypatch.setattr(linear, "most_tokens", lambda dtype: 1 << 62)
    monkeypatch.setattr(linear, "torch", guarded)
    yield request.param
    linear._plan.cache_clear()
    for buffer in guards:
        wanted = torch.tensor(SENTINEL, dtype=buffer.dtype)
        assert (buffer[:GUARD] == wanted).all()
        assert (buffer[-GUARD:] == wanted).all()


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_right(y: Tensor, x: Tensor, w: Tensor, bias: Tensor | None = None) -> None:
    """Within half a unit of the last place, and fp32 accumulation's share of the sum of magnitudes."""
    exact = x.double() @ w.double().T
    magnitude = x.double().abs() @ w.double().abs().T
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    tiny = 2**-25 if y.dtype == torch.float16 else 0.0
    bound = exact.abs() * UNIT[y.dtype] * 1.01 + magnitude * 1e-6 + tiny
    assert ((y.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3, 7, 63, 65, 576, 769, 1536])
def test_odd_sizes(dtype: torch.dtype, width: int) -> None:
    for out in (1, 5, 64, 577):
        w, bias = randn(out, width, dtype=dtype, seed=1), randn(out, dtype=dtype, seed=2)
        for tokens in (0, 1, 2, 3, 7, 16, 17, 64):
            x = randn(tokens, width, dtype=dtype)
            y = linear.linear_cpu(x, w, bias if out % 2 else None)
            assert (y.shape, y.dtype) == ((tokens, out), dtype)
            assert_right(y, x, w, bias if out % 2 else None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, 8, 9, 40, 70])
def test_strides_and_offsets(dtype: torch.dtype, tokens: int) -> None:
    x = randn(tokens, 3, 130, dtype=dtype)[:, 1, 1:100]
    w = randn(75, 133, dtype=dtype, seed=1)[:, 3:102]
    assert_right(linear.linear_cpu(x, w, None), x, w)
    transposed = randn(99, 75, dtype=dtype, seed=2).t()
    bias = randn(150, dtype=dtype, seed=3)[::2]
    assert_right(linear.linear_cpu(x, transposed, bias), x, transposed, bias)
    batch = randn(99, tokens, 2, dtype=dtype).permute(2, 1, 0)
    y = linear.linear_cpu(batch, w, None)
    assert y.shape == (2, tokens, 75)
    assert_right(y.flatten(0, 1), batch.flatten(0, 1), w)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 4, 6, 8, 12, 70])
def test_rows_a_multiple_of_4_kb_apart(dtype: torch.dtype, tokens: int) -> None:
    x, w = randn(tokens, 4096, dtype=dtype), randn(20, 4096, dtype=dtype, seed=1)
    assert_right(linear.linear_cpu(x, w, None), x, w)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 33, 70])
def test_fused_equals_its_parts(dtype: torch.dtype, tokens: int) -> None:
    x, w, bias = randn(tokens, 576, dtype=dtype), randn(190, 576, dtype=dtype, seed=1), randn(190, dtype=dtype, seed=2)
    w *= 576**-0.5
    y = linear.linear_cpu(x, w, bias)
    residual = randn(tokens, 200, dtype=dtype, seed=3)[:, 3:193]
    assert torch.equal(linear.linear_add_cpu(x, w, bias, residual), residual + y)
    gate, up = y.chunk(2, -1)
    fused, parts = linear.linear_silu_and_mul_cpu(x, w, bias), F.silu(gate) * up
    # torch's exponential and ours may differ in the last bit of an fp32.
    torch.testing.assert_close(fused, parts, rtol=4 * 2**-23 if dtype == torch.float32 else 0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 4, 16, 17])
def test_nan_and_infinity_stay_in_their_rows(dtype: torch.dtype, tokens: int) -> None:
    x, w = randn(tokens, 65, dtype=dtype).abs(), randn(70, 65, dtype=dtype, seed=1).abs()
    x[0, 64], w[3, 2], w[4, 64] = float("inf"), float("nan"), float("-inf")
    y, expected = linear.linear_cpu(x, w, None), x.double() @ w.double().T
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y == float("inf"), expected == float("inf"))
    assert torch.equal(y == float("-inf"), expected == float("-inf"))


@pytest.mark.parametrize("tokens", [1, 9, 130])
def test_repeats_and_thread_counts_agree_bit_for_bit(tokens: int) -> None:
    x, w = randn(tokens, 576, dtype=torch.bfloat16), randn(960, 576, dtype=torch.bfloat16, seed=1)
    threads = torch.get_num_threads()
    first = linear.linear_cpu(x, w, None)
    try:
        for count in (1, 2, 3, 1, 4, 2):
            torch.set_num_threads(count)
            for _ in range(5):
                assert torch.equal(linear.linear_cpu(x, w, None), first)
    finally:
        torch.set_num_threads(threads)


def test_what_kernels_do_not_take_gets_torchs_answer() -> None:
    x, w = randn(2, 8, dtype=torch.float32), randn(4, 8, dtype=torch.float32)
    assert torch.equal(linear.linear_cpu(x.double(), w.double(), None), F.linear(x.double(), w.double()))
    with pytest.raises(RuntimeError):
        linear.linear_cpu(x, w.bfloat16(), None)
    with pytest.raises(RuntimeError):
        linear.linear_cpu(x, w[:, :7], None)
    assert linear.linear_cpu(x, w[:0], None).shape == (2, 0)
    assert torch.equal(linear.linear_cpu(x[:, :0], w[:, :0], torch.ones(4)), torch.ones(2, 4))


def _product(connection: Any, x: Tensor, w: Tensor) -> None:
    connection.send(linear.linear_cpu(x, w, None).tolist())


def test_child_after_fork_has_threads_of_its_own() -> None:
    x, w = randn(1, 576, dtype=torch.bfloat16), randn(960, 576, dtype=torch.bfloat16, seed=1)
    here = linear.linear_cpu(x, w, None)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_product, args=(sender, x, w))
    child.start()
    try:
        assert receiver.poll(20)
        assert receiver.recv() == here.tolist()
    finally:
        child.kill()
        child.join()

"""Triton kernels of the activations: one block of one row a program, fp32 inside, any row stride, a new output."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.torch_library import opaque
from ...native.layout import as_rows
from ...native.triton_launch import Launch, Launcher, kernel, new, new_like, next_power_of_2, plan


@triton.jit
def _times_sigmoid(x, u, PRECISE: tl.constexpr):
    """x * sigmoid(u), to about two units in the last place of fp32 where PRECISE; else as fast as 16 bits allow."""
    if PRECISE:
        # exp2 of the rounded product loses a unit for every factor e of the result; what the rounding lost is put back.
        t = -1.4426950408889634 * u
        lost = tl.fma(-1.4426950216293335, u, -t) - 1.9259629911266175e-08 * u
        e = tl.exp2(t)
        # Past that e is 0 or infinite, and what was lost may be no number.
        e = tl.where(tl.abs(t) < 128.0, e + e * (0.6931471805599453 * lost), e)
        return tl.div_rn(x, 1.0 + e)
    else:
        return x / (1.0 + tl.exp(-u))


@triton.jit
def activate(x, threshold, KIND: tl.constexpr, PRECISE: tl.constexpr):
    """The activation of fp32 x; PRECISE where the result stays fp32."""
    if KIND == "silu":
        y = _times_sigmoid(x, x, PRECISE)
    elif KIND == "quick_gelu":
        y = _times_sigmoid(x, 1.702 * x, PRECISE)
    elif KIND == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u, which neither overflows nor cancels in the tail.
        y = _times_sigmoid(x, 1.5957691216057308 * (x + 0.044715 * x * x * x), PRECISE)
    elif KIND == "fatrelu":
        y = tl.where(x <= threshold, 0.0, x)  # false for NaN, which stays
    else:
        tl.static_assert(KIND == "relu2")
        y = tl.where(x <= 0.0, 0.0, x * x)
    return y


@kernel(multiples=("x_stride", "width"))
def _gated_kernel(
    x_ptr, y_ptr, x_stride: tl.int64, width: tl.int64, blocks_per_row: tl.int32, threshold: tl.float32,
    BLOCK: tl.constexpr, EVEN: tl.constexpr, KIND: tl.constexpr, ROUND_GATE: tl.constexpr, GATE_SECOND: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // blocks_per_row).to(tl.int64)
    cols = (program % blocks_per_row) * BLOCK + tl.arange(0, BLOCK)
    mask = None if EVEN else cols < width
    first = tl.load(x_ptr + row * x_stride + cols, mask=mask, eviction_policy="evict_first").to(tl.float32)
    second = tl.load(x_ptr + row * x_stride + width + cols, mask=mask, eviction_policy="evict_first").to(tl.float32)
    gate = activate(second if GATE_SECOND else first, threshold, KIND, y_ptr.dtype.element_ty == tl.float32)
    if ROUND_GATE:
        gate = gate.to(y_ptr.dtype.element_ty).to(tl.float32)
    y = gate * (first if GATE_SECOND else second)
    tl.store(y_ptr + row * width + cols, y.to(y_ptr.dtype.element_ty), mask=mask, cache_modifier=".cs")


@kernel(multiples=("x_stride", "width"))
def _elementwise_kernel(
    x_ptr, y_ptr, x_stride: tl.int64, width: tl.int64, blocks_per_row: tl.int32,
    BLOCK: tl.constexpr, EVEN: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // blocks_per_row).to(tl.int64)
    cols = (program % blocks_per_row) * BLOCK + tl.arange(0, BLOCK)
    mask = None if EVEN else cols < width
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, eviction_policy="evict_first").to(tl.float32)
    y = activate(x, 0.0, KIND, y_ptr.dtype.element_ty == tl.float32)
    tl.store(y_ptr + row * width + cols, y.to(y_ptr.dtype.element_ty), mask=mask, cache_modifier=".cs")


@triton.jit
def _softplus(pointer):
    x = tl.load(pointer).to(tl.float32)
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))


@kernel(loose=("alpha_p_ptr", "alpha_n_ptr", "beta_ptr", "eps_ptr"), multiples=("x_stride", "width"))
def _xielu_kernel(
    x_ptr, y_ptr, alpha_p_ptr, alpha_n_ptr, beta_ptr, eps_ptr,
    x_stride: tl.int64, width: tl.int64, blocks_per_row: tl.int32, BLOCK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // blocks_per_row).to(tl.int64)
    cols = (program % blocks_per_row) * BLOCK + tl.arange(0, BLOCK)
    mask = None if EVEN else cols < width
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, eviction_policy="evict_first").to(tl.float32)
    beta = tl.load(beta_ptr).to(tl.float32)
    eps = tl.load(eps_ptr).to(tl.float32)
    low = tl.where(x < eps, x, eps)
    # exp(low) - 1 cancels near 0, where its series is short.
    series = 1.0 + low / 4 * (1.0 + low / 5 * (1.0 + low / 6 * (1.0 + low / 7)))
    series = low * (1.0 + low / 2 * (1.0 + low / 3 * series))
    expm1 = tl.where(low > -0.35, series, tl.exp(low) - 1.0)
    y = tl.where(x > 0.0, _softplus(alpha_p_ptr) * x * x, (expm1 - x) * (beta + _softplus(alpha_n_ptr))) + beta * x
    tl.store(y_ptr + row * width + cols, y.to(y_ptr.dtype.element_ty), mask=mask, cache_modifier=".cs")


@kernel(multiples=("x_stride", "width"))
def _swigluoai_kernel(
    x_ptr, y_ptr, x_stride: tl.int64, width: tl.int64, blocks_per_row: tl.int32, alpha: tl.float32, limit: tl.float32,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // blocks_per_row).to(tl.int64)
    block = program % blocks_per_row
    both = block * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    x = tl.load(x_ptr + row * x_stride + both, mask=both < 2 * width, other=0.0, eviction_policy="evict_first")
    gate, up = tl.split(tl.reshape(x.to(tl.float32), (BLOCK, 2)))
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    y = (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
    cols = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + row * width + cols, y.to(y_ptr.dtype.element_ty), mask=cols < width, cache_modifier=".cs")


@kernel(multiples=("x_stride", "width"))
def _sparse_kernel(
    x_ptr, y_ptr, x_stride: tl.int64, width: tl.int64, multiplier: tl.float32, BLOCK: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * width
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        sums += tl.load(x_ptr + cols, mask=cols < width, other=0.0).to(tl.float32)
    mean = tl.sum(sums, axis=0) / width
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        apart = tl.load(x_ptr + cols, mask=cols < width, other=0.0).to(tl.float32) - mean
        squares += tl.where(cols < width, apart * apart, 0.0)
    cutoff = mean + multiplier * tl.sqrt(tl.sum(squares, axis=0) / width)
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < width
        gate = tl.load(x_ptr + cols, mask=mask, other=0.0).to(tl.float32) - cutoff
        up = tl.load(x_ptr + width + cols, mask=mask, other=0.0).to(tl.float32)
        y = activate(tl.where(gate <= 0.0, 0.0, gate), 0.0, KIND, y_ptr.dtype.element_ty == tl.float32) * up
        tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


def tile(width: int, n_rows: int) -> tuple[int, int]:
    """``(block, warps)`` for ``n_rows`` rows of ``width`` elements.

    SwiGLU of d = 14336 in bf16, microseconds on an H200: 3.2 for 64 rows, 22.5 for 1024, 320.8 for 16384; 1024 and 4
    warps without streaming stores took 3.4, 23.8 and 337.
    """
    block = min(2048, next_power_of_2(width))
    if n_rows * width <= 64 * 1024:  # few elements: spread them over more processors
        block = min(block, 512)
    return block, 8 if block == 2048 else 4 if block >= 512 else 1


@plan
def _plan(
    function: Launcher,
    n_rows: int,
    width: int,
    x_stride: int,
    dtypes: tuple[torch.dtype, ...],
    scalars: tuple[float, ...] = (),
    constants: tuple[object, ...] = (),
    config: tuple[int, int] | None = None,
) -> Launch:
    """Blocks of rows of which ``width`` elements are written."""
    block, warps = config or tile(width, n_rows)
    per_row = -(-width // block)
    sizes = (block,) if function is _swigluoai_kernel else (block, width % block == 0)
    grid = (n_rows * per_row, 1, 1)
    return function.prepare(grid, (x_stride, width, per_row, *scalars), (*sizes, *constants), warps)


def launch(
    x: Tensor,
    kind: str,
    threshold: float,
    round_gate: bool,
    gate_second: bool,
    config: tuple[int, int] | None = None,
) -> Tensor:
    """``act_and_mul_triton`` with a tile other than ``tile``'s."""
    y, x, n_rows, width, x_stride = _rows_and_half(x)
    if n_rows:
        constants = (kind, round_gate, gate_second)
        _plan(_gated_kernel, n_rows, width, x_stride, (x.dtype,), (threshold,), constants, config)(x, y)
    return y


def _rows_and_half(x: Tensor) -> tuple[Tensor, Tensor, int, int, int]:
    """(output [..., d], x as rows, their number, d, their stride) for x [..., 2d]."""
    shape = x.shape
    width = shape[-1] // 2
    y = new((*shape[:-1], width), x.dtype, x.device)
    x, n_rows, _, x_stride = as_rows(x)
    return y, x, n_rows, width, x_stride


def _rows_and_whole(x: Tensor) -> tuple[Tensor, Tensor, int, int, int]:
    """(output like x, x as rows, their number, their width, their stride); one row where x is dense."""
    y = new_like(x)
    if x.is_contiguous() and x.numel() < 2**31:
        return y, x, min(1, x.numel()), x.numel(), x.numel()
    x, n_rows, width, x_stride = as_rows(x)
    return y, x, n_rows, width, x_stride


def _half(x: Tensor, *_: object) -> Tensor:
    return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)


def _whole(x: Tensor, *_: object) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@opaque(fake=_half)
def silu_and_mul_triton(x: Tensor, round_gate: bool) -> Tensor:
    """``silu(x[..., :d]) * x[..., d:]``; see ``act_and_mul_triton``."""
    return launch(x, "silu", 0.0, round_gate, False)


@opaque(fake=_half)
def act_and_mul_triton(x: Tensor, kind: str, threshold: float, round_gate: bool, gate_second: bool) -> Tensor:
    """``activation(x[..., :d]) * x[..., d:]`` for x [..., 2d] -> [..., d], contiguous.

    ``kind`` is silu, gelu, gelu_tanh or fatrelu (whose ``threshold`` it is); with ``gate_second`` it acts on the second
    half.
    Casts:   fp32, rounded once; with ``round_gate`` the activation is rounded to x's dtype before the product.
    Mutates: nothing.
    """
    return launch(x, kind, threshold, round_gate, gate_second)


@opaque(fake=_whole)
def activation_triton(x: Tensor, kind: str, parameters: list[float]) -> Tensor:
    """gelu, gelu_tanh, quick_gelu or relu2 of every element; fp32, rounded once. None of them has ``parameters``."""
    y, x, n_rows, width, x_stride = _rows_and_whole(x)
    if n_rows:
        _plan(_elementwise_kernel, n_rows, width, x_stride, (x.dtype,), (), (kind,))(x, y)
    return y


@opaque(fake=_whole)
def xielu_triton(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """xIELU of every element; fp32, rounded once. The parameters are scalars in tensors on x's device, which are not
    waited for; the slopes are stored as inverse softplus."""
    y, x, n_rows, width, x_stride = _rows_and_whole(x)
    if n_rows:
        dtypes = (x.dtype, alpha_p.dtype, alpha_n.dtype, beta.dtype, eps.dtype)
        _plan(_xielu_kernel, n_rows, width, x_stride, dtypes)(x, y, alpha_p, alpha_n, beta, eps)
    return y


@opaque(fake=_half)
def swigluoai_and_mul_triton(x: Tensor, alpha: float, limit: float) -> Tensor:
    """``(clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g)``, ``g = min(gate, limit)``; they alternate in x [...,
    2d].

    fp32, rounded once -> [..., d].
    """
    y, x, n_rows, width, x_stride = _rows_and_half(x)
    if n_rows:
        _plan(_swigluoai_kernel, n_rows, width, x_stride, (x.dtype,), (alpha, limit))(x, y)
    return y


@plan
def _sparse_plan(
    n_rows: int, width: int, x_stride: int, dtype: torch.dtype, multiplier: float, by_tanh: bool
) -> Launch:
    constants = (min(4096, next_power_of_2(width)), "gelu_tanh" if by_tanh else "gelu")
    return _sparse_kernel.prepare((n_rows, 1, 1), (x_stride, width, multiplier), constants, 8)


@opaque(fake=_half)
def gelu_and_mul_sparse_triton(x: Tensor, multiplier: float, by_tanh: bool) -> Tensor:
    """``gelu(relu(g - cutoff)) * x[..., d:]``, g = x[..., :d], cutoff = mean(g) + multiplier * population deviation(g).

    fp32, rounded once; x [..., 2d] -> [..., d].
    """
    y, x, n_rows, width, x_stride = _rows_and_half(x)
    if n_rows:
        _sparse_plan(n_rows, width, x_stride, x.dtype, multiplier, by_tanh)(x, y)
    return y

"""Triton kernels of fp8 quantization, alone, behind a SwiGLU gate, and behind an RMS norm.

One read of x and one write of fp8, whatever shares a scale; only the scale of a whole tensor takes a second read. A
maximum is taken of the absolute values' bits, as integers: that orders NaN above infinity, so that NaN survives.

The functions take and return what those of ``kernels_cpu`` do; scales and group sizes are explained there.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.torch_library import opaque
from ...native.layout import as_rows
from ...native.triton_launch import Launch, kernel, new, next_power_of_2, plan
from ..activation.kernels_triton import activate
from ..activation.kernels_triton import launch as launch_gated
from ..norm.kernels_triton import Tile, times_weight
from ..norm.kernels_triton import launch as launch_norm
from ..norm.kernels_triton import tile as norm_tile
from .fp8 import Fp8Format
from .kernels_cpu import ROW, TENSOR

_WIDEST_ROW_IN_REGISTERS = 32768
_MOST_PARTS = 512  # of a tensor whose largest value is sought


@triton.jit
def _fp8(y, MOST: tl.constexpr, FORMAT: tl.constexpr):
    """The bytes of y, saturated at +-MOST and rounded to even."""
    y = tl.minimum(y, MOST, propagate_nan=tl.PropagateNan.ALL)
    y = tl.maximum(y, -MOST, propagate_nan=tl.PropagateNan.ALL)
    if FORMAT == "hardware":
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    FNUZ: tl.constexpr = FORMAT == "fnuz"  # its exponents are one lower, 0x80 is NaN, and there is no -0
    bits = y.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Below the least normal number a sum rounds to a multiple of the step: the least bit of 2^23 steps is one step.
    steps = (size.to(tl.float32, bitcast=True) + (8192.0 if FNUZ else 16384.0)).to(tl.int32, bitcast=True)
    steps -= 0x46000000 if FNUZ else 0x46800000
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (952 if FNUZ else 960)
    code = tl.where(size < (0x3C000000 if FNUZ else 0x3C800000), steps, normal)
    signed = code | ((bits >> 24) & 0x80)
    if FNUZ:
        signed = tl.where(code == 0, 0, signed)
    return tl.where(size > 0x7F800000, 0x80 if FNUZ else 0x7F, signed).to(tl.uint8)


@triton.jit
def _magnitude(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale_of(amax_bits, MOST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """The dynamic scale for a largest absolute value, given as its bits."""
    scale = tl.div_rn(amax_bits.to(tl.float32, bitcast=True), MOST)
    least: tl.constexpr = 1.0 / (MOST * 512.0)
    scale = tl.where(scale < least, least, scale)  # false for NaN
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        above = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(bits < 0x7F800000, above, scale)
    return scale


@triton.jit
def _quotient(y, scale):
    """y / scale, rounded to nearest, at one reciprocal a scale: the product's remainder tells what its rounding lost.

    The signs keep -0, and an infinite scale takes no part in the remainder: it would make it NaN.
    """
    inverse = tl.div_rn(1.0, scale)
    product = y * inverse
    excess = tl.fma(product, tl.where(scale < float("inf"), scale, 0.0), -y)
    return tl.fma(-excess, inverse, product)


@triton.jit
def _values(x_ptr, at, width, mask, other, GATED: tl.constexpr, ROUND_GATE: tl.constexpr):
    """What is quantized, in fp32: x, or silu(x) times the values ``width`` further on, rounded to x's dtype."""
    x = tl.load(x_ptr + at, mask=mask, other=other)
    if not GATED:
        return x.to(tl.float32)
    up = tl.load(x_ptr + at + width, mask=mask, other=other).to(tl.float32)
    gate = activate(x.to(tl.float32), 0.0, "silu", x_ptr.dtype.element_ty == tl.float32)
    if ROUND_GATE:
        gate = gate.to(x_ptr.dtype.element_ty).to(tl.float32)
    return (gate * up).to(x_ptr.dtype.element_ty).to(tl.float32)


@kernel(loose=("scale_ptr", "copy_ptr"), multiples=("x_stride", "width"))
def _static_kernel(
    x_ptr, q_ptr, scale_ptr, copy_ptr, x_stride: tl.int64, width: tl.int64,
    blocks_per_row: tl.int32, matrix_rows: tl.int64, block_rows: tl.int64, group: tl.int64, groups: tl.int64,
    BLOCK: tl.constexpr, EVEN: tl.constexpr, ONE_SCALE: tl.constexpr, GATED: tl.constexpr, ROUND_GATE: tl.constexpr,
    MOST: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // blocks_per_row).to(tl.int64)
    cols = (program % blocks_per_row) * BLOCK + tl.arange(0, BLOCK)
    mask = None if EVEN else cols < width
    if ONE_SCALE:
        scale = tl.load(scale_ptr)
        tl.store(copy_ptr, scale, mask=program == 0)
    else:
        at = row % matrix_rows // block_rows * groups + cols // group
        scale = tl.load(scale_ptr + at, mask=mask, other=None if EVEN else 1.0)
    y = _values(x_ptr, row * x_stride + cols, width, mask, None, GATED, ROUND_GATE)
    tl.store(q_ptr + row * width + cols, _fp8(y * tl.div_rn(1.0, scale), MOST, FORMAT), mask=mask)


@kernel(loose=("scale_ptr", "bound_ptr"), multiples=("x_stride", "width"))
def _row_kernel(
    x_ptr, q_ptr, scale_ptr, bound_ptr, x_stride: tl.int64, width: tl.int64, n_rows: tl.int32,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, BOUND: tl.constexpr, GATED: tl.constexpr,
    ROUND_GATE: tl.constexpr, POWER_OF_TWO: tl.constexpr, MOST: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = None if EVEN else (row < n_rows) & (cols < width)
    y = _values(x_ptr, row * x_stride + cols, width, mask, None if EVEN else 0.0, GATED, ROUND_GATE)
    amax = tl.max(_magnitude(y), axis=1, keep_dims=True)
    if BOUND:
        bound = tl.load(bound_ptr).to(tl.float32)
        most = amax.to(tl.float32, bitcast=True)
        amax = tl.where(most > bound, bound, most).to(tl.int32, bitcast=True)
    scale = _scale_of(amax, MOST, POWER_OF_TWO)
    tl.store(scale_ptr + row, scale, mask=row < n_rows)
    tl.store(q_ptr + row * width + cols, _fp8(y * tl.div_rn(1.0, scale), MOST, FORMAT), mask=mask)


@kernel(loose=("scale_ptr", "bound_ptr"), multiples=("x_stride", "width"))
def _wide_row_kernel(
    x_ptr, q_ptr, scale_ptr, bound_ptr, x_stride: tl.int64, width: tl.int64,
    BLOCK: tl.constexpr, BOUND: tl.constexpr, POWER_OF_TWO: tl.constexpr, MOST: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    q_ptr += row * width
    largest = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < width, other=0.0, eviction_policy="evict_last").to(tl.float32)
        largest = tl.maximum(largest, _magnitude(x))
    amax = tl.max(largest, axis=0)
    if BOUND:
        bound = tl.load(bound_ptr).to(tl.float32)
        most = amax.to(tl.float32, bitcast=True)
        amax = tl.where(most > bound, bound, most).to(tl.int32, bitcast=True)
    scale = _scale_of(amax, MOST, POWER_OF_TWO)
    tl.store(scale_ptr + row, scale)
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < width, other=0.0, eviction_policy="evict_first").to(tl.float32)
        tl.store(q_ptr + cols, _fp8(x * tl.div_rn(1.0, scale), MOST, FORMAT), mask=cols < width)


@kernel(loose=("scale_ptr",), multiples=("x_stride", "width", "group"))
def _group_kernel(
    x_ptr, q_ptr, scale_ptr, x_stride: tl.int64, width: tl.int64, group: tl.int64,
    n_groups: tl.int64, groups_per_row: tl.int64,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr, ROUND_GATE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, MOST: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    index = (tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS))[:, None]
    row = index // groups_per_row
    in_group = tl.arange(0, BLOCK)[None, :]
    cols = index % groups_per_row * group + in_group
    mask = None if EVEN else (index < n_groups) & (in_group < group) & (cols < width)
    y = _values(x_ptr, row * x_stride + cols, width, mask, None if EVEN else 0.0, GATED, ROUND_GATE)
    scale = _scale_of(tl.max(_magnitude(y), axis=1, keep_dims=True), MOST, POWER_OF_TWO)
    tl.store(scale_ptr + index, scale, mask=index < n_groups)
    tl.store(q_ptr + row * width + cols, _fp8(_quotient(y, scale), MOST, FORMAT), mask=mask)


@kernel(multiples=("x_stride", "width"))
def _largest_kernel(
    x_ptr, part_ptr, x_stride: tl.int64, width: tl.int64, n_blocks: tl.int64, blocks_per_row: tl.int64,
    BLOCK: tl.constexpr,
):  # fmt: skip
    largest = tl.zeros([BLOCK], tl.int32)
    for block in range(tl.program_id(0), n_blocks, tl.num_programs(0)):
        cols = (block % blocks_per_row) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + (block // blocks_per_row) * x_stride + cols, mask=cols < width, other=0.0)
        largest = tl.maximum(largest, _magnitude(x.to(tl.float32)))
    tl.store(part_ptr + tl.program_id(0), tl.max(largest, axis=0))


@kernel(loose=("part_ptr", "scale_ptr"), multiples=("x_stride", "width"))
def _tensor_kernel(
    x_ptr, q_ptr, part_ptr, scale_ptr, x_stride: tl.int64, width: tl.int64, blocks_per_row: tl.int64, n_parts: tl.int32,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks_per_row
    cols = program % blocks_per_row * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < width, other=0.0, eviction_policy="evict_first")
    part = tl.arange(0, PARTS)
    scale = _scale_of(tl.max(tl.load(part_ptr + part, mask=part < n_parts, other=0), axis=0), MOST, False)
    tl.store(scale_ptr, scale, mask=program == 0)
    y = x.to(tl.float32) * tl.div_rn(1.0, scale)
    tl.store(q_ptr + row * width + cols, _fp8(y, MOST, FORMAT), mask=cols < width)


@kernel(loose=("scale_ptr", "given_ptr"), multiples=("x_stride", "residual_stride", "width"))
def _norm_kernel(
    x_ptr, residual_ptr, w_ptr, q_ptr, sum_ptr, scale_ptr, given_ptr,
    x_stride: tl.int64, residual_stride: tl.int64, width: tl.int64,
    n_rows: tl.int32, variance_width: tl.int32, eps: tl.float32,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    CAST_FIRST: tl.constexpr, ROUND_SUM: tl.constexpr, PARTIAL: tl.constexpr, STATIC: tl.constexpr,
    GROUP: tl.constexpr, POWER_OF_TWO: tl.constexpr, MOST: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = None if EVEN else (row < n_rows) & (cols < width)
    other = None if EVEN else 0.0
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=other).to(tl.float32)
    if HAS_RESIDUAL:
        residual = residual_ptr + row * residual_stride + cols
        x += tl.load(residual, mask=mask, other=other).to(tl.float32)
    if HAS_WEIGHT:
        w = tl.load(w_ptr + cols, mask=None if EVEN else cols < width, other=other)
    if HAS_RESIDUAL:
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * width + cols, rounded, mask=mask)
        if ROUND_SUM:
            x = rounded.to(tl.float32)
    squares = tl.where(cols < variance_width, x * x, 0.0) if PARTIAL else x * x
    y = x * tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / variance_width + eps)
    if HAS_WEIGHT:
        y = times_weight(y, w, 0.0, CAST_FIRST)
    y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    if STATIC:
        given = tl.load(given_ptr)
        tl.store(scale_ptr, given, mask=tl.program_id(0) == 0)
        y = y * tl.div_rn(1.0, given)
    elif GROUP == 0:
        scale = _scale_of(tl.max(_magnitude(y), axis=1, keep_dims=True), MOST, POWER_OF_TWO)
        tl.store(scale_ptr + row, scale, mask=row < n_rows)
        y = y * tl.div_rn(1.0, scale)
    else:
        groups = tl.reshape(y, (ROWS, BLOCK // GROUP, GROUP))
        scale = _scale_of(tl.max(_magnitude(groups), axis=2), MOST, POWER_OF_TWO)
        group = tl.arange(0, BLOCK // GROUP)[None, :]
        at = row * (width // GROUP) + group
        tl.store(scale_ptr + at, scale, mask=(row < n_rows) & (group < width // GROUP))
        y = tl.reshape(_quotient(groups, scale[:, :, None]), (ROWS, BLOCK))
    tl.store(q_ptr + row * width + cols, _fp8(y, MOST, FORMAT), mask=mask)


@functools.lru_cache
def _format(dtype: torch.dtype, device: torch.device) -> tuple[float, str]:
    """(largest value, how values become bytes)."""
    most = Fp8Format.of(dtype).max
    if dtype == torch.float8_e4m3fnuz:
        return most, "fnuz"
    converts = device.type == "cuda" and torch.version.hip is None
    converts = converts and torch.cuda.get_device_capability(device) >= (8, 9)
    return most, "hardware" if converts else "fn"


# Microseconds in the comments are of an H200, bf16, T = 16384; loads with a hint to leave the cache took 2 to 10 % more.


def row_tile(width: int, gated: bool) -> Tile:
    """The cut for rows that have a scale each.

    H = 4096: 8 warps 48.1. H = 14336: 8 warps 162.2, 16 warps 178.8; behind a gate 32 warps 298.4, 16 warps 310.7.
    """
    rows, block, warps, _ = norm_tile(width, 1)
    if block >= 4096:
        warps = min(32, block // 512) if gated else max(8, block // 2048)
    return Tile(rows, block, warps)


def norm_row_tile(width: int, n_rows: int, adds: bool) -> Tile:
    """The cut for a norm of rows that is quantized.

    H = 4096: static 51.4 with 4 warps, 55.2 with 8; with a sum 113.0 with 16 warps, 114.2 with 4.
    """
    return norm_tile(width, n_rows if adds else 1, adds)


STATIC_TILE = (2048, 4)  # block, warps: H = 14336 162.3, behind a gate 265.7


def group_tile(gated: bool) -> tuple[int, int]:
    """``(elements a program, warps)``: H = 14336, groups of 128: 175.2, behind a gate 276.6."""
    return (2048 if gated else 4096), 4


@plan
def _static_plan(
    n_rows: int,
    width: int,
    x_stride: int,
    dtype: torch.dtype,
    scale: tuple[torch.Size, int],
    gate: tuple[bool, bool],
    form: tuple[float, str],
    config: tuple[int, int] | None,
) -> Launch:
    """``scale``: its shape, and the rows of x's last two dimensions. ``gate``: whether there is one, and rounded."""
    shape, matrix_rows = scale
    most, warps = config or STATIC_TILE
    block = min(most, next_power_of_2(width))
    per_row = -(-width // block)
    block_rows, groups = 1, 1
    if shape.numel() > 1:
        groups = shape[-1]
        by_row = len(shape) != 2 or shape == (n_rows, 1)
        matrix_rows, block_rows = (n_rows, 1) if by_row else (matrix_rows, matrix_rows // shape[0])
    scalars = (x_stride, width, per_row, max(1, matrix_rows), max(1, block_rows), max(1, width // groups), groups)
    constants = (block, width % block == 0, shape.numel() == 1, *gate, *form)
    warps = warps if block >= 32 * warps else 1
    return _static_kernel.prepare((n_rows * per_row, 1, 1), scalars, constants, warps)


@plan
def _row_plan(
    n_rows: int,
    width: int,
    x_stride: int,
    dtype: torch.dtype,
    bound: torch.dtype | None,
    gate: tuple[bool, bool],
    power_of_two: bool,
    form: tuple[float, str],
    config: Tile | None,
) -> Launch:
    if width > _WIDEST_ROW_IN_REGISTERS:
        constants = (8192, bound is not None, power_of_two, *form)
        return _wide_row_kernel.prepare((n_rows, 1, 1), (x_stride, width), constants, 16)
    rows, block, warps, _ = config or row_tile(width, gate[0])
    even = block == width and n_rows % rows == 0
    flags = (rows, block, even, bound is not None, *gate, power_of_two, *form)
    return _row_kernel.prepare((-(-n_rows // rows), 1, 1), (x_stride, width, n_rows), flags, warps)


@plan
def _group_plan(
    n_rows: int,
    width: int,
    x_stride: int,
    dtype: torch.dtype,
    group: int,
    gate: tuple[bool, bool],
    power_of_two: bool,
    form: tuple[float, str],
    config: tuple[int, int] | None,
) -> Launch:
    elements, warps = config or group_tile(gate[0])
    per_row, block = -(-width // group), next_power_of_2(group)
    n_groups = n_rows * per_row
    groups = max(1, min(elements // block, next_power_of_2(n_groups)))
    even = block == group and width % group == 0 and n_groups % groups == 0
    constants = (groups, block, even, *gate, power_of_two, *form)
    scalars = (x_stride, width, group, n_groups, per_row)
    warps = warps if groups * block >= 32 * warps else 1
    return _group_kernel.prepare((-(-n_groups // groups), 1, 1), scalars, constants, warps)


@plan
def _tensor_plan(
    n_rows: int, width: int, x_stride: int, dtype: torch.dtype, form: tuple[float, str]
) -> tuple[Launch, Launch, int]:
    """The search for the largest value, the quantization, and the number of parts of the first."""
    block = min(8192, next_power_of_2(width))
    per_row = -(-width // block)
    n_blocks = n_rows * per_row
    parts = min(_MOST_PARTS, n_blocks)
    warps = 8 if block >= 2048 else 1
    search = _largest_kernel.prepare((parts, 1, 1), (x_stride, width, n_blocks, per_row), (block,), warps, 3)
    constants = (next_power_of_2(parts), block, *form)
    write = _tensor_kernel.prepare((n_blocks, 1, 1), (x_stride, width, per_row, parts), constants, warps)
    return search, write, parts


def _scale_shape(shape: tuple[int, ...], group_size: int) -> tuple[int, ...]:
    if group_size == TENSOR:
        return (1,)
    return (*shape[:-1], 1 if group_size == ROW else -(-shape[-1] // group_size))


def _dense(x: Tensor, rows: tuple[Tensor, int, int, int]) -> tuple[Tensor, int, int, int]:
    """A dense x as one row, where what is done to an element depends on no other."""
    return (x, 1, x.numel(), x.numel()) if x.is_contiguous() and x.numel() < 2**31 else rows


def launch(
    x: Tensor,
    scale: Tensor | None,
    scale_ub: Tensor | None,
    dtype: torch.dtype,
    group_size: int,
    power_of_two: bool,
    gate: tuple[bool, bool] = (False, False),
    config: Tile | tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """``quant_fp8_triton``; with ``gate`` (whether, and whether rounded) of x's gated halves."""
    shape, device = tuple(x.shape), x.device
    if gate[0]:
        shape = (*shape[:-1], shape[-1] // 2)
    q, form = new(shape, dtype, device), _format(dtype, device)
    rows, n_rows, _, x_stride = as_rows(x)
    width = shape[-1]
    if scale is not None:
        if scale.numel() != 1 or n_rows == 0 or width == 0:
            scale = copy = scale.clone(memory_format=torch.contiguous_format)
        else:
            copy = torch.empty_like(scale)  # which the kernel fills
        if n_rows and width:
            if scale.numel() == 1 and not gate[0]:
                rows, n_rows, width, x_stride = _dense(x, (rows, n_rows, width, x_stride))
            blocks = (scale.shape, shape[-2] if len(shape) > 1 else 1)
            _static_plan(n_rows, width, x_stride, x.dtype, blocks, gate, form, config)(rows, q, scale, copy)  # type: ignore[arg-type]
        return q, copy
    scales = new(_scale_shape(shape, group_size), torch.float32, device)
    if n_rows == 0 or width == 0:
        return q, scales.fill_(Fp8Format.of(dtype).least_scale)
    if group_size == TENSOR:
        rows, n_rows, width, x_stride = _dense(x, (rows, n_rows, width, x_stride))
        search, write, n_parts = _tensor_plan(n_rows, width, x_stride, x.dtype, form)
        parts = new((n_parts,), torch.int32, device)
        search(rows, parts)
        write(rows, q, parts, scales)
    elif group_size == ROW:
        bound = None if scale_ub is None else scale_ub.dtype
        prepared = _row_plan(n_rows, width, x_stride, x.dtype, bound, gate, power_of_two, form, config)  # type: ignore[arg-type]
        prepared(rows, q, scales, scales if scale_ub is None else scale_ub)
    else:
        group = min(group_size, width)
        _group_plan(n_rows, width, x_stride, x.dtype, group, gate, power_of_two, form, config)(rows, q, scales)  # type: ignore[arg-type]
    return q, scales


def _fake(shape: tuple[int, ...], x: Tensor, scale: Tensor | None, dtype: torch.dtype, group_size: int) -> list[Tensor]:
    scales = x.new_empty(_scale_shape(shape, group_size) if scale is None else scale.shape, dtype=torch.float32)
    return [x.new_empty(shape, dtype=dtype), scales]


def _half(x: Tensor) -> tuple[int, ...]:
    return (*x.shape[:-1], x.shape[-1] // 2)


@opaque(fake=lambda x, scale, scale_ub, dtype, group_size, _: tuple(_fake(x.shape, x, scale, dtype, group_size)))
def quant_fp8_triton(
    x: Tensor, scale: Tensor | None, scale_ub: Tensor | None, dtype: torch.dtype, group_size: int, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """As ``quant_fp8_cpu``; ``scale_ub`` is not waited for."""
    return launch(x, scale, scale_ub, dtype, group_size, power_of_two)


@opaque(fake=lambda x, _, scale, dtype, group_size, __: tuple(_fake(_half(x), x, scale, dtype, group_size)))
def silu_and_mul_quant_triton(
    x: Tensor, round_gate: bool, scale: Tensor | None, dtype: torch.dtype, group_size: int, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """As ``silu_and_mul_quant_cpu``."""
    if scale is None and group_size == ROW and x.shape[-1] > 2 * _WIDEST_ROW_IN_REGISTERS:
        y = launch_gated(x, "silu", 0.0, round_gate, False)
        return launch(y, None, None, dtype, group_size, power_of_two)
    return launch(x, scale, None, dtype, group_size, power_of_two, (True, round_gate))


@plan
def _norm_plan(
    n_rows: int,
    width: int,
    strides: tuple[int, int],
    dtypes: tuple[torch.dtype, torch.dtype | None, torch.dtype | None],
    eps: float,
    variance_size: int,
    flags: tuple[bool, bool],
    static: bool,
    group_size: int,
    power_of_two: bool,
    form: tuple[float, str],
    config: Tile | None,
) -> Launch:
    rows, block, warps, _ = config or norm_row_tile(width, n_rows, dtypes[1] is not None)
    even = block == width and n_rows % rows == 0
    constants = (
        rows, block, even, dtypes[1] is not None, dtypes[2] is not None, *flags, variance_size != width, static,
        0 if static or group_size == ROW else group_size, power_of_two, *form,
    )  # fmt: skip
    scalars = (*strides, width, n_rows, variance_size, eps)
    return _norm_kernel.prepare((-(-n_rows // rows), 1, 1), scalars, constants, warps)


def _in_one_pass(width: int, scale: Tensor | None, group_size: int) -> bool:
    if width > _WIDEST_ROW_IN_REGISTERS:
        return False
    if scale is not None:
        return scale.numel() == 1
    return group_size == ROW or (group_size & (group_size - 1) == 0 and width % group_size == 0)


def launch_norm_quant(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    variance_size: int,
    cast_first: bool,
    round_sum: bool,
    scale: Tensor | None,
    dtype: torch.dtype,
    group_size: int,
    power_of_two: bool,
    config: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``add_rms_norm_quant_triton``, also without a residual: then the last is None."""
    shape = tuple(x.shape)
    if not x.numel() or not _in_one_pass(shape[-1], scale, group_size):
        y, total = launch_norm(x, residual, weight, eps, variance_size, 0.0, cast_first, round_sum)
        q, scale = launch(y, scale, None, dtype, group_size, power_of_two)
        return q, scale, None if residual is None else total
    q = new(shape, dtype, x.device)
    total = None if residual is None else new(shape, x.dtype, x.device)
    if scale is None:
        scales = new(_scale_shape(shape, group_size), torch.float32, x.device)
    else:
        scales = torch.empty_like(scale)  # one element, which the kernel fills
    rows, n_rows, width, stride = as_rows(x)
    added, _, _, added_stride = (rows, 0, 0, width) if residual is None else as_rows(residual)
    dtypes = (x.dtype, None if residual is None else residual.dtype, None if weight is None else weight.dtype)
    prepared = _norm_plan(
        n_rows, width, (stride, added_stride), dtypes, eps, variance_size, (cast_first, round_sum), scale is not None,
        group_size, power_of_two, _format(dtype, x.device), config,
    )  # fmt: skip
    factors = rows if weight is None else weight.contiguous()
    prepared(rows, added, factors, q, rows if total is None else total, scales, scales if scale is None else scale)
    return q, scales, total


@opaque(
    fake=lambda x, weight, eps, variance_size, cast_first, scale, dtype, group_size, _: tuple(
        _fake(x.shape, x, scale, dtype, group_size)
    )
)
def rms_norm_quant_triton(
    x: Tensor, weight: Tensor | None, eps: float, variance_size: int, cast_first: bool,
    scale: Tensor | None, dtype: torch.dtype, group_size: int, power_of_two: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As ``rms_norm_quant_cpu``."""
    return launch_norm_quant(
        x, None, weight, eps, variance_size, cast_first, False, scale, dtype, group_size, power_of_two
    )[:2]


@opaque(
    fake=lambda x, residual, weight, eps, variance_size, cast_first, round_sum, scale, dtype, group_size, _: (
        *_fake(x.shape, x, scale, dtype, group_size),
        x.new_empty(x.shape),
    )
)
def add_rms_norm_quant_triton(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, variance_size: int, cast_first: bool,
    round_sum: bool, scale: Tensor | None, dtype: torch.dtype, group_size: int, power_of_two: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As ``add_rms_norm_quant_cpu``."""
    return launch_norm_quant(
        x, residual, weight, eps, variance_size, cast_first, round_sum, scale, dtype, group_size, power_of_two
    )  # type: ignore[return-value]

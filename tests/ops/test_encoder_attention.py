"""Encoder attention on the CPU: packed segments and relative positions against float64, in every variant."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from opmux import CustomOp
from opmux.core.errors import DeviceMismatchError
from opmux.native import library
from opmux.native.loader import Kernels, NativeLibrary
from opmux.ops import MMEncoderAttention, RelPosAttention
from opmux.ops.encoder import kernels_cpu

pytestmark = pytest.mark.skipif(not library.available, reason=f"compiled CPU library: {library.reason}")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


@pytest.fixture(params=library.supported(), autouse=True)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each variant that this processor runs."""
    monkeypatch.setattr(kernels_cpu, "kernels", Kernels(NativeLibrary(variant=request.param)))
    return request.param


def make(tokens: int, n: int, k: int, d: int, dtype: torch.dtype, batch: int = 1) -> list[Tensor]:
    g = torch.Generator().manual_seed(tokens + d)
    return [torch.randn(batch, tokens, heads, d, generator=g).to(dtype) for heads in (n, k, k)]


def exact(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float) -> Tensor:
    q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    parts = zip(*(x.split(lengths, 1) for x in (q, k, v)), strict=True)
    outs = []
    for a, b, c in parts:
        weights = torch.softmax(torch.einsum("bsnd,blnd->bnsl", a, b) * scale, -1)
        outs.append(torch.einsum("bnsl,blnd->bsnd", weights, c))
    return torch.cat(outs, 1)


def bounds(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 72, 80, 96, 112, 128, 40, 3])
def test_head_sizes(dtype: torch.dtype, size: int) -> None:
    lengths = [70, 0, 1, 130, 64]
    q, k, v = make(sum(lengths), 4, 2, size, dtype, batch=2)
    out = MMEncoderAttention(4, size, num_kv_heads=2)(q, k, v, bounds(lengths))
    assert out.shape == q.shape
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact(q, k, v, lengths, size**-0.5), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_segments_see_themselves_only(kind: torch.dtype) -> None:
    op = MMEncoderAttention(1, 4, enforce_enable=True)
    zeros, rows = torch.zeros(1, 4, 4), torch.eye(4).unsqueeze(0)
    halves = torch.tensor([[0.5, 0.5, 0, 0]] * 2 + [[0, 0, 0.5, 0.5]] * 2).unsqueeze(0)
    for longest in (None, 2, torch.tensor(2), 0, 4):
        for method in (op, op.forward_native):
            assert torch.equal(method(zeros, zeros, rows, bounds([2, 2], kind), longest), halves)
    assert torch.equal(op(zeros, zeros, rows), torch.full((1, 4, 4), 0.25))


def test_an_image_does_not_see_its_neighbour() -> None:
    q, k, v = make(150, 2, 2, 72, torch.float32)
    op = MMEncoderAttention(2, 72)
    before = op(q, k, v, bounds([97, 53]))
    order = torch.cat((torch.arange(97), 97 + torch.randperm(53)))
    after = op(*(x[:, order] for x in (q, k, v)), bounds([97, 53]))
    assert torch.equal(after[:, :97], before[:, :97])
    torch.testing.assert_close(after[:, 97:], before[:, order[97:]])


@pytest.mark.parametrize("ends", [[0, 0, 2, 2, 5, 5], [0, 1, 2, 3], [0], [0, 0], [0, 0, 0, 4]])
def test_empty_segments(ends: list[int]) -> None:
    q, k, v = make(ends[-1], 2, 1, 64, torch.float32)
    op = MMEncoderAttention(2, 64, num_kv_heads=1)
    lengths = [b - a for a, b in pairwise(ends)]
    wanted = exact(q, k, v, lengths, 64**-0.5) if lengths else q.double()
    for method in (op, op.forward_native):
        out = method(q, k, v, torch.tensor(ends), 0)
        assert out.shape == q.shape
        torch.testing.assert_close(out.double(), wanted, rtol=0, atol=3e-6)


@pytest.mark.parametrize("ends", [[0, 3], [1, 5], [0, 4, 2, 5], [0, 6], [0], [-1, 5]])
def test_boundaries_that_do_not_cover_the_tokens_are_refused(ends: list[int]) -> None:
    q, k, v = make(5, 2, 2, 64, torch.float32)
    op = MMEncoderAttention(2, 64)
    for method in (op, op.forward_native):
        with pytest.raises(ValueError, match=r"starts with 0, never falls, and ends with 5"):
            method(q, k, v, torch.tensor(ends))


def test_shapes_that_do_not_fit_are_refused() -> None:
    op, (q, k, v) = MMEncoderAttention(4, 64, num_kv_heads=2), make(5, 4, 2, 64, torch.float32)
    floats, square = torch.tensor([0.0, 5.0]), torch.tensor([[0, 5]])
    for bad in ((q, k, v, floats), (q, k, v, square), (q, k[:, :4], v[:, :4], bounds([5])), (k, k, v), (q, q, q), (q[0], k, v)):
        with pytest.raises(ValueError, match="was built for 4 query and 2 key heads of size 64"):
            op(*bad)
    with pytest.raises(ValueError, match="cannot share"):
        MMEncoderAttention(4, 64, num_kv_heads=3)
    assert op(q, k[:, :3], v[:, :3]).shape == q.shape  # without segments keys may be fewer


def test_strided_and_flat_inputs() -> None:
    op, lengths = MMEncoderAttention(3, 80), [40, 41]
    qkv = torch.randn(1, 81, 3, 3, 80)
    q, k, v = qkv.unbind(2)
    wanted = exact(q, k, v, lengths, 80**-0.5)
    torch.testing.assert_close(op(q, k, v, bounds(lengths)).double(), wanted, rtol=0, atol=3e-5)
    flat = op(*(x.flatten(2) for x in (q, k, v)), bounds(lengths))
    torch.testing.assert_close(flat.double(), wanted.flatten(2), rtol=0, atol=3e-5)
    apart = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)]
    torch.testing.assert_close(op(*apart, bounds(lengths)).double(), wanted, rtol=0, atol=3e-5)


def test_any_number_of_threads_gives_the_same_bits() -> None:
    lengths, threads = [200, 3, 64, 129], torch.get_num_threads()
    q, k, v = make(sum(lengths), 4, 4, 64, torch.bfloat16)
    op = MMEncoderAttention(4, 64)
    first = op(q, k, v, bounds(lengths))
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(op(q, k, v, bounds(lengths)), first)
    finally:
        torch.set_num_threads(threads)


_MEMORY = """
import resource, torch
from opmux.ops import MMEncoderAttention, RelPosAttention
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
now = lambda: int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20
op = MMEncoderAttention(16, 72)
q = torch.randn(1, 4976, 16, 72).bfloat16()
call = lambda *ends: op(q[:, : ends[-1]], q[:, : ends[-1]], q[:, : ends[-1]], torch.tensor(ends))
with torch.inference_mode():
    call(0, 10)
    start = peak()
    call(0, 4000, 4976)
    print(peak() - start)
    start = now()
    for n in range(200):
        call(0, 5 + n, 300 + n)
    print(now() - start)
    sam = RelPosAttention(64, 4, use_rel_pos=True, input_size=(64, 64))
    x = torch.randn(1, 64, 64, 64)
    sam(x[:, :2])
    start = peak()
    sam(x)
    print(peak() - start)
"""


def test_memory_is_linear_in_the_tokens(variant: str) -> None:
    if variant != library.variant:
        pytest.skip("one variant is enough")
    done = subprocess.run([sys.executable, "-c", _MEMORY], capture_output=True, text=True, check=True)
    packed, growth, relative = map(float, done.stdout.split())
    assert packed < 100, "MiB; the scores of one head are 64"
    assert growth < 8, "MiB after 200 layouts of segments"
    assert relative < 60, "MiB; the scores of one head are 64"


def eager(op: RelPosAttention, x: Tensor) -> Tensor:
    """The whole bias at once, in float64."""
    batch, height, width, _ = x.shape
    weights = {name: p.double() for name, p in op.named_parameters()}
    qkv = F.linear(x.double(), weights["qkv.weight"], weights.get("qkv.bias"))
    q, k, v = qkv.reshape(batch, height * width, 3, op.num_heads, -1).permute(2, 0, 3, 1, 4)
    scores = op.head_size**-0.5 * q @ k.transpose(-1, -2)
    if op.use_rel_pos:
        grid = q.unflatten(2, (height, width))
        for name, size, form in (("rel_pos_h", height, "bnijd,ikd->bnijk"), ("rel_pos_w", width, "bnijd,jkd->bnijk")):
            table = weights[name].T.unsqueeze(0)
            table = F.interpolate(table, size=2 * size - 1, mode="linear").squeeze(0).T
            at = torch.arange(size)
            bias = torch.einsum(form, grid, table[at[:, None] - at + size - 1])
            bias = bias.unsqueeze(-1 if name == "rel_pos_h" else -2)
            scores = scores + bias.expand(-1, -1, -1, -1, height, width).flatten(4).flatten(2, 3)
    out = (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(x.shape)
    return F.linear(out, weights["proj.weight"], weights["proj.bias"])


def sam_layer(heads: int, size: int, made_for: tuple[int, int] | None, bias: bool = True) -> RelPosAttention:
    g = torch.Generator().manual_seed(0)
    op = RelPosAttention(heads * size, heads, bias, made_for is not None, input_size=made_for)
    for name, p in op.named_parameters():
        p.data = torch.randn(p.shape, generator=g) * (0.3 if name.startswith("rel") else p.shape[-1] ** -0.5)
    return op


@pytest.mark.parametrize(
    ("heads", "size", "grid", "made_for", "batch"),
    [
        (12, 16, (14, 14), (14, 14), 25),
        (16, 80, (14, 20), (14, 20), 1),
        (12, 16, (14, 20), (14, 14), 2),
        (2, 72, (20, 9), (14, 14), 1),
        (2, 5, (3, 40), (60, 2), 1),
        (2, 16, (50, 1), (50, 1), 1),
        (3, 16, (9, 9), None, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("bias", [True, False])
def test_relative_positions(heads, size, grid, made_for, batch, bias) -> None:
    op = sam_layer(heads, size, made_for, bias)
    x = torch.randn(batch, *grid, heads * size, generator=torch.Generator().manual_seed(1))
    wanted = eager(op, x)
    for method in (op, op.forward_native):
        torch.testing.assert_close(method(x).double(), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tables_may_be_fp32(dtype: torch.dtype) -> None:
    op = sam_layer(4, 16, (7, 9)).to(dtype)
    x = torch.randn(2, 7, 9, 64).to(dtype)
    expected = op(x)
    for name in ("rel_pos_h", "rel_pos_w"):
        getattr(op, name).data = getattr(op, name).data.float()
    assert op(x).dtype == dtype
    assert torch.equal(op(x), expected)


def test_relative_positions_need_their_size() -> None:
    with pytest.raises(ValueError, match="needs input_size"):
        RelPosAttention(64, 4, use_rel_pos=True)
    with pytest.raises(ValueError, match="must be a multiple"):
        RelPosAttention(65, 4)
    with pytest.raises(ValueError, match=r"built for \[B, H, W, 64\]"):
        RelPosAttention(64, 4)(torch.randn(2, 3, 65))


def test_an_argument_may_lie_anywhere_if_the_op_says_so() -> None:
    class Takes(CustomOp):
        anywhere = ("sizes",)

        def forward_native(self, x: Tensor, sizes: Tensor, more: Tensor | None = None) -> Tensor:
            return x + 1

    op, x, elsewhere = Takes(), torch.ones(2), torch.ones(2, device="meta")
    assert torch.equal(op(x, elsewhere), x + 1)
    assert torch.equal(op(x, sizes=elsewhere), x + 1)
    with pytest.raises(DeviceMismatchError):
        op(x, x, elsewhere)

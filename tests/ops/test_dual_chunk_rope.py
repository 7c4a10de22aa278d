"""The rope of dual chunk attention against the definition's sentences, one token and one angle at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from opmux.ops import DualChunkRotaryEmbedding, get_rope

N, K, D, R, LIMIT = 2, 1, 8, 4, 40


def op(chunk_size: int = 8, local_size: int = 3, neox: bool = True) -> DualChunkRotaryEmbedding:
    return DualChunkRotaryEmbedding(D, R, LIMIT, 100.0, neox, None, chunk_size, local_size)


def turned(head: Tensor, angle: int, neox: bool) -> list[float]:
    """One head in Python floats."""
    out = [float(v) for v in head]
    for i in range(R // 2):
        a, b = (i, i + R // 2) if neox else (2 * i, 2 * i + 1)
        c, s = math.cos(angle * 100.0 ** (-2 * i / R)), math.sin(angle * 100.0 ** (-2 * i / R))
        out[a], out[b] = float(head[a]) * c - float(head[b]) * s, float(head[b]) * c + float(head[a]) * s
    return out


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("chunk_size", "local_size"), [(8, 3), (8, 6), (8, 0), (2, 1)])
def test_each_turn_by_its_angle(chunk_size, local_size, neox):
    n, c = chunk_size - local_size, chunk_size
    positions = torch.tensor([0, 1, n - 1, n, 2 * n + 1, 17, LIMIT - 1])
    query, key = torch.randn(len(positions), N * D), torch.randn(len(positions), K * D)
    for method in ("forward_native", "forward_cpu"):
        got_q, got_k = getattr(op(c, local_size, neox), method)(positions, query, key)
        assert got_q.shape == (len(positions), 5 * N * D)
        for t, position in enumerate(positions.tolist()):
            j = position % n
            angles = [j, min(j + n, c), min(2 * n - 1, c), j + n, j + c]
            want = [turned(head, a, neox) for a in angles for head in query[t].view(N, D)]
            torch.testing.assert_close(got_q[t].view(5 * N, D), torch.tensor(want))
            torch.testing.assert_close(got_k[t].view(K, D), torch.tensor([turned(key[t], j, neox)]))


@pytest.mark.parametrize("method", ["forward_native", "forward_cpu"])
def test_shapes_and_offsets(method):
    rope, positions = op(), torch.tensor([3, 9, 30])
    forward = getattr(rope, method)
    query, key = torch.randn(3, N * D), torch.randn(3, K * D)
    want_q, want_k = forward(positions, query, key)
    for shape in [(1, 3, -1), (3, -1, D)]:
        got_q, got_k = forward(positions.view(1, 3), query.view(shape), key.view(shape))
        assert torch.equal(got_q, want_q)
        assert torch.equal(got_k, want_k)
    got_q, none = forward(positions - 2, query, None, torch.tensor([2, 2, 2]))
    assert none is None
    assert torch.equal(got_q, want_q)
    assert torch.equal(forward(positions.int() - 2, query, None, 2)[0], want_q)
    one, one_key = forward(positions[:1], query[:1], key[:1])  # one token keeps its dimension
    assert torch.equal(one, want_q[:1])
    assert torch.equal(one_key, want_k[:1])
    packed = torch.randn(3, (N + K) * D + 1)[:, 1:]  # views of a packed product
    parts = packed.split([N * D, K * D], -1)
    for a, b in zip(forward(positions, *parts), forward(positions, *(p.clone() for p in parts)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("method", ["forward_native", "forward_cpu"])
@pytest.mark.parametrize(("position", "offset"), [(LIMIT, None), (-1, None), (LIMIT - 1, 1)])
def test_position_outside(method, position, offset):
    with pytest.raises(IndexError, match=f"position {position + (offset or 0)}.*outside 0..39"):
        getattr(op(), method)(torch.tensor([0, position]), torch.randn(2, D), None, offset)


def test_position_outside_in_compiled_code_is_nan():
    rope = op()
    query, key = torch.randn(3, N * D), torch.randn(3, K * D)
    native = torch.compile(rope.forward_native, backend="eager", fullgraph=True)
    for out in native(torch.tensor([0, LIMIT, -1]), query, key):
        assert out.isnan().all(1).tolist() == [False, True, True]
        assert not out[0].isnan().any()


def test_the_table_stays_in_fp32():
    rope = op()
    query = torch.randn(1, D, dtype=torch.bfloat16)
    before = rope(torch.tensor([39]), query)[0]
    rope.half().to(torch.bfloat16)
    assert rope.cos_sin_cache.dtype == torch.float32
    assert torch.equal(rope(torch.tensor([39]), query)[0], before)


def test_get_rope():
    made = get_rope(D, 64, rope_parameters={"rope_theta": 100.0}, dual_chunk_attention_config={"chunk_size": 8, "local_size": 3})
    assert type(made) is DualChunkRotaryEmbedding
    assert (made.chunk, made.chunk_size, made.max_position_embeddings, made.base) == (5, 8, 64, 100.0)
    with pytest.raises(ValueError, match=r"needs chunk_size and local_size; it has chunk_size"):
        get_rope(D, 64, dual_chunk_attention_config={"chunk_size": 8})
    with pytest.raises(ValueError, match="rope_type 'default' only; it was given with rope_type 'linear'"):
        get_rope(D, 64, True, {"rope_type": "linear", "factor": 2.0}, None, {"chunk_size": 8, "local_size": 3})
    with pytest.raises(ValueError, match=r"local_size is 8; it must lie in 0\.\.7"):
        op(8, 8)

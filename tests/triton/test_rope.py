from __future__ import annotations

import pytest
import torch
from torch import Tensor

from opmux.ops import DualChunkRotaryEmbedding
from opmux.ops.rope.kernels_triton import apply_rotary_emb_triton, rotary_embedding, rotate_query_key_triton
from opmux.ops.rope.rotate import rotate

SHAPES = [(3, 1, 80, 32), (3, 2, 256, 64), (1, 1, 6, 2), (4, 2, 64, 64), (2, 1, 8, 0), (5, 3, 12, 12)]  # N, K, D, R


def reference(x: Tensor, cos: Tensor, sin: Tensor, rotary: int, neox: bool) -> Tensor:
    x = x.double()
    return torch.cat((rotate(x[..., :rotary], cos.double(), sin.double(), neox), x[..., rotary:]), -1)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("n", "k", "d", "r"), SHAPES)
def test_packed_query_and_key(n, k, d, r, neox, dtype, close):
    table, positions = torch.randn(11, r), torch.tensor([10, 0, 3, 3, 7])
    packed = torch.randn(5, (n + 2 * k) * d + 1).to(dtype)
    q, key = packed[:, 1 : 1 + n * d], packed[:, 1 + n * d : 1 + (n + k) * d]
    cos, sin = table[positions].unsqueeze(1).chunk(2, -1)
    got_q, got_k = rotary_embedding(positions, q, key, d, table, neox)
    close(got_q, reference(q.reshape(5, n, d), cos, sin, r, neox).reshape(5, -1))
    close(got_k, reference(key.reshape(5, k, d), cos, sin, r, neox).reshape(5, -1))
    assert torch.equal(got_q.view(5, n, d)[..., r:], q.reshape(5, n, d)[..., r:])  # bit for bit
    alone, none = rotary_embedding(positions.int(), q.unflatten(-1, (n, d)), None, d, table, neox)
    assert none is None
    assert torch.equal(alone.flatten(1), got_q)


@pytest.mark.parametrize(("neox", "expected"), [(True, [-3.0, -4.0, 1.0, 2.0]), (False, [-2.0, 1.0, -4.0, 3.0])])
def test_quarter_turn(neox, expected):
    table = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    got, _ = rotary_embedding(torch.tensor([0]), torch.tensor([[1.0, 2.0, 3.0, 4.0]]), None, 4, table, neox)
    assert got.tolist() == [expected]


@pytest.mark.parametrize("rotary", [4, 12])
def test_position_outside_the_table_is_nan_and_reads_nothing(rotary):
    memory = torch.full((4 * rotary + 64,), 1e30)
    table = memory[32:-32].view(4, rotary).copy_(torch.randn(4, rotary))
    positions = torch.tensor([0, 3, 4, 10**6, -1])
    got, _ = rotary_embedding(positions, torch.randn(5, 24), None, 12, table, True)
    assert got.isnan().all(1).tolist() == [False, False, True, True, True]
    assert float(got[:2].abs().max()) < 1e3


@pytest.mark.parametrize("neox", [True, False])
def test_rows_that_come_with_the_tokens(neox, dtype, close):
    x, cos, sin = torch.randn(2, 5, 3, 8).to(dtype), torch.randn(5, 4), torch.randn(5, 4)
    close(apply_rotary_emb_triton(x, cos, sin, neox), reference(x, cos.unsqueeze(1), sin.unsqueeze(1), 8, neox))
    close(apply_rotary_emb_triton(x[1], cos, sin, neox), reference(x[1], cos.unsqueeze(1), sin.unsqueeze(1), 8, neox))


@pytest.mark.parametrize("rotary", [16, 6])
@pytest.mark.parametrize("neox", [True, False])
def test_transformers_layout(neox, rotary, dtype, close):
    q, k = (torch.randn(2, 5, heads, 16).to(dtype).transpose(1, 2) for heads in (4, 2))
    cos, sin = torch.randn(1, 5, rotary), torch.randn(1, 5, rotary)  # unequal halves: both entries of a pair are read

    def turned(x: Tensor) -> Tensor:
        x = x.double()
        part = x[..., :rotary]
        if neox:
            u, v = part.chunk(2, -1)
            swapped = torch.cat((-v, u), -1)
        else:
            swapped = torch.stack((-part[..., 1::2], part[..., 0::2]), -1).flatten(-2)
        return torch.cat((part * cos.unsqueeze(1) + swapped * sin.unsqueeze(1), x[..., rotary:]), -1)

    got_q, got_k = rotate_query_key_triton(q, k, cos, sin, neox)
    close(got_q, turned(q))
    close(got_k, turned(k))


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("n", "k", "d", "r"), [(3, 2, 12, 8), (20, 3, 64, 64)])  # the second in groups of heads
def test_dual_chunks(n, k, d, r, neox, dtype, close):
    op = DualChunkRotaryEmbedding(d, r, 40, 100.0, neox, None, 8, 3)
    positions = torch.tensor([0, 4, 5, 39])
    packed = torch.randn(4, (n + k) * d + 1).to(dtype)[:, 1:]
    query, key = packed.split([n * d, k * d], -1)
    got_q, got_k = op.forward_cuda(positions - 1, query, key, 1)
    want_q, want_k = op.forward_native(positions, query.double(), key.double())
    close(got_q, want_q)
    close(got_k, want_k)
    alone, none = op.forward_cuda(positions.int(), query)
    assert none is None
    assert torch.equal(alone, got_q)
    for out in op.forward_cuda(torch.tensor([0, 40, 10**6, -1]), query, key):
        assert out.isnan().all(1).tolist() == [False, True, True, True]
    empty_q, empty_k = op.forward_cuda(positions[:0], query[:0], key[:0])
    assert (empty_q.shape, empty_k.shape) == ((0, 5 * n * d), (0, k * d))


def test_no_tokens():
    q, k = rotary_embedding(
        torch.empty((0,), dtype=torch.long), torch.randn(0, 24), torch.randn(0, 12), 12, torch.randn(3, 12), True
    )
    assert q.shape == (0, 24)
    assert k.shape == (0, 12)

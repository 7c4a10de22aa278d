from __future__ import annotations

import pytest
import torch

from opmux.ops import MMEncoderAttention, RelPosAttention
from opmux.ops.encoder.kernels_triton import encoder_attention_triton


def inputs(batch, tokens, n, k, d, dtype):
    q, key = torch.randn(batch, tokens, n, d).to(dtype), torch.randn(batch, k, tokens, d).to(dtype).transpose(1, 2)
    return q, key, torch.randn(batch, tokens, k, d + 3).to(dtype)[..., 1 : d + 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(
    ("lengths", "n", "k", "d"),
    [
        ([70, 0, 1, 65], 2, 1, 72),
        ([0, 64, 0], 4, 2, 16),
        ([128, 5], 1, 1, 80),
        ([1, 1, 1, 1, 1], 2, 2, 32),
        ([300, 20], 1, 1, 16),
        ([33], 1, 1, 160),
    ],
    ids=str,
)
def test_segments(lengths, n, k, d, dtype, close):
    q, key, value = inputs(2, sum(lengths), n, k, d, dtype)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    op = MMEncoderAttention(n, d, num_kv_heads=k)
    wanted = op.forward_native(q.double(), key.double(), value.double(), ends)
    for kind in (torch.int32, torch.int64):
        close(encoder_attention_triton(q, key, value, ends.to(kind), d**-0.5), wanted)
    close(op.forward_cuda(q, key, value, ends, max(lengths)), wanted)


def test_tokens_outside_every_segment_give_zeros(close):
    q, key, value = inputs(1, 150, 1, 1, 16, torch.float32)
    op = MMEncoderAttention(1, 16)
    out = encoder_attention_triton(q, key, value, torch.tensor([10, 80, 90]), 0.25)
    wanted = op.forward_native(*(x[:, 10:90].double() for x in (q, key, value)), torch.tensor([0, 70, 80]))
    close(out[:, 10:90], wanted)
    assert not out[:, :10].any()
    assert not out[:, 90:].any()
    beyond = encoder_attention_triton(q, key, value, torch.tensor([0, 80, 1000]), 0.25)
    close(beyond, op.forward_native(q.double(), key.double(), value.double(), torch.tensor([0, 80, 150])))
    assert not encoder_attention_triton(q, key, value, torch.tensor([0]), 0.25).any()


def test_equal_segments_are_rows(close, monkeypatch):
    """What the host knows to be equally long goes the way of rows; other segments, and unknown ones, do not."""
    q, key, value = inputs(2, 40, 2, 1, 32, torch.float32)
    op = MMEncoderAttention(2, 32, num_kv_heads=1)
    ends = torch.tensor([0, 10, 20, 30, 40])
    wanted = op.forward_native(q.double(), key.double(), value.double(), ends)
    calls = []
    rows = op.rows.forward_cuda
    monkeypatch.setattr(op.rows, "forward_cuda", lambda *args: calls.append(args[0].shape) or rows(*args))
    close(op.forward_cuda(q, key, value, ends), wanted)
    close(op.forward_cuda(q, key, value), op.forward_native(q.double(), key.double(), value.double()))
    assert calls == [(8, 10, 2, 32), (2, 40, 2, 32)]
    uneven = torch.tensor([0, 10, 20, 31, 40])
    close(op.forward_cuda(q, key, value, uneven, 10), op.forward_native(q.double(), key.double(), value.double(), uneven))
    assert len(calls) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("grid", [(14, 20), (3, 5), (1, 70), (9, 1)], ids=str)
@pytest.mark.parametrize("relative", [True, False])
def test_relative_positions(grid, relative, dtype):
    op = RelPosAttention(32, 2, use_rel_pos=relative, input_size=(14, 14))
    for name, p in op.named_parameters():
        p.data = torch.randn(p.shape) * (0.2 if name.startswith("rel") else p.shape[-1] ** -0.5)
    op, x = op.to(dtype), torch.randn(2, *grid, 32).to(dtype)
    got, tolerance = op.forward_cuda(x), op.tolerance
    wanted = op.double().forward_native(x.double())
    assert tolerance.worst(got, wanted) <= tolerance.bound(dtype)

from __future__ import annotations

import pytest
import torch

from opmux.ops.attention.attention import Attention
from opmux.ops.attention.kernels_triton import Tile, attention_triton, launch

SHAPES = [  # B, S, L, N, K, D, Dv
    (1, 5, 9, 4, 2, 32, 32), (2, 7, 7, 3, 3, 72, 72), (1, 3, 130, 2, 1, 80, 48), (1, 100, 100, 2, 1, 32, 32),
    (2, 1, 200, 4, 2, 64, 64), (1, 70, 150, 2, 1, 16, 16), (1, 2, 2, 2, 1, 256, 256),
]  # fmt: skip
VARIANTS = {
    "causal": (True, 0, 0.0, None), "full": (False, 0, 0.0, None), "window": (True, 5, 0.0, None),
    "cap and added mask": (True, 0, 3.0, "added"), "window and mask": (True, 40, 0.0, "boolean"),
    "mask": (False, 0, 0.0, "boolean"),
}  # fmt: skip


def inputs(b, s, length, n, k, d, dv, dtype):
    q = torch.randn(b, s, n, d).to(dtype)
    key = torch.randn(b, k, length, d).to(dtype).transpose(1, 2)
    value = torch.randn(b, length, k, dv + 3).to(dtype)[..., 1 : dv + 1]
    return q, key, value


def expected(q, key, value, mask, causal, window, cap):
    op = Attention(
        q.shape[2], q.shape[3], None, key.shape[2], causal=causal, sliding_window=window or None, soft_cap=cap
    )
    return op.forward_native(q.double(), key.double(), value.double(), mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_the_definition(shape, variant, dtype, close):
    causal, window, cap, kind = VARIANTS[variant]
    q, key, value = inputs(*shape, dtype)
    b, s, length, n = shape[:4]
    mask = None
    if kind == "added":
        mask = torch.randn(b, 1, s, length + 2)
    elif kind == "boolean":
        mask = torch.rand(1, n, s, length) > 0.4
        mask[..., 0, :] = False  # a row that sees nothing gives zeros
    got = attention_triton(q, key, value, mask, q.shape[-1] ** -0.5, causal, window, cap)
    close(got, expected(q, key, value, mask, causal, window, cap))


@pytest.mark.parametrize("splits", [1, 2, 3, 8, 16])
def test_parts_merge(splits, close):
    q, key, value = inputs(1, 1, 90, 4, 2, 32, 32, torch.float32)
    got = launch(q, key, value, None, 32**-0.5, True, 0, 0.0, Tile(2, 16, 16, splits, 4, 2))
    close(got, expected(q, key, value, None, True, 0, None))


def test_nothing_to_attend_to():
    q = torch.randn(1, 2, 2, 16)
    got = attention_triton(q, torch.randn(1, 0, 1, 16), torch.randn(1, 0, 1, 16), None, 0.25, False, 0, 0.0)
    assert torch.equal(got, torch.zeros_like(q))
    assert attention_triton(q[:, :0], q, q, None, 0.25, True, 0, 0.0).shape == (1, 0, 2, 16)

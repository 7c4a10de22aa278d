"""rotary_attention against the ops it is made of: values, what it writes, and what it does not."""

from __future__ import annotations

import pytest
import torch

from opmux.core.config import CompilationConfig, use_config
from opmux.ops import ApplyRotaryEmb, Attention, RotaryAttention

# B, S, start, room, N, K, D, R, NeoX, a table per row
SHAPES = [
    (1, 1, 0, 1, 9, 3, 64, 64, True, False),
    (1, 1, 300, 512, 9, 3, 64, 64, True, False),
    (2, 7, 5, 20, 4, 2, 16, 8, True, True),
    (3, 1, 4, 9, 4, 1, 32, 32, False, True),
    (1, 65, 0, 65, 3, 3, 80, 32, False, False),
]


def build(dtype, b, s, start, room, n, k, d, r, neox, table_per_row):
    torch.manual_seed(0)
    op = RotaryAttention(n, d, 0.3, k, is_neox_style=neox, soft_cap=20.0)
    qkv = torch.randn(b, s, (n + 2 * k) * d).to(dtype)
    angles = torch.randn(b, s, r // 2) if table_per_row else torch.randn(s, r // 2)
    # Heads before tokens, as a transformers cache lies in memory.
    keys, values = (torch.randn(b, k, room, d).to(dtype).transpose(1, 2) for _ in range(2))
    return op, (qkv, angles.cos().to(dtype), angles.sin().to(dtype), keys, values, start)


def by_parts(op, qkv, cos, sin, keys, values, start):
    b, s, _ = qkv.shape
    n, k, d, r = op.heads, op.kv_heads, op.head_size, 2 * cos.shape[-1]
    q, key, value = qkv.view(b, s, -1, d).split((n, k, k), dim=2)
    rope = ApplyRotaryEmb(is_neox_style=op.is_neox_style)
    q, key = (torch.cat((rope(x[..., :r], cos, sin), x[..., r:]), -1) for x in (q, key))
    keys, values = keys.clone(), values.clone()
    keys[:, start : start + s], values[:, start : start + s] = key, value
    attention = Attention(n, d, op.scale, k, soft_cap=op.soft_cap)
    return attention(q, keys[:, : start + s], values[:, : start + s]).flatten(2), keys, values


@pytest.mark.parametrize("method", ["forward_native", "chosen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_equals_its_parts(shape, dtype, method):
    op, args = build(dtype, *shape)
    out, keys, values = by_parts(op, *args)
    got = op.forward_native(*args) if method == "forward_native" else op(*args)
    assert got.dtype == dtype
    assert got.shape == out.shape
    bound = 4 * torch.finfo(dtype).eps if dtype != torch.float32 else 2e-6
    assert float((got.float() - out.float()).abs().max() / out.float().abs().max()) <= bound
    # Old tokens and the unused end are bit for bit what they were.
    assert torch.equal(args[4], values)
    assert float((args[3].float() - keys.float()).abs().max()) <= bound * 4
    start, end = args[5], args[5] + args[0].shape[1]
    assert torch.equal(args[3][:, :start], keys[:, :start])
    assert torch.equal(args[3][:, end:], keys[:, end:])


@pytest.mark.parametrize("method", ["forward_native", "chosen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_query_and_key_by_themselves_stand_for_those_of_the_product(shape, dtype, method):
    op, args = build(dtype, *shape)
    qkv, (b, s), (n, k, d) = args[0], args[0].shape[:2], (op.heads, op.kv_heads, op.head_size)
    # The query lies in memory heads first, the key behind other values: strides are followed.
    query = torch.randn(b, n, s, d).to(dtype).transpose(1, 2)
    key = torch.randn(b, s, k + 1, d).to(dtype)[:, :, 1:]
    given = torch.cat((query.flatten(2), key.flatten(2), qkv[..., (n + k) * d :]), -1)
    out, keys, values = by_parts(op, given, *args[1:])
    qkv[..., : (n + k) * d] = float("nan")
    got = (op.forward_native if method == "forward_native" else op)(*args, query, key)
    bound = 4 * torch.finfo(dtype).eps if dtype != torch.float32 else 2e-6
    assert float((got.float() - out.float()).abs().max() / out.float().abs().max()) <= bound
    assert torch.equal(args[4], values)
    assert float((args[3].float() - keys.float()).abs().max()) <= bound * 4


def test_a_query_of_another_shape_is_an_error():
    op, args = build(torch.float32, *SHAPES[2])
    with pytest.raises(ValueError, match=r"query of shape \(2, 7, 4, 16\)"):
        op(*args, torch.zeros(2, 7, 64), None)
    with pytest.raises(ValueError, match=r"key of shape \(2, 7, 2, 16\)"):
        op(*args, None, torch.zeros(2, 7, 4, 16))


def test_the_kernel_ran():
    op, args = build(torch.bfloat16, *SHAPES[1])
    op(*args)
    decision = op.decision(*args)
    assert op.routes[0].decision.method == decision.method
    assert op.routes[0].calls == 1


def test_strange_layouts_go_native_and_are_counted():
    op, args = build(torch.float32, *SHAPES[2])
    keys = args[3].transpose(2, 3).contiguous().transpose(2, 3)  # the last dimension is not dense
    out = op(*args[:3], keys, *args[4:])
    assert float((out - build(torch.float32, *SHAPES[2])[0].forward_native(*args)).abs().max()) <= 1e-5
    route = op.routes[0]
    assert route.decision.method == "forward_native" or sum(route.refusals.values()) == 1


def test_disabled_it_runs_native():
    with use_config(CompilationConfig(["all", "-rotary_attention"])):
        op, args = build(torch.float32, *SHAPES[0])
    op(*args)
    assert op.routes[0].decision.method == "forward_native"


def test_no_room_and_wrong_widths_are_errors():
    op, args = build(torch.float32, *SHAPES[2])
    with pytest.raises(ValueError, match="token 14"):
        op(*args[:5], 14)
    qkv, cos, sin, keys, values, start = args
    for wrong in (
        (qkv[..., :-1], cos, sin, keys, values, start),
        (qkv, cos[:, :-1], sin[:, :-1], keys, values, start),
        (qkv, cos[:1], sin[:1], keys, values, start),
        (qkv, cos, sin, keys[:1], values[:1], start),
        (qkv, cos, sin, keys, values[:, :-1], start),
        (qkv, cos, sin, keys, values, -1),
    ):
        with pytest.raises(ValueError, match="4 query and 2 key heads"):
            op(*wrong)


def test_gradients_take_the_native_way():
    op, args = build(torch.float32, *SHAPES[2])
    qkv = args[0].requires_grad_()
    op(qkv, *args[1:]).sum().backward()
    assert qkv.grad.abs().sum() > 0

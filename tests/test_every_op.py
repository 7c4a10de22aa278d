"""Every op x method x case x dtype x (eager, compiled), against native in float64, within the op's one tolerance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opmux import ops
from opmux.core import registry
from opmux.core.cases import FLOATS, Case, Inputs

ops.load_all()

SMALL = 400_000  # elements, or products / 64, that a case may have here


def cost(cls: type, case: Case) -> int:
    needs = cls.cost(case, torch.float32)
    return max(needs.size_bytes // 4, needs.flops // 64)


def pairs() -> Iterator[Any]:
    for name, cls in sorted(registry.op_registry.items()):
        if not cls.__module__.startswith("opmux."):
            continue
        for case in cls.cases():
            if cost(cls, case) <= SMALL:
                for dtype in FLOATS:
                    yield pytest.param(cls, case, dtype, id=f"{name}-{case.name}-{str(dtype)[6:]}")


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in tensors(v)]
    return [value] if isinstance(value, Tensor) else []


def in_float64(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return value.double()
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def reference(cls: type, case: Case, inputs: Inputs) -> list[Tensor]:
    op = case.build(cls, inputs).double()
    return tensors(op.forward_native(*(in_float64(a) for a in case.args(inputs))))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def poison(like: list[Tensor]) -> None:
    """Leave freed memory full of NaN bytes behind, so that an element that a kernel does not write shows."""
    junk = [torch.full((t.numel() * t.element_size() + 64,), 0xFF, dtype=torch.uint8) for t in like for _ in range(2)]
    del junk


def check(cls: type, out: Any, ref: list[Tensor], dtype: torch.dtype, what: str) -> None:
    got = tensors(out)
    assert len(got) == len(ref)
    for index, (a, b) in enumerate(zip(got, ref, strict=True)):
        # What follows the inputs' dtype is float64 in the reference; fp8 values and fp32 scales stay what they are.
        assert a.dtype == (dtype if b.dtype == torch.float64 else b.dtype)
        assert a.shape == b.shape
        worst, bound = cls.tolerance.worst(a, b), cls.tolerance.bound(a.dtype, dtype)
        assert worst <= bound, f"{what}, output {index}: {worst:.3g} ulp, the op allows {bound:g}"


@pytest.mark.parametrize(("cls", "case", "dtype"), pairs())
def test_eager(cls: type, case: Case, dtype: torch.dtype) -> None:
    inputs = Inputs(dtype)
    ref = reference(cls, case, inputs)
    op, args = case.build(cls, inputs), case.args(inputs)
    before = [a.clone() for a in tensors(args)]
    poison(ref)
    out = op(*args)
    check(cls, out, ref, dtype, op.decision(*args).method or "nothing")
    check(cls, op.forward_native(*args), ref, dtype, "forward_native")
    again = op(*args)
    for first, second in zip(tensors(out), tensors(again), strict=True):
        same = torch.equal(first, second) if first.numel() == 0 else torch.equal(bits(first), bits(second))
        assert same, "a repeat run gave other bits"
    for a, b in zip(tensors(args), before, strict=True):
        assert torch.equal(a, b), "an input was written"
        assert all(a.data_ptr() != t.data_ptr() for t in tensors(out) if t.numel()), "an output aliases an input"


@pytest.mark.parametrize("cls", [c for n, c in sorted(registry.op_registry.items()) if list(c.cases())], ids=lambda c: c.name)
def test_compiled_equals_eager(cls: type) -> None:
    """One graph without breaks, the kernel inside it as one opaque op, equal to eager bit for bit."""
    case = next(c for c in cls.cases() if not c.bench and cost(cls, c) and c.dims.get("T", c.dims.get("S", 1)))
    inputs = Inputs(torch.bfloat16)
    op, args = case.build(cls, inputs), case.args(inputs)
    torch._dynamo.reset()  # every op shares CustomOp.__call__, and with it the compiler's limit of versions of one function
    compiled = torch.compile(op, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for a, b in zip(tensors(compiled(*args)), tensors(op(*args)), strict=True):
            assert a.shape == b.shape
            assert torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("cls", [c for n, c in sorted(registry.op_registry.items()) if list(c.cases())], ids=lambda c: c.name)
def test_gradients_are_natives(cls: type) -> None:
    """A call that needs a gradient runs native, whatever kernel serves the others (contract D6)."""
    case = next(c for c in cls.cases() if not c.bench and cost(cls, c) and c.dims.get("T", c.dims.get("S", 1)))
    inputs = Inputs(torch.float32)
    op, args = case.build(cls, inputs), case.args(inputs)
    leaves = [a.requires_grad_() for a in tensors(args) if a.is_floating_point()]
    for p in op.parameters():
        leaves.append(p.requires_grad_())
    assert leaves or cls.name == "logits_processor"
    grads = torch.autograd.grad(sum(t.float().sum() for t in tensors(op(*args))), leaves)
    want = torch.autograd.grad(sum(t.float().sum() for t in tensors(op.forward_native(*args))), leaves)
    for a, b in zip(grads, want, strict=True):
        assert torch.equal(a, b)

"""Every op's GPU method on the op's own small cases, against its definition in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from opmux import ops
from opmux.core import registry
from opmux.core.cases import Case, Inputs
from opmux.core.requires import requirements_of
from opmux.testing.tensors import in_float64, tensors

ops.load_all()

SMALL = 30_000  # elements, or products / 64, that a case may have here


def cases() -> Iterator[Any]:
    for name, cls in sorted(registry.op_registry.items()):
        if not cls.__module__.startswith("opmux.") or not hasattr(cls.forward_cuda, "__opmux_requires__"):
            continue
        for case in cls.cases():
            cost = cls.cost(case, torch.float32)
            if max(cost.size_bytes // 4, cost.flops // 64) <= SMALL:
                # bf16 is left to the GPU, see conftest.py.
                for dtype in (torch.float32, torch.float16):
                    yield pytest.param(cls, case, dtype, id=f"{name}-{case.name}-{str(dtype)[6:]}")


@pytest.mark.parametrize(("cls", "case", "dtype"), cases())
def test_gpu_method_is_the_definition(cls: type, case: Case, dtype: torch.dtype) -> None:
    inputs = Inputs(dtype)
    arguments, op = case.args(inputs), case.build(cls, inputs)
    when = requirements_of(cls.forward_cuda).when
    if when is not None and (refusal := when(op, *arguments)):
        pytest.skip(f"the method {refusal}")
    got = tensors(op.forward_cuda(*arguments))
    want = tensors(case.build(cls, inputs).double().forward_native(*(in_float64(a) for a in case.args(inputs))))
    assert len(got) == len(want)
    for out, reference in zip(got, want, strict=True):
        worst = cls.tolerance.worst(out, reference)
        assert worst <= cls.tolerance.bound(out.dtype, dtype), f"{worst:.1f} units in the last place"
        assert all(out.data_ptr() != a.data_ptr() for a in arguments if isinstance(a, Tensor) and a.numel())

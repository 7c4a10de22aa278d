"""Runs the Triton kernels in Triton's interpreter, which must be chosen before Triton is imported.

So these tests need a process of their own: ``pytest tests/triton``. In a process that has imported Triton they are
skipped. The interpreter truncates where it converts fp32 to bf16 and multiplies bf16 blocks as integers, so bf16 is
checked to two units in the last place and attention in fp16 and fp32; ``benchmarks/gpu_checks.py`` has the exact
checks, on a GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SENTINEL = 77.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        reason = "Triton was imported without its interpreter; run `pytest tests/triton` in a process of its own"
        for item in items:
            if "/triton/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def guarded_outputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every output lies between sentinels, which must survive the test, and is NaN until a kernel writes it."""
    buffers: list[tuple[Tensor, int]] = []

    def empty(*shape: Any, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
        if dtype is not None and dtype.itemsize == 1 and dtype.is_floating_point:  # fp8 compares and fills nothing
            return empty(*shape, dtype=torch.uint8).view(dtype)
        size = torch.Size(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        buffer = torch.full((size.numel() + 32,), SENTINEL, dtype=dtype)
        buffers.append((buffer, size.numel()))
        inner = buffer[16 : 16 + size.numel()]
        if inner.is_floating_point():
            inner.fill_(float("nan"))
        return inner.view(size)

    def empty_like(x: Tensor, **kwargs: Any) -> Tensor:
        return empty(*x.shape, dtype=x.dtype)

    def new_empty(self: Tensor, *shape: Any, **kwargs: Any) -> Tensor:
        return empty(*shape, dtype=kwargs.get("dtype", self.dtype))

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "empty_like", empty_like)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    yield
    for buffer, count in buffers:
        assert bool((buffer[:16] == SENTINEL).all()), "a kernel wrote before its output"
        assert bool((buffer[16 + count :] == SENTINEL).all()), "a kernel wrote behind its output"


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def close() -> Callable[[Tensor, Tensor], None]:
    """The relative L2 error against a float64 reference; NaN never passes."""

    def check(out: Tensor, reference: Tensor) -> None:
        assert out.shape == reference.shape
        error = (out.double() - reference.double()).norm() / reference.double().norm().clamp(min=1e-30)
        assert error <= TOLERANCE[out.dtype], f"relative error {error:.2e}"

    return check

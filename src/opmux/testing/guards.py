"""Memory in which a kernel's mistakes show: outputs are NaN until they are written, and lie between guards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

GUARD_BYTES = 512  # keeps the alignment of torch's own allocators on CPU and CUDA
SENTINEL = 0x5A
POISON = 0xFF  # NaN in every floating dtype but one, -1 in integers
_POISON_OF = {torch.float8_e4m3fnuz: 0x80}

_ALLOCATORS = (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided)


class Guarded(TorchFunctionMode):
    """While it is active, ``torch.empty`` and its kin give poisoned memory between guards.

    It sees allocations that Python code makes, which is how kernels here get their outputs; memory that torch allocates inside
    its own operations stays as it is. Filling what is allocated, rather than freed memory beforehand, makes it certain that an
    element that no one writes is seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers: list[tuple[Tensor, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in _ALLOCATORS or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        device = kwargs.get("device")
        if device is None:
            device = args[0].device if args and isinstance(args[0], Tensor) else torch.get_default_device()
        if torch.device(device).type == "meta":
            return func(*args, **kwargs)
        plan = func(*args, **{**kwargs, "device": "meta", "pin_memory": False})
        return self._allocate(plan, device)

    def _allocate(self, plan: Tensor, device: torch.device | str) -> Tensor:
        """A tensor with the shape, strides and dtype of ``plan``."""
        elements = 1 + sum((n - 1) * s for n, s in zip(plan.shape, plan.stride(), strict=True)) if plan.numel() else 0
        size = elements * plan.element_size()
        buffer = torch.full((size + 2 * GUARD_BYTES,), SENTINEL, dtype=torch.uint8, device=device)
        inner = buffer[GUARD_BYTES : GUARD_BYTES + size].fill_(_POISON_OF.get(plan.dtype, POISON))
        self._buffers.append((buffer, size))
        return inner.view(plan.dtype).as_strided(plan.shape, plan.stride())

    def damage(self) -> str | None:
        """A sentence if a kernel wrote outside its outputs."""
        for buffer, size in self._buffers:
            if not bool((buffer[:GUARD_BYTES] == SENTINEL).all()):
                return f"a kernel wrote before an output of {size} bytes"
            if not bool((buffer[GUARD_BYTES + size :] == SENTINEL).all()):
                return f"a kernel wrote behind an output of {size} bytes"
        return None

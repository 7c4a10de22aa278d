"""Comparing a module with our formula by running both: numbers decide, names do not."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from . import shards

FP32_TOLERANCE = 2e-5  # of the largest value
# Units in the last place of the largest value, in the model's dtype. Rounding alone reached 3.1 in 30 random models; what
# is no rounding has failed in fp32 before.
LOW_TOLERANCE = 8.0

_IGNORED = {"training", "layer_idx", "forward", "config", "_built"}
_verdicts: dict[Any, Any] = {}


def once(key: Any, judge: Callable[[], Any]) -> Any:
    """The verdict for ``key``, judged at its first use in this process."""
    if key not in _verdicts:
        _verdicts[key] = judge()
    return _verdicts[key]


def fingerprint(module: Any) -> tuple[Any, ...]:
    """What makes two modules compute the same: classes, sources, shapes and dtypes, and plain settings. No weights."""
    parts = []
    for name, part in module.named_modules():
        settings = tuple(
            (k, v)
            for k, v in sorted(part.__dict__.items())
            if k not in _IGNORED and (v is None or isinstance(v, (bool, int, float, str)))
        )
        shapes = tuple((k, tuple(p.shape), p.dtype) for k, p in part._parameters.items() if p is not None)
        parts.append((name, type(part), source_hash(part.__class__), settings, shapes))
    config = getattr(module, "config", None)
    return (*parts, getattr(config, "_attn_implementation", None), str(getattr(config, "rope_parameters", None)))


@functools.cache
def source_hash(cls: Any) -> str:
    """A short hash of the source of a class's forward; a match of numbers holds for that source."""
    try:
        return hashlib.sha256(inspect.getsource(inspect.unwrap(cls.forward)).encode()).hexdigest()[:12]
    except (OSError, TypeError):
        return "unknown"


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """No gradient, and the random state of the process as it was."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def specimen(module: Any, dtype: torch.dtype) -> Any:
    """A copy to experiment on: eval mode, one dtype, weights that hide nothing (a norm's ones would)."""
    twin = copy.deepcopy(module).eval()
    shards.alone(twin)
    for part in twin.modules():
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
    for parameter in twin.parameters():
        parameter.requires_grad_(False)
        if parameter.dim() == 1:
            parameter.data = parameter.data + 0.25 * torch.randn(parameter.shape).to(parameter)
    return twin.to(dtype) if dtype.is_floating_point else twin


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference relative to the largest value; infinite for another shape, dtype or a NaN."""
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
        return float("inf")
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    scale = theirs.double().abs().max().clamp_min(1e-30)
    worst = float((ours.double() - theirs.double()).abs().max() / scale)
    return worst if worst == worst else float("inf")


def agrees(ours: Tensor, theirs: Tensor) -> bool:
    """Whether the two differ by rounding only."""
    if not isinstance(ours, Tensor):
        return False
    allowed = FP32_TOLERANCE if ours.dtype == torch.float32 else LOW_TOLERANCE * torch.finfo(ours.dtype).eps
    return difference(ours, theirs) <= allowed


def random(like: nn.Module, *shape: int, scale: float = 1.0) -> Tensor:
    """Normal values on the device and in the dtype of the module's parameters."""
    own = next(like.parameters(), None)
    values = torch.randn(shape) * scale
    return values if own is None else values.to(own.device, own.dtype)


def reason_of(error: Exception) -> str:
    """One line of an exception."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]

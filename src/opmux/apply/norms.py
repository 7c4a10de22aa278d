"""RMS norms: any module without children that computes one of our formulas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..core.custom_op import CustomOp
from ..ops.norm.gemma_rms_norm import GemmaRMSNorm
from ..ops.norm.rms_norm import RMSNorm
from . import probe
from .binding import Binding, parameter_names, share_parameters

Build = dict[str, Any]  # constructor arguments, with the class under "cls"


class NormBinding(Binding):
    """Runs a norm module by its op. ``run`` takes a residual too, for the layers that add before they normalise."""

    def __init__(self, module: Any, op: CustomOp, hint: str) -> None:
        super().__init__(module)
        self.op = op
        self.hint = hint

    def ops(self) -> Iterator[tuple[str, CustomOp, str]]:
        yield "", self.op, self.hint

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or self.steps_aside(args[0]):
            return self.original(*args, **kwargs)
        return self.op(args[0])


def looks_like_norm(module: Any) -> bool:
    """A leaf with one vector of parameters, called weight, that takes one argument."""
    weight = module._parameters.get("weight")
    return not module._modules and weight is not None and weight.dim() == 1 and len(parameter_names(module)) == 1


def find_norm(module: Any) -> NormBinding | str:
    """The binding for a norm, or why there is none."""
    if isinstance(module, nn.LayerNorm) or module._parameters.get("bias") is not None:
        return "is a layer norm (it subtracts the mean); apply replaces RMS norms only"
    verdict = probe.once(("norm", probe.fingerprint(module)), lambda: _recognise(module))
    if isinstance(verdict, str):
        return verdict
    build, hint = verdict
    return NormBinding(module, _op(build, module), hint)


def _op(build: Build, module: Any) -> CustomOp:
    arguments = dict(build)
    cls = arguments.pop("cls")
    with torch.device("meta"):
        op: CustomOp = cls(**arguments, round_sum=True)
    share_parameters(op, module)
    return op


def _recognise(module: Any) -> tuple[Build, str] | str:
    width = module.weight.shape[0]
    floats = [v for v in module.__dict__.values() if isinstance(v, float) and 0 <= v < 0.1]
    builds: list[Build] = [
        {"cls": cls, "hidden_size": width, "eps": eps, **more}
        for eps in floats or (1e-6, 1e-5)
        for cls, more in (
            (RMSNorm, {"cast_order": "cast_first"}),
            (RMSNorm, {"cast_order": "cast_last"}),
            (GemmaRMSNorm, {}),
        )
    ]
    with probe.quietly():
        try:
            exact = [b for b in builds if _errors(module, b, torch.float32) <= probe.FP32_TOLERANCE]
            if not exact:
                return "computes none of our norms (compared on random input)"
            # fp32 cannot tell where a narrower type is rounded, and that is what a norm's cast order decides.
            best = min(exact, key=lambda b: _errors(module, b, torch.bfloat16))
            if _errors(module, best, torch.bfloat16) > probe.LOW_TOLERANCE * torch.finfo(torch.bfloat16).eps:
                return "agrees with our norm in fp32 but not in bf16"
        except Exception as error:  # a module that cannot be probed is a module that is left alone
            return f"could not be probed ({probe.reason_of(error)})"
    return best, best.get("cast_order", "1 + weight")


def _errors(module: Any, build: Build, dtype: torch.dtype) -> float:
    twin = probe.specimen(module, dtype)
    op = _op(build, twin)
    # Small rows show eps; the mean over many values orders candidates that differ by single roundings.
    x = probe.random(twin, 64, build["hidden_size"]) * torch.logspace(-3, 1, 64).unsqueeze(1).to(twin.weight)
    ours, theirs = op.forward_native(x), twin(x)
    worst = max(probe.difference(a, b) for a, b in zip(_rows(ours), _rows(theirs), strict=True))
    return worst + float((ours != theirs).float().mean()) * 1e-6


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2)

"""Activations: which op gives a function's numbers, and modules that are nothing but one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.custom_op import CustomOp
from ..ops.activation.fatrelu_and_mul import FatreluAndMul
from ..ops.activation.gelu import GELU
from ..ops.activation.gelu_and_mul import GeluAndMul
from ..ops.activation.gelu_fast import FastGELU
from ..ops.activation.gelu_new import NewGELU
from ..ops.activation.quick_gelu import QuickGELU
from ..ops.activation.relu2 import ReLUSquaredActivation
from ..ops.activation.silu_and_mul import SiluAndMul
from . import probe
from .binding import Binding, parameter_names

# The functions that models use, told apart by numbers.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
# Of gate and up. Modules round the gate before they multiply.
GATED: dict[str, Callable[[], CustomOp]] = {
    "silu": lambda: SiluAndMul(round_gate=True),
    "gelu_tanh": lambda: GeluAndMul("tanh", round_gate=True),
    "gelu": lambda: GeluAndMul("none", round_gate=True),
    "relu": lambda: FatreluAndMul(0.0),
}
_PLAIN: dict[str, Callable[[], CustomOp]] = {
    "gelu": GELU,
    "gelu_tanh": NewGELU,
    "relu2": ReLUSquaredActivation,
    "quick_gelu": QuickGELU,
}


def plain_op(function: str, module: Any) -> CustomOp | None:
    """The op of one of ``FUNCTIONS``, for the module that it stands for; None where there is none."""
    if function == "gelu_tanh" and "fast" in type(module).__name__.lower():
        return FastGELU()  # the same numbers under the name that the model gives them
    build = _PLAIN.get(function)
    return None if build is None else build()


class ActivationBinding(Binding):
    """Runs an activation module by its op."""

    def __init__(self, module: Any, op: CustomOp) -> None:
        super().__init__(module)
        self.op = op

    def ops(self) -> Iterator[tuple[str, CustomOp, str]]:
        yield "", self.op, ""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or self.steps_aside(args[0]):
            return self.original(*args, **kwargs)
        return self.op(args[0])


def looks_like_activation(module: Any) -> bool:
    """A leaf without tensors that takes one argument and is one of the functions that have an op."""
    tensors = module._modules or module._parameters or module._buffers
    if tensors or "forward" in module.__dict__ or len(parameter_names(module)) != 1:
        return False
    return function_of(module) in _PLAIN


def find_activation(module: Any) -> ActivationBinding | str:
    """The binding for an activation module."""
    op = plain_op(str(function_of(module)), module)
    return ActivationBinding(module, op) if op is not None else "is no activation that opmux has an op for"


def function_of(module: Any) -> str | None:
    """Which of ``FUNCTIONS`` a module computes, if any."""

    def judge() -> str | None:
        with probe.quietly():
            x = torch.linspace(-9.0, 9.0, 66).view(2, 33)
            try:
                theirs = type(module).forward(module, x.clone())
            except Exception:  # a module that takes something else is no activation
                return None
            return next((name for name, f in FUNCTIONS.items() if probe.agrees(f(x), theirs)), None)

    found: str | None = probe.once(("activation", probe.fingerprint(module), module.training), judge)
    return found

"""Gated MLPs: ``down(silu(gate(x)) * up(x))``, with gate and up apart or in one layer already."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.config import CompilationConfig
from ..core.custom_op import CustomOp
from ..core.decide import NATIVE
from ..ops.activation.silu_and_mul import SiluAndMul
from ..ops.linear.linear_silu_and_mul import LinearSiluAndMul
from . import probe
from .binding import Binding, share_parameters
from .linears import Merged, Uses, linear_op, unmergeable, untouchable
from .shards import merged_product, note

_ACTIVATIONS = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


class MLPBinding(Binding):
    """A gated MLP as two calls: ``linear_silu_and_mul`` (or ``replicated_linear`` and ``silu_and_mul``), then down.

    Args:
        module: the MLP.
        first: names of the children that make gate and up: two to merge, or one that holds both.
        down: name of the last child.
        config: decides whether the two steps may be one op: both of them must be enabled.
    """

    def __init__(self, module: Any, first: tuple[str, ...], down: str, config: CompilationConfig) -> None:
        children: dict[str, Any] = module._modules
        super().__init__(module, [(children, name, child) for name, child in children.items() if child is not None])
        linears: list[nn.Linear] = [children[name] for name in first]
        self.first, self.down_name = first, down
        self.down = linear_op(children[down])
        width, rows, bias = linears[0].in_features, sum(m.out_features for m in linears), linears[0].bias is not None
        # One op is the better where it has a kernel; elsewhere the gate alone may have one.
        self.both: LinearSiluAndMul | None = None
        if all(config.is_custom_op_enabled(op) for op in ("replicated_linear", "silu_and_mul")):
            with torch.device("meta"):
                both = LinearSiluAndMul(width, rows // 2, bias)
            if both.decision(linears[0].weight.detach()[:1]).method != NATIVE:
                self.both = both
        if self.both is None:
            self.product = merged_product(linears)
            self.gate = SiluAndMul(round_gate=True)
        op: CustomOp = self.product if self.both is None else self.both
        if len(linears) == 1:
            share_parameters(op, linears[0])
        else:
            self.merged.append(Merged(linears, op))

    def ops(self) -> Iterator[tuple[str, CustomOp, str]]:
        merged = "gate and up merged" if self.merged else ""
        if self.both is not None:
            part = note(self.module._modules[self.first[0]])  # the op itself knows nothing of ranks
            yield _braces(self.first), self.both, "; ".join(filter(None, (merged, part)))
        else:
            yield _braces(self.first), self.product, merged
            yield "", self.gate, ""
        yield self.down_name, self.down, ""

    def run(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H], without any check."""
        h = self.gate(self.product(x)) if self.both is None else self.both(x)
        return self.down(h)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or self.steps_aside(args[0]):
            return self.original(*args, **kwargs)
        return self.run(args[0])


def looks_like_mlp(module: Any) -> bool:
    """Two or three linear layers H -> I, (H -> I,) I -> H, or H -> 2I, I -> H, and otherwise only an activation."""
    return _shape_of(module) is not None


def find_mlp(module: Any, uses: Uses, config: CompilationConfig, fuse: bool) -> MLPBinding | str:
    """The binding for a gated MLP, or why there is none."""
    shape = _shape_of(module)
    assert shape is not None
    inputs, down = shape
    children: dict[str, Any] = module._modules
    for name in (*inputs, down):
        why = untouchable(children[name])
        if why is not None:
            return f"{name} {why}"
    verdict = probe.once(("mlp", probe.fingerprint(module)), lambda: _recognise(module, inputs, down))
    if isinstance(verdict, str):
        return verdict
    first, activation = verdict
    if activation != "silu":
        return f"its activation is {activation}; apply replaces gated MLPs with silu only"
    if len(first) == 2:
        if not fuse:
            return "gate and up are two layers, and fuse=False keeps them apart"
        why = unmergeable([children[name] for name in first], uses)
        if why is not None:
            return f"gate and up cannot be merged: {why}"
    return MLPBinding(module, first, down, config)


def _shape_of(module: Any) -> tuple[tuple[str, ...], str] | None:
    named = {n: m for n, m in module._modules.items() if m is not None and hasattr(m, "in_features")}
    others = [m for n, m in module._modules.items() if n not in named and m is not None]
    if len(named) not in (2, 3) or any(list(m.parameters()) for m in others):
        return None
    *inputs, down = sorted(named, key=lambda n: "down" in n or "out" in n or "c_proj" in n or n == "w2")
    wide = {(named[n].in_features, named[n].out_features) for n in inputs}
    if len(wide) != 1:
        return None
    hidden, inner = wide.pop()
    if len(inputs) == 1:
        inner, odd = divmod(inner, 2)
        if odd or inner == 0:
            return None
    fits = (named[down].in_features, named[down].out_features) == (inner, hidden)
    return (tuple(inputs), down) if fits else None


def _recognise(module: Any, inputs: tuple[str, ...], down: str) -> tuple[tuple[str, ...], str] | str:
    """(gate and up in this order, the activation's name), or why not."""
    with probe.quietly():
        try:
            twin = probe.specimen(module, torch.float32)
            children: dict[str, Any] = twin._modules
            x = probe.random(twin, 7, children[inputs[0]].in_features)
            theirs = twin(x)
            for (name, activation), order in itertools.product(_ACTIVATIONS.items(), itertools.permutations(inputs)):
                parts = [children[n](x) for n in order]
                gate, up = parts if len(parts) == 2 else parts[0].chunk(2, -1)
                if probe.agrees(children[down](activation(gate) * up), theirs):
                    return tuple(order), name
        except Exception as error:  # a module that cannot be probed is a module that is left alone
            return f"could not be probed ({probe.reason_of(error)})"
    return "is no gated MLP that opmux knows (compared on random input)"


def _braces(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else "{" + ",".join(names) + "}"

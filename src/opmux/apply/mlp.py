"""MLPs: ``down(act(gate(x)) * up(x))``, with gate and up apart or in one layer already, and ``down(act(up(x)))``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core import registry
from ..core.config import CompilationConfig
from ..core.custom_op import CustomOp
from ..core.decide import NATIVE
from ..ops.activation.silu_and_mul import SiluAndMul
from ..ops.linear.linear_silu_and_mul import LinearSiluAndMul
from ..ops.linear.replicated_linear import ReplicatedLinear
from . import probe
from .activations import FUNCTIONS, GATED, plain_op
from .binding import Binding, share_parameters
from .linears import Merged, Uses, linear_op, unmergeable, untouchable
from .shards import merged_product, note


@dataclass(frozen=True)
class Shape:
    """How an MLP is built.

    Attributes:
        first: names of the children that make gate and up (two, or one that holds both), or of the one before a plain
            activation.
        down: name of the last child.
        gated: whether the activation's result is multiplied by ``up``.
    """

    first: tuple[str, ...]
    down: str
    gated: bool


class MLPBinding(Binding):
    """An MLP as its products and the activation between them; gate and up with SiLU are one op where it has a kernel.

    Args:
        module: the MLP.
        shape: its parts, gate before up.
        function: the activation's name in ``FUNCTIONS``.
        config: decides whether product and gate may be one op: both must be enabled.
    """

    def __init__(self, module: Any, shape: Shape, function: str, config: CompilationConfig) -> None:
        children: dict[str, Any] = module._modules
        super().__init__(module, [(children, name, child) for name, child in children.items() if child is not None])
        linears: list[nn.Linear] = [children[name] for name in shape.first]
        self.first, self.down_name = shape.first, shape.down
        self.down = linear_op(children[shape.down])
        self.both: LinearSiluAndMul | None = None
        if not shape.gated:
            self.product = linear_op(linears[0])
            act = next((m for m in children.values() if m is not None and not hasattr(m, "in_features")), module)
            self.gate: Any = plain_op(function, act)
            return
        if function == "silu":
            self.both = _one_op(linears, config)
        if self.both is None:
            self.product = merged_product(linears)
            self.gate = GATED[function]()
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
    """Linear layers H -> I, (H -> I,) I -> H, or H -> 2I, I -> H, and otherwise only what has no parameters."""
    return bool(_shapes_of(module))


def find_mlp(module: Any, uses: Uses, config: CompilationConfig, fuse: bool) -> MLPBinding | str:
    """The binding for an MLP, or why there is none."""
    shapes = _shapes_of(module)
    children: dict[str, Any] = module._modules
    for name in (*shapes[0].first, shapes[0].down):
        why = untouchable(children[name])
        if why is not None:
            return f"{name} {why}"
    verdict = probe.once(("mlp", probe.fingerprint(module)), lambda: _recognise(module, shapes))
    if isinstance(verdict, str):
        return verdict
    shape, function = verdict
    if function not in GATED if shape.gated else plain_op(function, module) is None:
        return f"its activation is {function}, for which there is no op"
    if len(shape.first) == 2:
        if not fuse:
            return "gate and up are two layers, and fuse=False keeps them apart"
        why = unmergeable([children[name] for name in shape.first], uses)
        if why is not None:
            return f"gate and up cannot be merged: {why}"
    return MLPBinding(module, shape, function, config)


def op_name(module: Any) -> str:
    """The op under which the report names an MLP that was left as it is."""
    return "silu_and_mul" if any(shape.gated for shape in _shapes_of(module)) else "replicated_linear"


def _one_op(linears: list[nn.Linear], config: CompilationConfig) -> LinearSiluAndMul | None:
    """Product and gate as one op, where both are enabled and it has a kernel; elsewhere the gate alone may have one.

    Not where one of the two is replaced out of tree: the replacement is to run.
    """
    parts = (ReplicatedLinear, SiluAndMul)
    if registry.replaced(*parts) or not all(config.is_custom_op_enabled(part.name) for part in parts):
        return None
    width, rows, bias = linears[0].in_features, sum(m.out_features for m in linears), linears[0].bias is not None
    with torch.device("meta"):
        both = LinearSiluAndMul(width, rows // 2, bias)
    return both if both.decision(linears[0].weight.detach()[:1]).method != NATIVE else None


def _shapes_of(module: Any) -> list[Shape]:
    """The ways in which the module's children may be an MLP; the numbers decide between them."""
    named = {n: m for n, m in module._modules.items() if m is not None and hasattr(m, "in_features")}
    others = [m for n, m in module._modules.items() if n not in named and m is not None]
    if len(named) not in (2, 3) or any(m._modules or list(m.parameters()) for m in others):
        return []
    *inputs, down = sorted(named, key=lambda n: "down" in n or "out" in n or "c_proj" in n or n == "w2")
    wide = {(named[n].in_features, named[n].out_features) for n in inputs}
    if len(wide) != 1:
        return []
    hidden, inner = wide.pop()
    ends = (named[down].in_features, named[down].out_features)
    found = []
    if len(inputs) == 1:
        if inner > 0 and ends == (inner // 2, hidden) and inner % 2 == 0:
            found.append(Shape(tuple(inputs), down, True))
        if ends == (inner, hidden):
            found.append(Shape(tuple(inputs), down, False))
    elif ends == (inner, hidden):
        found.append(Shape(tuple(inputs), down, True))
    return found


def _recognise(module: Any, shapes: list[Shape]) -> tuple[Shape, str] | str:
    """(the parts, gate before up; the activation's name), or why not."""
    with probe.quietly():
        try:
            twin = probe.specimen(module, torch.float32)
            children: dict[str, Any] = twin._modules
            x = probe.random(twin, 7, children[shapes[0].first[0]].in_features, scale=2.0)
            theirs = twin(x)
            for shape, (name, function) in itertools.product(shapes, FUNCTIONS.items()):
                for order in itertools.permutations(shape.first):
                    parts = [children[n](x) for n in order]
                    if not shape.gated:
                        mine = function(parts[0])
                    else:
                        gate, up = parts if len(parts) == 2 else parts[0].chunk(2, -1)
                        mine = function(gate) * up
                    if probe.agrees(children[shape.down](mine), theirs):
                        return Shape(order, shape.down, shape.gated), name
        except Exception as error:  # a module that cannot be probed is a module that is left alone
            return f"could not be probed ({probe.reason_of(error)})"
    return "is no MLP that opmux knows (compared on random input)"


def _braces(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else "{" + ",".join(names) + "}"

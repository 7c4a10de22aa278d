"""Linear layers: which may be touched, their op, and several of them merged into one weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..core.custom_op import CustomOp
from ..ops.linear.product import Product
from ..ops.linear.replicated_linear import ReplicatedLinear
from .binding import Binding, foreign_forward, share_parameters
from .shards import SHARDS, own_op


class LinearBinding(Binding):
    """Runs an ``nn.Linear`` by ``replicated_linear`` on the module's own weight."""

    def __init__(self, module: nn.Linear) -> None:
        super().__init__(module)
        self.op = linear_op(module)

    def ops(self) -> Iterator[tuple[str, CustomOp, str]]:
        yield "", self.op, ""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or self.steps_aside(args[0]):
            return self.original(*args, **kwargs)
        return self.op(args[0])


def linear_op(module: Any) -> Product:
    """``replicated_linear`` on the module's own parameters; a shard itself."""
    if isinstance(module, SHARDS):
        return own_op(module)
    with torch.device("meta"):
        op = ReplicatedLinear(module.in_features, module.out_features, module.bias is not None, return_bias=False)
    share_parameters(op, module)
    return op


def untouchable(module: Any) -> str | None:
    """Why a linear layer is left alone, or None for a plain one or a shard of one."""
    cls = type(module)
    if hasattr(module, "base_layer"):
        return f"is LoRA-wrapped ({cls.__module__}.{cls.__qualname__})"
    if isinstance(module, SHARDS):
        return None
    if cls is not nn.Linear:
        return f"is a {cls.__qualname__}, not a plain nn.Linear (quantised or wrapped)"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is no plain parameter (parametrised or quantised)"
    kind = type(weight.data)
    if kind is not Tensor:
        return f"its weight is a {kind.__qualname__} (sharded or quantised)"
    if weight.is_meta:
        return "is offloaded: its weight is on the meta device"
    if not weight.is_floating_point():
        return f"is quantised: its weight is {str(weight.dtype).removeprefix('torch.')}"
    return foreign_forward(module)


class Uses:
    """How often each parameter and each storage serves in a model: merging must not tear tied weights apart."""

    def __init__(self, model: nn.Module) -> None:
        named = [(id(p), p) for _, p in model.named_parameters(remove_duplicate=False)]
        self.parameters = Counter(key for key, _ in named)
        distinct = dict(named).values()
        self.spans: dict[int, list[tuple[int, int, int]]] = {}
        for p in distinct:
            if not p.is_meta and type(p.data) is Tensor:
                start = p.data_ptr()
                span = (start, start + p.numel() * p.element_size(), id(p))
                self.spans.setdefault(p.untyped_storage().data_ptr(), []).append(span)

    def tied(self, parameter: Tensor) -> bool:
        """Whether another module uses the parameter, or another parameter the same memory."""
        if self.parameters[id(parameter)] > 1:
            return True
        start = parameter.data_ptr()
        end = start + parameter.numel() * parameter.element_size()
        spans = self.spans.get(parameter.untyped_storage().data_ptr(), [])
        return any(a < end and start < b and key != id(parameter) for a, b, key in spans)


def unmergeable(linears: list[nn.Linear], uses: Uses) -> str | None:
    """Why these layers cannot share one weight, or None."""
    weights = [m.weight for m in linears]
    if len({(w.dtype, w.device, w.shape[1]) for w in weights}) > 1:
        return "the weights differ in dtype, device or width"
    if len({m.bias is None for m in linears}) > 1:
        return "some have a bias and some have none"
    if any(uses.tied(w) for w in weights):
        return "a weight is tied to another module"
    return None


class Merged:
    """The weights of several linear layers as one buffer; their parameters become views of it.

    There is no second copy: ``state_dict`` keeps its keys and in-place updates reach both. A cast, a move or a load
    that gives a parameter memory of its own is noticed by its address, and the buffer is made anew.
    """

    def __init__(self, linears: list[nn.Linear], op: CustomOp) -> None:
        self.linears = linears
        self.op = op
        self._watched: list[tuple[dict[str, Any], str, int]] = []
        self.merge()

    def fresh(self) -> bool:
        """Whether every parameter is still a view of the buffer; makes the buffer anew if not."""
        for holder, name, address in self._watched:
            if holder[name].data_ptr() != address:
                return self.merge()
        return True

    @torch.no_grad()
    def merge(self) -> bool:
        """Move the parameters into one buffer, unless they lie in one already. False if they no longer fit together."""
        self._watched = []
        for name in ("weight", "bias"):
            parameters: list[Any] = [m._parameters.get(name) for m in self.linears]
            if any(p is None for p in parameters):
                continue
            if len({(p.dtype, p.device, p.shape[1:]) for p in parameters}) > 1:
                return False
            buffer = _buffer_of(parameters)
            self.op._parameters[name] = nn.Parameter(buffer, requires_grad=False)
            for module, parameter in zip(self.linears, parameters, strict=True):
                self._watched.append((module._parameters, name, parameter.data_ptr()))
        return True


def _buffer_of(parameters: list[nn.Parameter]) -> Tensor:
    first = parameters[0]
    rows = [p.shape[0] for p in parameters]
    total = (sum(rows), *first.shape[1:])
    address = first.data_ptr()
    for p in parameters:
        if p.data_ptr() != address or not p.is_contiguous() or _storage(p) != _storage(first):
            break
        address += p.numel() * p.element_size()
    else:
        dense = torch.empty(total, device="meta").stride()
        return first.data.as_strided(total, dense, first.storage_offset())
    buffer = torch.empty(total, dtype=first.dtype, device=first.device)
    for part, p in zip(buffer.split(rows), parameters, strict=True):
        part.copy_(p.data)
        p.data = part
    return buffer


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

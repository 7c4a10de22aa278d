"""Decoder layers, whole: about eight op calls and no other Python between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..core.custom_op import CustomOp
from . import probe
from .attention import CACHE_NAMES, AttentionBinding, attention_steps
from .binding import Binding, bound, parameter_names
from .mlp import MLPBinding
from .norms import NormBinding

Norms = tuple[str | None, ...]  # before and behind attention, before and behind the MLP


class LayerBinding(Binding):
    """A decoder layer ``h = x + n2(attn(n1(x)))``, ``h + n4(mlp(n3(h)))``, each norm optional, sums fused into norms.

    With ``n1`` alone attention and MLP stand side by side: ``x + attn(n1(x)) + mlp(n1(x))``.

    Args:
        module: the layer.
        norms: names of the norms before and behind attention, before and behind the MLP.
        multiplier: what attention and MLP are scaled by before they are added (Granite).
    """

    def __init__(self, module: Any, norms: Norms, multiplier: float) -> None:
        children: dict[str, Any] = module._modules
        super().__init__(module, [(children, name, child) for name, child in children.items() if child is not None])
        self.names = parameter_names(module)
        self.cache_name = next(name for name in self.names if name in CACHE_NAMES)
        self.attention_name, self.mlp_name = _attention_and_mlp(module)
        self.attention: Any = bound(children[self.attention_name])
        mlp = children[self.mlp_name]
        self.mlp_binding = bound(mlp) if isinstance(bound(mlp), MLPBinding) else None
        self.mlp = self.mlp_binding.run if isinstance(self.mlp_binding, MLPBinding) else mlp
        self.arrangement = norms
        ops = [None if name is None else bound(children[name]).op for name in norms]
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = ops
        self.side_by_side = norms[1:] == (None, None, None)
        self.multiplier = multiplier
        self.gather(self.attention, *([self.mlp_binding] if self.mlp_binding is not None else []))

    def run(
        self, delta: Tensor, residual: Tensor | None, cos: Tensor | None, sin: Tensor | None, mask: Tensor | None,
        cache: Any, aligned: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The layer's work, without any check; arguments as of ``AttentionBinding.run``.

        Args:
            delta, residual: [B, S, H]; the layer's input is their sum (or ``delta`` alone), which is not made yet, so
                that the first norm can make it.

        Returns: (delta, residual), whose sum is the layer's output.
        """
        x, residual = _add_and_norm(self.before_attention, delta, residual)
        if self.side_by_side:
            x = self.attention.run(x, cos, sin, mask, cache, aligned) + self.mlp(x)
            return (x if self.multiplier == 1.0 else x * self.multiplier), residual
        x = self.attention.run(x, cos, sin, mask, cache, aligned)
        if self.after_attention is not None:
            x = self.after_attention(x)
        if self.multiplier != 1.0:
            x = x * self.multiplier
        x, residual = _add_and_norm(self.before_mlp, x, residual)
        x = self.mlp(x)
        if self.after_mlp is not None:
            x = self.after_mlp(x)
        if self.multiplier != 1.0:
            x = x * self.multiplier
        return x, residual

    def all_ops(self) -> Iterator[CustomOp]:
        """Every op that the layer calls."""
        yield from (op for op in (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp) if op)
        for binding in (self.attention, self.mlp_binding):
            if binding is not None:
                yield from (op for _, op, _ in binding.ops())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        named = dict(zip(self.names, args, strict=False)) | kwargs
        x: Any = named.get("hidden_states")
        if self.attention.unusual(named) or self.steps_aside(x):
            return self.original(*args, **kwargs)
        cos, sin = self.attention.tables(named.get("position_embeddings"))
        delta, residual = self.run(
            x,
            None,
            cos,
            sin,
            named.get("attention_mask"),
            named.get(self.cache_name),
            False,
        )
        return residual + delta


def _add_and_norm(norm: Any, x: Tensor, residual: Tensor | None) -> Any:
    """(the norm of the sum, the sum); without a norm the sum twice."""
    if norm is None:
        total = x if residual is None else residual + x
        return total, total
    if residual is None:
        return norm(x), x
    return norm(x, residual)


def looks_like_layer(module: Any) -> bool:
    """An attention that we replaced, something like an MLP, and norms."""
    return _attention_and_mlp(module) is not None


def find_layer(module: Any, rotary: nn.Module | None) -> LayerBinding | str:
    """The binding for a decoder layer, or why there is none."""
    names = parameter_names(module)
    attention, mlp = _attention_and_mlp(module)
    rest = {n: c for n, c in _parts(module).items() if n not in (attention, mlp)}
    if not rest or not all(isinstance(bound(c), NormBinding) for c in rest.values()):
        return "its norms are not all norms that opmux knows"
    if "hidden_states" not in names or "position_embeddings" not in names or not set(names) & set(CACHE_NAMES):
        return f"its forward takes {', '.join(names)}, which is not how decoder layers are called"
    verdict = probe.once(("layer", probe.fingerprint(module)), lambda: _recognise(module, tuple(rest), rotary))
    return verdict if isinstance(verdict, str) else LayerBinding(module, *verdict)


def _attention_and_mlp(module: Any) -> Any:
    """The names of the two children, or None."""
    children = _parts(module)
    attention = [n for n, c in children.items() if isinstance(bound(c), AttentionBinding)]
    others = [n for n in children if n not in attention and not isinstance(bound(children[n]), NormBinding)]
    mlps = [n for n in others if isinstance(bound(children[n]), MLPBinding) or "mlp" in n.lower()]
    return (attention[0], mlps[0]) if len(attention) == len(mlps) == len(others) == 1 else None


def _parts(module: Any) -> dict[str, Any]:
    """The children that compute something: norms, with or without a weight, and all that have parameters."""
    children = {n: c for n, c in module._modules.items() if c is not None}
    return {n: c for n, c in children.items() if isinstance(bound(c), NormBinding) or list(c.parameters())}


def _recognise(module: Any, norms: tuple[str, ...], rotary: nn.Module | None) -> tuple[Norms, float] | str:
    """(which norm stands where, the multiplier), by numbers, or why nothing matches."""
    multipliers = [1.0, *sorted({v for v in module.__dict__.values() if isinstance(v, float)} - {1.0})]
    with probe.quietly():
        try:
            own = next(module.parameters()).dtype
            twin = probe.specimen(module, torch.float32)
            for arrangement, multiplier in itertools.product(_arrangements(norms), multipliers):
                if _matches(twin, arrangement, multiplier, rotary):
                    if own == torch.float32 or _matches(probe.specimen(module, own), arrangement, multiplier, rotary):
                        return arrangement, multiplier
                    return f"agrees with our layer in fp32 but not in {str(own).removeprefix('torch.')}"
        except Exception as error:  # a layer that cannot be probed is a layer that is left alone
            return f"could not be probed ({probe.reason_of(error)})"
    return "differs from our layer however its norms are placed (compared on random input)"


def _arrangements(norms: tuple[str, ...]) -> Iterator[Norms]:
    places: Any = {
        1: [(0,)],
        2: [(0, 2), (1, 3)],
        3: list(itertools.combinations(range(4), 3)),
        4: [(0, 1, 2, 3)],
    }.get(len(norms), [])
    for where, order in itertools.product(places, itertools.permutations(norms)):
        at: list[str | None] = [None] * 4
        for place, name in zip(where, order, strict=True):
            at[place] = name
        yield tuple(at)


def _matches(twin: Any, norms: Norms, multiplier: float, rotary: nn.Module | None) -> bool:
    ours = LayerBinding(twin, norms, multiplier)
    ours.attention.layer_idx = twin._modules[ours.attention_name].layer_idx = 0
    attention_module = twin._modules[ours.attention_name]
    for tables, x, mask, (theirs, mine) in attention_steps(attention_module, rotary, 1.0):
        named = {"hidden_states": x, "position_embeddings": tables, "attention_mask": mask}
        reference = ours.original(**named, **{ours.cache_name: theirs})
        reference = reference[0] if isinstance(reference, tuple) else reference
        cos, sin = ours.attention.tables(tables)
        delta, residual = ours.run(x, None, cos, sin, mask, mine, False)
        if not probe.agrees(residual + delta, reference):
            return False
    return True

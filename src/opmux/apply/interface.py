"""Attention through transformers' public interface, for modules that are not replaced whole.

``opmux`` is registered as an attention implementation, with the masks of ``sdpa``. A module uses it by a configuration
of its own that names it; the model's configuration, which other models may share, is not changed.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..core.custom_op import CustomOp
from ..core.errors import UsageError
from ..ops.attention.attention import Attention
from . import probe
from .attention import CACHE_NAMES, IMPLEMENTATIONS, attention_steps, width_of
from .binding import Binding, autocasts, idle, parameter_names

NAME = "opmux"
_HOLDER = "_opmux_attention"
_UNKNOWN = ("position_bias", "s_aux", "head_mask", "cu_seq_lens_q")  # arguments that change the result
_NO_CODE = (lambda: None).__code__


class InterfaceBinding(Binding):
    """Points one attention module at the implementation ``opmux``.

    Args:
        module: the attention module.
        heads: (head size, query heads, key heads).
        scale, soft_cap: what it passes to its implementation.
        enforce_enable: for vision encoders.
    """

    def __init__(
        self, module: Any, heads: tuple[int, int, int], scale: float, soft_cap: float | None = None,
        enforce_enable: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(module)
        size, queries, keys = heads
        build: dict[str, Any] = {
            "scale": scale, "num_kv_heads": keys, "soft_cap": soft_cap, "enforce_enable": enforce_enable
        }  # fmt: skip
        self.config = module.config
        self.implementation = self.config._attn_implementation
        self.causal = Attention(queries, size, **build)
        self.full = Attention(queries, size, causal=False, **build)

    def ops(self) -> Iterator[tuple[str, CustomOp, str]]:
        yield "", self.causal, "causal, through AttentionInterface"
        yield "", self.full, "with a mask, through AttentionInterface"

    def yields(self) -> bool:
        """Whether the model was given another implementation since, or somebody wants the attention weights."""
        return self.config._attn_implementation != self.implementation or not idle(self.module._forward_hooks)

    def own_function(self) -> Any:
        """The implementation that the model's config names."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        eager: Any = getattr(sys.modules[type(self.module).__module__], "eager_attention_forward", None)
        return ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)

    def takes(self, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float | None, more: dict[str, Any]) -> bool:
        """Whether the op computes what this call asks for."""
        cap = more.get("softcap")
        return (
            (scaling is None or scaling == self.causal.scale)
            and (None if cap is None else float(cap)) == self.causal.soft_cap
            and not any(more.get(name) is not None for name in _UNKNOWN)
            and not more.get("dropout")
            and (mask is None or mask.dim() == 4)
            and (query.shape[1], query.shape[3]) == (self.causal.num_heads, self.causal.head_size)
            and key.shape[1] == self.causal.num_kv_heads
            and not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad))
            and not autocasts()
        )

    def bind(self) -> None:
        register()
        own = copy.copy(self.config)
        own._attn_implementation = NAME
        self.module.config = own
        self.module.__dict__[_HOLDER] = self

    def unbind(self) -> None:
        self.module.config = self.config
        self.module.__dict__.pop(_HOLDER, None)


def register() -> None:
    """Make ``opmux`` known to transformers as an attention implementation."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The implementation ``opmux``: query [B, N, S, D], key and value [B, K, L, D] -> [B, S, N, D].

    What the op does not know (dropout, position bias, sinks, another scale or soft cap than the module's own) goes to
    the implementation that the module had.
    """
    holder = module.__dict__.get(_HOLDER)
    if not isinstance(holder, InterfaceBinding):
        raise UsageError(
            f"attn_implementation={NAME!r} is set by opmux.apply on the modules that it knows, and this "
            f"{type(module).__qualname__} is none. Load the model with sdpa or eager, then call opmux.apply(model)."
        )
    more = {"dropout": dropout, **kwargs}
    if holder.yields() or not holder.takes(query, key, attention_mask, scaling, more):
        return holder.own_function()(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    length = query.shape[2]
    if attention_mask is None and causal and 1 < length < key.shape[2]:
        key, value = key[:, :, :length], value[:, :, :length]  # the unused end of a static cache
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if attention_mask is None and causal and holder.implementation != "eager":  # where no mask means no mask
        return holder.causal(q, k, v), None
    return holder.full(q, k, v, attention_mask), None


def asks_its_config(module: Any) -> bool:
    """Whether the module's forward looks its attention function up, by its config."""
    forward = inspect.unwrap(type(module).forward)
    return hasattr(module, "config") and "ALL_ATTENTION_FUNCTIONS" in getattr(forward, "__code__", _NO_CODE).co_names


def find_interface(module: Any, rotary: nn.Module | None, enforce_enable: bool) -> InterfaceBinding | str:
    """The binding for an attention module that takes its implementation from its config, or why there is none."""
    config = getattr(module, "config", None)
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in IMPLEMENTATIONS:
        return f"attn_implementation is {implementation!r}, which opmux leaves alone (it replaces sdpa and eager)"
    if getattr(config, "sub_configs", None):
        return "its config holds other configs, which a copy of it would share"
    verdict = probe.once(("interface", probe.fingerprint(module)), lambda: _recognise(module, rotary))
    if isinstance(verdict, str):
        return verdict
    heads, scale, soft_cap = verdict
    return InterfaceBinding(module, heads, scale, soft_cap, enforce_enable)


def _recognise(module: Any, rotary: nn.Module | None) -> tuple[tuple[int, int, int], float, float | None] | str:
    """((head size, query heads, key heads), scale, soft cap) as the module passes them, if our op gives its numbers."""
    with probe.quietly():
        try:
            twin = probe.specimen(module, torch.float32)
            theirs = _outputs(twin, rotary)
            seen: list[Any] = []
            binding = InterfaceBinding(twin, *_arguments(twin, rotary, seen))
            if any(other != seen[0] for other in seen):
                return "it passes other settings from call to call"
            binding.bind()
            ours = _outputs(twin, rotary)
            if sum(route.calls for op in (binding.causal, binding.full) for route in op.routes) == 0:
                return "it passes what our attention does not know (sinks, or a position bias)"
            if all(probe.agrees(a, b) for a, b in zip(ours, theirs, strict=True)):
                return seen[0]
        except Exception as error:  # a module that cannot be probed is a module that is left alone
            return f"could not be probed ({probe.reason_of(error)})"
    return "differs when our attention takes the place of its own (compared on random input)"


def _arguments(twin: Any, rotary: nn.Module | None, seen: list[Any]) -> Any:
    """What the module passes to its implementation; ``seen`` gets it once for each call."""
    from transformers import AttentionInterface

    stock = twin.config
    eager: Any = getattr(sys.modules[type(twin).__module__], "eager_attention_forward", None)
    own = AttentionInterface().get_interface(stock._attn_implementation, eager)

    def spy(module: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        scaling, cap = kwargs.get("scaling"), kwargs.get("softcap")
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        seen.append(((query.shape[-1], query.shape[1], key.shape[1]), scale, None if cap is None else float(cap)))
        return own(module, query, key, *args, **kwargs)

    name = "opmux_probe"
    AttentionInterface.register(name, spy)
    try:
        twin.config = copy.copy(stock)
        twin.config._attn_implementation = name
        _outputs(twin, rotary)
    finally:
        twin.config = stock
        AttentionInterface._global_mapping.pop(name, None)
    return seen[0]


def _outputs(twin: Any, rotary: nn.Module | None) -> list[Tensor]:
    """What the module gives, on the same input at every call: behind a cache where it takes one, else at once."""
    names = parameter_names(twin)
    torch.manual_seed(0)
    if hasattr(twin, "layer_idx"):
        twin.layer_idx = 0
    if "cu_seqlens" in names:
        return [_first(type(twin).forward(twin, **named)) for named in _packed(twin, rotary)]
    cache_name = next((name for name in names if name in CACHE_NAMES), None)
    masked = "attention_mask" in names
    outputs = []
    start = 0
    for tables, x, mask, (cache, _) in attention_steps(twin, rotary if "position_embeddings" in names else None, 1.0):
        start = start if cache.get_seq_length() else 0
        positions = torch.arange(start, start + x.shape[1], device=x.device).unsqueeze(0)
        start += x.shape[1]
        given = {"position_embeddings": tables, "position_ids": positions, names[0]: x}
        named = {name: given[name] for name in names if name in given}
        if cache_name is None:
            mask = mask[..., -x.shape[1] :]
            outputs.append(_first(type(twin).forward(twin, **named)))
        else:
            named[cache_name] = cache
        if masked:
            outputs.append(_first(type(twin).forward(twin, **named, attention_mask=mask)))
        elif cache_name is not None:
            outputs.append(_first(type(twin).forward(twin, **named)))
    return outputs


def _packed(twin: Any, rotary: nn.Module | None) -> Iterator[dict[str, Any]]:
    """Two sequences one behind the other, as vision towers of Qwen are called."""
    width, total = width_of(twin), 9
    x = probe.random(twin, total, width)
    bounds = torch.tensor([0, 4, total], dtype=torch.int32, device=x.device)
    named: dict[str, Any] = {parameter_names(twin)[0]: x, "cu_seqlens": bounds}
    if "position_embeddings" in parameter_names(twin):
        angles = probe.random(twin, total, twin.head_dim)
        named["position_embeddings"] = angles.cos(), angles.sin()
    yield named


def _first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out

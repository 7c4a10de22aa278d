"""Attention through transformers' public interface, for modules that are not replaced whole.

``opmux`` is registered as an attention implementation, with the masks of ``sdpa``. A module uses it by a configuration
of its own that names it; the model's configuration, which other models may share, is not changed.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..core.custom_op import CustomOp
from ..ops.attention.attention import Attention
from . import probe
from .attention import CACHE_NAMES, IMPLEMENTATIONS, attention_steps
from .binding import Binding, idle, parameter_names

NAME = "opmux"
_HOLDER = "_opmux_attention"


class InterfaceBinding(Binding):
    """Points one attention module at the implementation ``opmux``."""

    def __init__(self, module: Any, heads: tuple[int, int, int], scale: float, enforce_enable: bool = False) -> None:
        super().__init__(module)
        size, queries, keys = heads
        build: dict[str, Any] = {"scale": scale, "num_kv_heads": keys, "enforce_enable": enforce_enable}
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

    What the op does not know (dropout, position bias, sinks, soft caps that are not the module's) goes to ``sdpa``.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    holder = module.__dict__.get(_HOLDER)
    if isinstance(holder, InterfaceBinding) and holder.yields():
        return holder.own_function()(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    known = isinstance(holder, InterfaceBinding) and (scaling is None or scaling == holder.causal.scale)
    odd = any(kwargs.get(name) is not None for name in ("position_bias", "s_aux", "softcap"))
    if not known or dropout or odd or (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    length = query.shape[2]
    if attention_mask is None and causal and 1 < length < key.shape[2]:
        key, value = key[:, :, :length], value[:, :, :length]  # the unused end of a static cache
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if attention_mask is None and causal and holder.implementation != "eager":  # where no mask means no mask
        return holder.causal(q, k, v), None
    return holder.full(q, k, v, attention_mask), None


def find_interface(module: Any, rotary: nn.Module | None, enforce_enable: bool) -> InterfaceBinding | str:
    """The binding for an attention module that takes its implementation from its config, or why there is none."""
    config, names = getattr(module, "config", None), parameter_names(module)
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in IMPLEMENTATIONS:
        return f"attn_implementation is {implementation!r}, which opmux leaves alone (it replaces sdpa and eager)"
    if getattr(config, "sub_configs", None):
        return "its config holds other configs, which a copy of it would share"
    if not set(names) & set(CACHE_NAMES) or "position_embeddings" not in names:
        return f"its forward takes {', '.join(names)}, which is not how decoder attention is called"
    verdict = probe.once(("interface", probe.fingerprint(module)), lambda: _recognise(module, rotary))
    if isinstance(verdict, str):
        return verdict
    heads, scale = verdict
    return InterfaceBinding(module, heads, scale, enforce_enable)


def _recognise(module: Any, rotary: nn.Module | None) -> tuple[tuple[int, int, int], float] | str:
    """((head size, query heads, key heads), scale) as the module passes them, if our op then gives its numbers."""
    with probe.quietly():
        try:
            seen: list[Any] = []
            twin = probe.specimen(module, torch.float32)
            theirs = _outputs(twin, rotary, _spy(seen))
            if not seen:
                return "its forward does not ask its config for an attention implementation"
            binding = InterfaceBinding(twin, *seen[0])
            binding.bind()
            ours = _outputs(twin, rotary, attention_forward)
            if all(probe.agrees(a, b) for a, b in zip(ours, theirs, strict=True)):
                return seen[0]
        except Exception as error:  # a module that cannot be probed is a module that is left alone
            return f"could not be probed ({probe.reason_of(error)})"
    return "differs when our attention takes the place of its own (compared on random input)"


def _spy(seen: list[Any]) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def spy(module: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        scaling = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        seen.append(((query.shape[-1], query.shape[1], key.shape[1]), scale))
        return sdpa_attention_forward(module, query, key, *args, **kwargs)

    return spy


def _outputs(twin: Any, rotary: nn.Module | None, function: Any) -> list[Tensor]:
    """What the module gives for the attention probe's inputs with ``function`` as its implementation."""
    from transformers import AttentionInterface

    probe_name = "opmux_probe"
    AttentionInterface.register(probe_name, function)
    kept = twin.config
    twin.config = copy.copy(kept)
    twin.config._attn_implementation = probe_name
    twin.layer_idx = 0
    cache_name = next(name for name in parameter_names(twin) if name in CACHE_NAMES)
    torch.manual_seed(0)
    outputs = []
    try:
        for tables, x, mask, (cache, _) in attention_steps(twin, rotary, 1.0):
            named = {"hidden_states": x, "position_embeddings": tables, "attention_mask": mask, cache_name: cache}
            outputs.append(type(twin).forward(twin, **named)[0])
    finally:
        twin.config = kept
        AttentionInterface._global_mapping.pop(probe_name, None)
    return outputs

"""Attention modules, whole: q/k/v merged, rotary embedding, cache, attention, output projection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..core import registry
from ..core.config import current_config
from ..core.custom_op import CustomOp
from ..core.decide import NATIVE
from ..ops.attention.attention import Attention
from ..ops.attention.rotary_attention import RotaryAttention
from ..ops.linear.product import Product
from ..ops.rope.apply_rotary_emb import ApplyRotaryEmb
from . import probe
from .binding import Binding, bound, idle, parameter_names
from .linears import Merged, Uses, linear_op, unmergeable, untouchable
from .norms import NormBinding
from .rope import STYLES, Rope, sample_tables
from .shards import merged_product

CACHE_NAMES = ("cache", "past_key_values", "past_key_value", "layer_past")
OUTPUTS = ("o_proj", "out_proj", "dense")
# Implementations whose masks we read: None means causal, otherwise a boolean or additive [B, 1, S, L].
IMPLEMENTATIONS = ("sdpa", "eager", "opmux")


class AttentionBinding(Binding):
    """An attention module by its ops.

    Args:
        module: has q_proj, k_proj and v_proj (or qkv_proj), an output projection, maybe q_norm and k_norm.
        norms: bindings of q_norm and k_norm, or None for both.
        rope: how heads are rotated; None where the layer has no positions.
        enforce_enable: for vision encoders.
    """

    def __init__(
        self, module: Any, norms: tuple[NormBinding, NormBinding] | None, rope: Rope | None, uses: Uses,
        enforce_enable: bool = False,
    ) -> None:  # fmt: skip
        children: dict[str, Any] = module._modules
        super().__init__(module, [(children, name, child) for name, child in children.items() if child is not None])
        self.names = parameter_names(module)
        self.cache_name = next(name for name in self.names if name in CACHE_NAMES)
        self.config = module.config
        self.implementation = self.config._attn_implementation
        self.layer_idx = module.layer_idx
        self.head_dim, self.heads, self.kv_heads = sizes_of(module)
        self.norms = norms
        self.rope = rope
        self.output_name = next(name for name in OUTPUTS if name in children)
        self.output = linear_op(children[self.output_name])
        self._project(children, uses)
        scale = getattr(module, "scaling", None)
        cap = getattr(module, "attn_logit_softcapping", None)
        # The two ops and the copies between them in one call, where both are enabled, it has a kernel, and neither is
        # replaced out of tree.
        self.step: RotaryAttention | None = None
        if (
            self.product is not None
            and _enabled("apply_rotary_emb", "attention")
            and not registry.replaced(ApplyRotaryEmb, Attention)
        ):
            neox = rope is None or rope.op.is_neox_style
            step = RotaryAttention(self.heads, self.head_dim, scale, self.kv_heads, is_neox_style=neox, soft_cap=cap)
            if step.decision(*self._one_token()).method != NATIVE:
                self.step = step
        self.causal = Attention(
            self.heads, self.head_dim, scale, self.kv_heads, soft_cap=cap, enforce_enable=enforce_enable
        )
        self.masked = Attention(
            self.heads, self.head_dim, scale, self.kv_heads, causal=False, soft_cap=cap, enforce_enable=enforce_enable
        )

    def _project(self, children: dict[str, Any], uses: Uses) -> None:
        names = input_names(children)
        linears = [children[name] for name in names]
        self.separate: list[Product] = []
        if len(linears) == 1:
            self.product: Any = linear_op(linears[0])  # None where q, k and v stay apart
        elif unmergeable(linears, uses) is None:
            self.product = merged_product(linears, self.head_dim)
            self.merged.append(Merged(linears, self.product))
        else:
            self.product = None
            self.separate = [linear_op(m) for m in linears]
        # A norm over all heads at once needs q and k apart; a norm per head does not.
        self.whole_norm = self.norms is not None and self.norms[0].op.hidden_size != self.head_dim

    def _one_token(self) -> tuple[Any, ...]:
        """Arguments of a smallest call of ``step``."""
        zeros, size = self.output.weight.detach().new_zeros, self.head_dim
        cache = zeros(1, 1, self.kv_heads, size)
        tables = zeros(1, size // 2)
        return zeros(1, 1, (self.heads + 2 * self.kv_heads) * size), tables, tables, cache, cache, 0

    def sample(self, op: CustomOp) -> tuple[Any, ...]:
        return self._one_token() if op is self.step else super().sample(op)

    def ops(self) -> Iterator[tuple[str, CustomOp, str]]:
        names = input_names(self.module._modules)
        if self.product is not None:
            yield (
                "{" + ",".join(names) + "}" if len(names) > 1 else names[0],
                self.product,
                ("q, k and v merged" if self.merged else ""),
            )
        else:
            yield from ((name, op, "") for name, op in zip(names, self.separate, strict=True))
        if self.norms is not None:
            yield "q_norm", self.norms[0].op, self.norms[0].hint
            yield "k_norm", self.norms[1].op, self.norms[1].hint
        if self.rope is not None:
            yield "", self.rope.op, ""
        if self.step is not None:
            yield "", self.step, "causal with a dynamic cache: rope, cache and attention in one"
        yield "", self.causal, "causal"
        yield "", self.masked, "with a mask"
        yield self.output_name, self.output, ""

    def run(
        self, x: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Tensor | None, cache: Any, aligned: bool
    ) -> Tensor:
        """The module's work, without any check.

        Args:
            x: [B, S, H].
            cos, sin: [B, S, R/2] or [S, R/2]; None without rope.
            mask: [B or 1, 1 or N, S, >= L], boolean or additive, or None for causal.
            cache: a transformers cache, or None.
            aligned: the cache's layers are ``GrowingLayer``, and without a mask the queries are the last of the keys.
                Otherwise a missing mask means what transformers means by it: the queries are the first of the keys, and
                what follows is the unused end of a static cache.

        Returns: [B, S, H].
        """
        batch, length, _ = x.shape
        if self.step is not None and aligned and mask is None and cache is not None:
            layer = cache.layers[self.layer_idx]
            if not layer.has_room(batch, length):
                layer.make_room(*[x.new_empty(batch, self.kv_heads, length, self.head_dim)] * 2)
            qkv = self.product(x)
            if self.rope is None:
                cos = sin = torch.empty((length, 0), dtype=x.dtype, device=x.device)
            normed = () if self.norms is None else self._normed(qkv.unflatten(-1, (-1, self.head_dim)))
            return self.output(self.step(qkv, cos, sin, *layer.take(length), *normed))
        q, k, v = self._heads(x, batch, length, cos, sin)
        if aligned and cache is not None:
            k, v = cache.layers[self.layer_idx].append(k, v)
        elif cache is not None:
            keys, values = cache.update(k.transpose(1, 2), v.transpose(1, 2), self.layer_idx)
            if mask is None and 1 < length < keys.shape[2]:
                keys, values = keys[:, :, :length], values[:, :, :length]
            k, v = keys.transpose(1, 2), values.transpose(1, 2)
        out = self.causal(q, k, v) if mask is None else self.masked(q, k, v, mask)
        return self.output(out.reshape(batch, length, -1))

    def _heads(
        self, x: Tensor, batch: int, length: int, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, both, size = self.heads, self.heads + self.kv_heads, self.head_dim
        if self.product is not None:
            qkv = self.product(x).view(batch, length, -1, size)
            if self.norms is None and self.rope is not None:
                qk = self.rope(qkv.narrow(2, 0, both), cos, sin)  # q and k in one call
                return qk.narrow(2, 0, heads), qk.narrow(2, heads, self.kv_heads), qkv.narrow(2, both, self.kv_heads)
            v = qkv.narrow(2, both, self.kv_heads)
            q, k = qkv.narrow(2, 0, heads), qkv.narrow(2, heads, self.kv_heads)
        else:
            q, k, v = (op(x).view(batch, length, -1, size) for op in self.separate)
        if self.norms is not None:
            q, k = self._norm(0, q), self._norm(1, k)
        if self.rope is not None:
            q, k = self.rope(q, cos, sin), self.rope(k, cos, sin)
        return q, k, v

    def _normed(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """q and k of [B, S, N + 2 K, D], normed."""
        return self._norm(0, qkv.narrow(2, 0, self.heads)), self._norm(1, qkv.narrow(2, self.heads, self.kv_heads))

    def _norm(self, which: int, heads: Tensor) -> Tensor:
        """The norm of q (0) or k (1) [B, S, N, D]."""
        op = self.norms[which].op  # type: ignore[index]
        return op(heads.flatten(2)).view(heads.shape) if self.whole_norm else op(heads)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        named = dict(zip(self.names, args, strict=False)) | kwargs
        x: Any = named.get("hidden_states")
        if self.unusual(named) or self.steps_aside(x):
            return self.original(*args, **kwargs)
        cos, sin = self.tables(named.get("position_embeddings"))
        out = self.run(x, cos, sin, named.get("attention_mask"), named.get(self.cache_name), False)
        return out, None

    def tables(self, embeddings: tuple[Tensor, Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
        """The halves of the tables that a layer is given."""
        if self.rope is None or embeddings is None:
            return None, None
        return self.rope.half(embeddings[0]), self.rope.half(embeddings[1])

    def unusual(self, named: dict[str, Any]) -> bool:
        """Whether the call asks for what the fast path does not do."""
        mask = named.get("attention_mask")
        return (
            self.config._attn_implementation != self.implementation
            or (mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 4))
            or (mask is None and self.implementation == "eager")  # where no mask means no mask
            or bool(named.get("output_attentions"))
            or named.get("is_causal") is False
            or (self.rope is not None and named.get("position_embeddings") is None)
            or named.get("position_bias") is not None
            or not idle(self.module._forward_hooks)  # they may want the weights
        )


def _enabled(*ops: str) -> bool:
    config = current_config()
    return all(config.is_custom_op_enabled(op) for op in ops)


def looks_like_attention(module: Any) -> bool:
    """q, k and v projections (or one for the three) and an output projection."""
    children: dict[str, Any] = module._modules
    return bool(input_names(children)) and any(name in children for name in OUTPUTS)


def find_attention(module: Any, uses: Uses, rotary: nn.Module | None, enforce_enable: bool) -> AttentionBinding | str:
    """The binding for an attention module, or why there is none."""
    children: dict[str, Any] = module._modules
    for name in (*input_names(children), next(n for n in OUTPUTS if n in children)):
        why = untouchable(children[name])
        if why is not None:
            return f"{name} {why}"
    why = _why_not(module)
    if why is not None:
        return why
    norms = _norms(children)
    if isinstance(norms, str):
        return norms
    rope = probe.once(("attention", probe.fingerprint(module)), lambda: _recognise(module, uses, rotary))
    if isinstance(rope, str):
        return rope
    style = next((s for s in STYLES if s[0] == rope[0]), None)
    return AttentionBinding(
        module,
        norms,
        style and Rope(style[1], style[2], enforce_enable),
        uses,
        enforce_enable,
    )


def input_names(children: dict[str, Any]) -> tuple[str, ...]:
    """The names of the layers that make q, k and v, if they are there."""
    if "qkv_proj" in children:
        return ("qkv_proj",)
    apart = ("q_proj", "k_proj", "v_proj")
    return apart if all(name in children for name in apart) else ()


def sizes_of(module: Any) -> Any:
    """(head size, query heads, key heads) of an attention module, or None."""
    children, size = module._modules, getattr(module, "head_dim", None)
    if not isinstance(size, int) or size < 1:
        return None
    output = children[next(name for name in OUTPUTS if name in children)]
    heads = output.in_features // size
    rows = sum(children[name].out_features for name in input_names(children))
    kv_heads, odd = divmod(rows // size - heads, 2)
    fits = not odd and kv_heads > 0 and heads % kv_heads == 0 and rows == (heads + 2 * kv_heads) * size
    return (size, heads, kv_heads) if fits else None


def _why_not(module: Any) -> str | None:
    names = parameter_names(module)
    config = getattr(module, "config", None)
    implementation = getattr(config, "_attn_implementation", None)
    known = {*input_names(module._modules), *OUTPUTS, "q_norm", "k_norm"}
    more = [name for name, child in module._modules.items() if name not in known and list(child.parameters())]
    more += [name for name, p in module._parameters.items() if p is not None]
    if more:
        return f"has parts beyond q, k, v and output: {', '.join(more)}"
    if "hidden_states" not in names or "position_embeddings" not in names or not set(names) & set(CACHE_NAMES):
        return f"its forward takes {', '.join(names)}, which is not how decoder attention is called"
    if sizes_of(module) is None or not isinstance(getattr(module, "layer_idx", None), int):
        return "its head sizes or layer index cannot be read"
    if not getattr(module, "is_causal", True):
        return "is not causal"
    if implementation not in IMPLEMENTATIONS:
        return f"attn_implementation is {implementation!r}, which opmux leaves alone (it replaces sdpa and eager)"
    return None


def _norms(children: dict[str, Any]) -> Any:
    """The bindings of q_norm and k_norm, None without them, or why they do not serve."""
    if "q_norm" not in children and "k_norm" not in children:
        return None
    pair = bound(children.get("q_norm")), bound(children.get("k_norm"))
    if not all(isinstance(norm, NormBinding) for norm in pair):
        return "q_norm or k_norm is no norm that opmux knows"
    return pair


def _recognise(module: Any, uses: Uses, rotary: nn.Module | None) -> tuple[str] | str:
    """The style of rope with which our formula gives the module's numbers (its name, or "none"), or why none does."""
    with probe.quietly():
        try:
            dtypes = {torch.float32, next(module.parameters()).dtype}
            twins = [probe.specimen(module, dtype) for dtype in sorted(dtypes, key=str)]
            for style in (*STYLES, None):
                if all(_matches(twin, style, rotary) for twin in twins):
                    return ("none",) if style is None else (style[0],)
        except Exception as error:  # a module that cannot be probed is a module that is left alone
            return f"could not be probed ({probe.reason_of(error)})"
    return "differs from our attention (compared on random input)"


def _matches(twin: Any, style: tuple[str, bool, bool] | None, rotary: nn.Module | None) -> bool:
    """Whether outputs and cache agree over a prefill, a decode step and a chunk, on small and large input."""
    norms = _norms(twin._modules)
    ours = AttentionBinding(twin, norms, style and Rope(style[1], style[2]), Uses(twin))
    ours.layer_idx = twin.layer_idx = 0
    for scale in (1.0, 20.0):
        steps = attention_steps(twin, rotary, scale)
        for tables, x, mask, (theirs, mine) in steps:
            reference = call_attention(twin, ours, x, tables, mask, theirs)
            cos, sin = ours.tables(tables)
            if not probe.agrees(ours.run(x, cos, sin, mask, mine, False), reference):
                return False
            if not probe.agrees(mine.layers[0].keys, theirs.layers[0].keys):
                return False
        if twin.config._attn_implementation != "eager":
            reference = call_attention(twin, ours, x, tables, None, None)
            if not probe.agrees(ours.run(x, cos, sin, None, None, False), reference):
                return False
    return True


def attention_steps(module: Any, rotary: nn.Module | None, scale: float) -> Iterator[Any]:
    """Inputs of a decode step, a prefill and one behind it: (tables, x, mask, a pair of caches)."""
    from transformers import DynamicCache

    width = width_of(module)
    like = probe.random(module, 1)
    lengths = (5, 1, 3)
    positions = torch.arange(sum(lengths), device=like.device).unsqueeze(0)
    kinds: list[Any] = list(sample_tables(rotary, like, positions)) if rotary is not None else []
    kinds = kinds or [(None, None)]
    for cos, sin in kinds:
        caches = DynamicCache(), DynamicCache()
        start = 0
        for length in lengths:
            end = start + length
            x = probe.random(module, 2, length, width, scale=scale)
            hidden = (
                torch.ones(length, end, dtype=torch.bool, device=like.device)
                .triu(start + 1)
                .expand(2, 1, -1, -1)
                .clone()
            )
            hidden[1, 0, max(0, 2 - start) :, :2] = True  # the second row is padded on the left
            mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill(
                hidden, torch.finfo(like.dtype).min
            )
            tables = None if cos is None else (cos[:, start:end], sin[:, start:end])
            yield tables, x, mask, caches
            start = end


def width_of(module: Any) -> int:
    """The width of an attention module's input."""
    first = next(iter(input_names(module._modules)), None)
    if first is not None:
        return int(module._modules[first].weight.shape[1])
    linear = next((m for m in module.modules() if hasattr(m, "in_features")), None)
    if linear is not None:
        return int(linear.in_features)
    return int(module.config.hidden_size)


def call_attention(module: Any, binding: AttentionBinding, x: Tensor, tables: Any, mask: Any, cache: Any) -> Any:
    """The output of the module's own forward."""
    out = binding.original(
        hidden_states=x, position_embeddings=tables, attention_mask=mask, **{binding.cache_name: cache}
    )
    return out[0]

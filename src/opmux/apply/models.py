"""The loop over the layers, whole: no mask that says nothing, no tables made anew, sums fused across layers."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.masking_utils import create_causal_mask

from . import probe
from .attention import CACHE_NAMES
from .binding import Binding, bound, parameter_names
from .cache import grow_in_place
from .layers import LayerBinding
from .norms import NormBinding
from .replay import Replay
from .rope import RopeTable

# What the fast path passes over: they change nothing here.
_HARMLESS = ("logits_to_keep", "use_cache", "return_dict")
_PROBE_LENGTH = 7


class ModelBinding(Binding):
    """The decoder stack: embeddings, layers that are all ours, a last norm.

    It takes plain calls: causal, without or with a dynamic cache, at most a padding mask, shorter than any sliding
    window. Everything else (outputs to capture, masks of one's own, static or quantised caches, packed sequences,
    gradients, hooks inside, tracing) goes to the model's own forward, in which each layer still decides for itself.
    """

    def __init__(self, module: Any, rotary: nn.Module, output: type, output_cache: str, scale: float) -> None:
        children: dict[str, Any] = module._modules
        layers: nn.ModuleList = children["layers"]
        parts = [(children, name, child) for name, child in children.items() if child is not None]
        parts += [(layers._modules, name, child) for name, child in layers._modules.items()]
        super().__init__(module, parts)
        self.names = parameter_names(module)
        self.cache_name = next(name for name in self.names if name in CACHE_NAMES)
        self.config = module.config
        self.implementation = self.config._attn_implementation
        self.layers: list[LayerBinding] = [bound(layer) for layer in layers]
        self.gather(*self.layers)
        self.norm = bound(children[_last_norm(children)]).op
        ropes = [layer.attention.rope for layer in self.layers if layer.attention.rope is not None]
        self.table = RopeTable(rotary, ropes[0])
        self.output, self.output_cache, self.scale = output, output_cache, scale
        self.longest = _longest(module, self.layers)
        self.replay = Replay([op for layer in self.layers for op in layer.all_ops()] + [self.norm])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # masks and caches of transformers trace well; ours would guard on lengths
            return self.original(*args, **kwargs)
        named = dict(zip(self.names, args, strict=False)) | kwargs
        plain = None if self.steps_aside(named.get("inputs_embeds")) else self._plain(named)
        if plain is None:
            return self.original(*args, **kwargs)
        hidden, positions, mask, cache, start = plain
        return self.run(hidden, positions, mask, cache, start)

    def run(self, hidden: Tensor, positions: Tensor, mask: Tensor | None, cache: Any, start: int) -> Any:
        """The stack on embedded tokens [B, S, H]."""
        if self.scale != 1.0:
            hidden = hidden * self.scale
        cos, sin = self.table(hidden, positions, start + hidden.shape[1])
        if hidden.shape[1] == 1 and mask is None and cache is not None:
            layers = cache.layers[: len(self.layers)]
            run = partial(self._through_layers, mask=None, cache=cache)
            last = self.replay.step(hidden, cos, sin, layers, run)
        else:
            last = self._through_layers(hidden, cos, sin, mask, cache)
        return self.output(**{"last_hidden_state": last, self.output_cache: cache})

    def _through_layers(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        delta, residual = hidden, None
        for layer in self.layers:
            delta, residual = layer.run(delta, residual, cos, sin, mask, cache, True)
        if delta is residual:  # a last sum without a norm behind it has been made already
            return self.norm(delta)
        return self.norm(delta, residual)[0]

    def _plain(self, named: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None, Any, int] | None:
        """(embedded tokens, positions, mask, cache, tokens in the cache) of a call that the fast path takes."""
        ids: Any = named.get("input_ids")
        hidden: Any = named.get("inputs_embeds")
        cache, padding = named.get(self.cache_name), named.get("attention_mask")
        config = self.config
        if (ids is None) == (hidden is None) or not self._only_known(named):
            return None
        if config._attn_implementation != self.implementation or _captures(config):
            return None
        if cache is not None and not grow_in_place(cache, len(self.layers)):
            return None
        use_cache = named.get("use_cache")
        if cache is None and (config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache(config=config)
            if not grow_in_place(cache, len(self.layers)):
                return None
        tokens = ids if hidden is None else hidden
        start = 0 if cache is None else cache.get_seq_length()
        end = start + tokens.shape[1]
        if end >= self.longest or tokens.shape[1] == 0:
            return None
        positions = named.get("position_ids")
        if positions is not None and (positions.dim() != 2 or (cache is None and padding is None)):
            return None  # positions without a mask may mean packed sequences
        if padding is not None and (padding.dim() != 2 or padding.shape[1] != end):
            return None
        if hidden is None:
            hidden = self.module.embed_tokens(ids)
        if positions is None:
            positions = torch.arange(start, end, device=hidden.device).unsqueeze(0)
        mask = None
        if padding is not None and not bool(padding.all()):
            mask = create_causal_mask(config, hidden, padding, cache, positions)
        return hidden, positions, mask, cache, start

    def _only_known(self, named: dict[str, Any]) -> bool:
        known = self.names
        for name, value in named.items():
            if name not in known and value is not None and value is not False and name not in _HARMLESS:
                return False
        return named.get("return_dict") is not False


def _longest(module: Any, layers: list[LayerBinding]) -> int:
    """The shortest sliding window: shorter texts need no window at all."""
    windows = [getattr(layer.attention.module, "sliding_window", None) for layer in layers]
    windows.append(getattr(module.config, "sliding_window", None))
    return min((w for w in windows if isinstance(w, int) and w > 0), default=2**62)  # some write 0 for none


def _last_norm(children: dict[str, Any]) -> str:
    """The name of the only norm beside the layers; empty where there is none, or several."""
    norms = [name for name, child in children.items() if isinstance(bound(child), NormBinding)]
    return norms[0] if len(norms) == 1 else ""


def _holds(child: nn.Module) -> bool:
    """Whether a module holds tensors, as dropout does not."""
    return any(True for _ in child.parameters()) or any(True for _ in child.buffers())


def _captures(config: Any) -> bool:
    return getattr(config, "output_hidden_states", False) or getattr(config, "output_attentions", False)


def looks_like_model(module: Any) -> bool:
    """Embeddings, a list of layers of which one is ours at least, a norm, a rotary module."""
    children: dict[str, Any] = module._modules
    layers = children.get("layers")
    return (
        isinstance(layers, nn.ModuleList)
        and len(layers) > 0
        and "embed_tokens" in children
        and any(isinstance(bound(layer), LayerBinding) for layer in layers)
    )


def find_model(module: Any) -> ModelBinding | str:
    """The binding for a decoder stack, or why there is none."""
    children, names = module._modules, parameter_names(module)
    layers = [bound(layer) for layer in children["layers"]]
    known = ("embed_tokens", "layers", "rotary_emb", _last_norm(children))
    more = sorted(n for n, child in children.items() if n not in known and child is not None and _holds(child))
    if more:
        return f"has parts beyond embeddings, layers, norm and rotary: {', '.join(more)}"
    if not all(isinstance(layer, LayerBinding) for layer in layers):
        return "not every layer was replaced"
    if not _last_norm(children) or children.get("rotary_emb") is None:
        return "its last norm or its rotary module is not one that opmux knows"
    if not {"input_ids", "attention_mask", "position_ids", "inputs_embeds"} <= set(names) or not set(names) & set(
        CACHE_NAMES
    ):
        return f"its forward takes {', '.join(names)}, which is not how decoders are called"
    if getattr(module.config, "is_causal", True) is False:
        return "is not causal"
    if len(layers) != getattr(module.config, "num_hidden_layers", len(layers)):
        return "its config counts other layers than it has"
    styles = {layer.attention.rope.side_by_side for layer in layers if layer.attention.rope is not None}
    if len(styles) != 1:
        return "its layers have no rotary embedding, or several kinds"
    window = _longest(module, layers)
    if window <= _PROBE_LENGTH:
        return f"its sliding window of {window} tokens leaves nothing to the loop without masks"
    key = ("model", probe.fingerprint(module))
    verdict = probe.once(key, lambda: _recognise(module))
    return verdict if isinstance(verdict, str) else ModelBinding(module, children["rotary_emb"], *verdict)


def _recognise(module: Any) -> tuple[type, str, float] | str:
    """(output class, its field for the cache, the scale of the embeddings), by numbers, or why nothing matches."""
    rotary: nn.Module = module._modules["rotary_emb"]
    scales = [1.0] + [v for k, v in vars(module).items() if isinstance(v, float)]
    scales += [float(v) for v in (getattr(module.config, "embedding_multiplier", None),) if v]
    with probe.quietly():
        try:
            # The layers agreed one by one; a few of them show what the loop around them does.
            module = _first_layers(module, 4)
            stock = ModelBinding(module, rotary, object, "", 1.0).original
            device = next(module.parameters()).device
            ids = torch.randint(0, module.embed_tokens.num_embeddings, (2, _PROBE_LENGTH), device=device)
            first = stock(input_ids=ids[:, :-1], use_cache=True)
            field = next(name for name in CACHE_NAMES if first.get(name) is not None)
            second = stock(input_ids=ids[:, -1:], **{_cache_argument(module): first[field]})
            for scale in scales:
                ours = ModelBinding(module, rotary, type(first), field, scale)
                if _same(ours, ids, first.last_hidden_state, second.last_hidden_state):
                    return type(first), field, scale
        except Exception as error:  # a model that cannot be probed is a model that is left alone
            return f"could not be probed ({probe.reason_of(error)})"
    return "differs from our loop over the layers (compared on random tokens)"


def _first_layers(module: Any, count: int) -> nn.Module:
    twin = copy.copy(module)
    layers = nn.ModuleList(list(module._modules["layers"])[:count])
    twin._modules = {**module._modules, "layers": layers}
    return twin


def _same(ours: ModelBinding, ids: Tensor, first: Tensor, second: Tensor) -> bool:
    plain = ours._plain({"input_ids": ids[:, :-1], "use_cache": True})
    if plain is None:
        raise ValueError("its cache is not made of plain dynamic layers (some have a sliding window)")
    mine = ours.run(*plain)
    if not probe.agrees(mine.last_hidden_state, first):
        return False
    plain = ours._plain({"input_ids": ids[:, -1:], ours.cache_name: mine[ours.output_cache]})
    return plain is not None and probe.agrees(ours.run(*plain).last_hidden_state, second)


def _cache_argument(module: Any) -> str:
    return next(name for name in parameter_names(module) if name in CACHE_NAMES)

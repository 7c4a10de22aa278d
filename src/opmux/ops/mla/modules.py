"""What multi-head latent attention is composed of, and the softmax scale that goes with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...distributed import tensor_parallel
from ..linear.column_parallel_linear import ColumnParallelLinear
from ..linear.replicated_linear import ReplicatedLinear
from ..linear.row_parallel_linear import RowParallelLinear
from ..norm.rms_norm import RMSNorm
from ..rope.get_rope import get_rope
from ..rope.scaling import yarn_magnitude

__all__ = ["MLAModules", "latent_attention_scale"]

Layer = Callable[..., Any]


@dataclass
class MLAModules:
    """The sub-modules of a multi-head latent attention.

    Linear layers may return ``y`` or ``(y, bias)``; H hidden, L and Lq ranks of the latents, N this rank's heads with P
    features, R rotary ones and V of values.

    Attributes:
        kv_a_layernorm: [..., L] -> [..., L].
        kv_b_proj: its ``weight`` is [N (P + V), L], head by head P rows of keys, then V of values.
        rotary_emb: (positions, query [T, N, R], key [T, 1, R]) -> the two rotated; None for no positions.
        o_proj: [..., N V] -> [..., H].
        fused_qkv_a_proj: H -> Lq + L + R.
        kv_a_proj_with_mqa: H -> L + R.
        q_a_layernorm: [..., Lq] -> [..., Lq].
        q_b_proj: Lq -> N (P + R).
        q_proj: H -> N (P + R).
        q_a_proj: H -> Lq, beside ``kv_a_proj_with_mqa`` where the two are not fused.
        g_proj: H -> N V or N, an output gate, through a sigmoid.
    """

    kv_a_layernorm: Layer
    kv_b_proj: Any
    rotary_emb: Layer | None
    o_proj: Layer
    fused_qkv_a_proj: Layer | None = None
    kv_a_proj_with_mqa: Layer | None = None
    q_a_layernorm: Layer | None = None
    q_b_proj: Layer | None = None
    q_proj: Layer | None = None
    q_a_proj: Layer | None = None
    g_proj: Layer | None = None

    def missing(self, q_lora_rank: int | None) -> list[str]:
        """The names of the modules that a query projection of this rank (None: a dense one) needs and that are not there."""
        if q_lora_rank is None:
            wanted = ["q_proj", "kv_a_proj_with_mqa"]
        else:
            wanted = ["q_a_layernorm", "q_b_proj"]
            wanted += ["q_a_proj", "kv_a_proj_with_mqa"] if self.fused_qkv_a_proj is None else []
        return [name for name in wanted if getattr(self, name) is None]


def standard_modules(
    hidden_size: int, num_heads: int, nope: int, rope: int, value: int, q_lora_rank: int | None, kv_lora_rank: int,
    rope_parameters: Mapping[str, Any] | None, max_position: int, eps: float,
) -> MLAModules:  # fmt: skip
    """DeepSeek's modules without weights, this rank's part of them: heads are sharded, all before them is on every rank."""
    total = num_heads * tensor_parallel().size
    latent = kv_lora_rank + rope
    q_from = hidden_size if q_lora_rank is None else q_lora_rank
    queries = ColumnParallelLinear(q_from, total * (nope + rope), False, return_bias=False)
    a_rows = latent if q_lora_rank is None else q_lora_rank + latent
    down = ReplicatedLinear(hidden_size, a_rows, False, return_bias=False)
    return MLAModules(
        kv_a_layernorm=RMSNorm(kv_lora_rank, eps),
        kv_b_proj=ColumnParallelLinear(kv_lora_rank, total * (nope + value), False, return_bias=False),
        rotary_emb=get_rope(rope, max_position, is_neox_style=False, rope_parameters=rope_parameters),
        o_proj=RowParallelLinear(total * value, hidden_size, False, return_bias=False),
        fused_qkv_a_proj=None if q_lora_rank is None else down,
        kv_a_proj_with_mqa=down if q_lora_rank is None else None,
        q_a_layernorm=None if q_lora_rank is None else RMSNorm(q_lora_rank, eps),
        q_b_proj=None if q_lora_rank is None else queries,
        q_proj=queries if q_lora_rank is None else None,
    )


def load_weights(modules: MLAModules, weights: Mapping[str, Tensor]) -> None:
    """Copy this rank's part of a checkpoint's weights, by transformers' names (``q_a_proj.weight``, ...)."""
    weights = dict(weights)
    down = weights.pop("kv_a_proj_with_mqa.weight")
    if modules.fused_qkv_a_proj is not None:
        down = torch.cat((weights.pop("q_a_proj.weight"), down))
        modules.fused_qkv_a_proj.load_weight(down)  # type: ignore[attr-defined]
    else:
        modules.kv_a_proj_with_mqa.load_weight(down)  # type: ignore[union-attr]
    for key, weight in weights.items():
        name = key.removesuffix(".weight")
        module: Any = getattr(modules, name, None)
        if module is None or name == key:
            raise ValueError(f"This latent attention has no {key!r}; it takes weights of modules that it was built with.")
        if hasattr(module, "load_weight"):
            module.load_weight(weight)
        else:
            module.weight.data.copy_(weight)


def latent_attention_scale(qk_head_dim: int, rope_parameters: Mapping[str, Any] | None = None) -> float:
    """The softmax scale of DeepSeek's models: ``qk_head_dim ** -0.5``, times YaRN's mscale squared.

    Args:
        qk_head_dim: P + R, not the width of the latents.
        rope_parameters: of the config; ``mscale_all_dim`` with ``factor`` gives mscale ``0.1 mscale_all_dim ln factor + 1``.
    """
    given = dict(rope_parameters or {})
    all_dim, factor = given.get("mscale_all_dim"), given.get("factor")
    mscale = yarn_magnitude(float(factor), float(all_dim)) if all_dim and factor else 1.0
    return float(qk_head_dim**-0.5 * mscale * mscale)

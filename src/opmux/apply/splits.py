"""How one rank's part of a module is made: attention by heads, MLPs by inner features, vocabularies by tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed import TensorParallel, init_tensor_parallel
from ..ops.embedding.parallel_lm_head import ParallelLMHead
from ..ops.embedding.vocab_parallel_embedding import VocabParallelEmbedding
from ..ops.linear.column_parallel_linear import ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear
from ..ops.linear.row_parallel_linear import RowParallelLinear
from . import attention
from .embeddings import scale_of, untouchable_table
from .linears import untouchable
from .shards import ShardedEmbedding, ShardedHead

Split = Callable[[Any, TensorParallel], None]  # makes a module one rank's, in place


def by_heads(sizes: tuple[int, int, int], config_of_its_own: bool) -> Split:
    """Split q, k, v by heads.

    Args:
        config_of_its_own: the module reads its numbers of heads from its config at every call: give it one.
    """
    size, heads, kv_heads = sizes

    def split(module: Any, tp: TensorParallel) -> None:
        children = module._modules
        mine, mine_kv = heads // tp.size, max(1, kv_heads // tp.size)
        if "qkv_proj" in children:
            old = children["qkv_proj"]
            with init_tensor_parallel(tp), torch.device(old.weight.device):
                new = QKVParallelLinear(
                    old.in_features, size, heads, kv_heads, old.bias is not None, params_dtype=old.weight.dtype,
                    return_bias=False,
                )  # fmt: skip
            new.load_shard(old.weight, None, old.bias)
            children["qkv_proj"] = new
        else:
            children["q_proj"] = _column(children["q_proj"], tp)
            for name in ("k_proj", "v_proj"):
                children[name] = _column(children[name], tp, kv_heads if tp.size > kv_heads else None)
        name = next(n for n in attention.OUTPUTS if n in children)
        children[name] = _row(children[name], tp)
        if hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = mine // mine_kv
        for name, value in (("num_heads", mine), ("num_attention_heads", mine), ("num_key_value_heads", mine_kv)):
            if hasattr(module, name):
                setattr(module, name, value)
        if config_of_its_own:
            module.config = copy.copy(module.config)
            module.config.num_attention_heads, module.config.num_key_value_heads = mine, mine_kv

    return split


def by_features(down: str, parts: int) -> Split:
    """Split the first layers by rows (each of ``parts`` by itself) and ``down`` by columns."""

    def split(module: Any, tp: TensorParallel) -> None:
        children = module._modules
        for name, linear in children.items():
            if type(linear) is not nn.Linear:
                continue
            children[name] = _row(linear, tp) if name == down else _merged(linear, tp, parts)

    return split


def split_vocabulary(model: nn.Module, tp: TensorParallel, whole: dict[str, str]) -> list[str]:
    """Split the plain input embedding and output projection; the paths of what was split. Reasons go to ``whole``."""
    table, head = _embeddings(model, "input"), _embeddings(model, "output")
    exchanged: dict[int, nn.Module] = {}
    kept: dict[int, str] = {}
    embedding: VocabParallelEmbedding | None = None
    scale = None if table is None else _scale_of(table)
    if isinstance(scale, str):
        kept[id(table)] = scale
    elif table is not None:
        with init_tensor_parallel(tp), torch.device(table.weight.device):
            embedding = VocabParallelEmbedding(
                table.num_embeddings, table.embedding_dim, params_dtype=table.weight.dtype
            )
        embedding.load_weight(table.weight)
        exchanged[id(table)] = embedding if scale is None else ShardedEmbedding(embedding, scale)
    why = None if head is None else untouchable(head)
    if why is not None:
        kept[id(head)] = why
    elif head is not None:
        with init_tensor_parallel(tp), torch.device(head.weight.device):
            new = ParallelLMHead(
                head.out_features, head.in_features, head.bias is not None, params_dtype=head.weight.dtype
            )
        if embedding is not None and head.weight is table.weight:
            new.tie_weights(embedding)
        else:
            new.load_weight(head.weight)
        if head.bias is not None:
            new.load_bias(head.bias)
        exchanged[id(head)] = ShardedHead(new)
    split = []
    for holder_path, holder in list(model.named_modules()):
        for name, child in holder._modules.items():
            path = f"{holder_path}.{name}" if holder_path else name
            if id(child) in exchanged:
                holder._modules[name] = exchanged[id(child)]
                split.append(path)
            elif id(child) in kept:
                whole[path] = kept[id(child)]
    return split


def _scale_of(table: Any) -> Tensor | str | None:
    """None for a plain embedding; the number by which an embedding multiplies its rows; else why it stays whole."""
    why = untouchable_table(table)
    name = None if why is None else scale_of(table)
    if name is None:
        return why
    scale = torch.as_tensor(getattr(table, name))
    # A shard rounds the number to its rows' dtype, which only a table with a tensor of its own may do, too.
    exact = isinstance(getattr(table, name), Tensor) or scale.to(table.weight.dtype) == scale
    return scale if exact else why


def _embeddings(model: Any, which: str) -> Any:
    getter = getattr(model, f"get_{which}_embeddings", None)
    try:
        return getter() if getter is not None else None
    except (AttributeError, NotImplementedError):
        return None


def _column(old: nn.Linear, tp: TensorParallel, shares: int | None = None) -> ColumnParallelLinear:
    """Rows of ``old``; with ``shares``, in so many parts, each held by several ranks."""
    number = None if shares is None else tp.rank // tp.share_of_ranks(shares)
    with init_tensor_parallel(tp), torch.device(old.weight.device):
        new = ColumnParallelLinear(
            old.in_features, old.out_features, old.bias is not None, params_dtype=old.weight.dtype, return_bias=False,
            tp_rank=number, tp_size=shares,
        )  # fmt: skip
    new.load_weight(old.weight, old.bias)
    return new


def _merged(old: nn.Linear, tp: TensorParallel, parts: int) -> ColumnParallelLinear:
    """Rows of ``old``, of each of its ``parts`` by itself."""
    if parts == 1:
        return _column(old, tp)
    with init_tensor_parallel(tp), torch.device(old.weight.device):
        new = MergedColumnParallelLinear(
            old.in_features, [old.out_features // parts] * parts, old.bias is not None, params_dtype=old.weight.dtype,
            return_bias=False,
        )  # fmt: skip
    new.load_shard(old.weight, None, old.bias)
    return new


def _row(old: nn.Linear, tp: TensorParallel) -> RowParallelLinear:
    with init_tensor_parallel(tp), torch.device(old.weight.device):
        new = RowParallelLinear(
            old.in_features, old.out_features, old.bias is not None, params_dtype=old.weight.dtype, return_bias=False
        )
    new.load_weight(old.weight, old.bias)
    return new

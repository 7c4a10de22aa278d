"""Modules that ``shard`` put into a model: ops that hold one rank's part of a weight, as ``apply`` meets them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..core.config import current_config
from ..core.custom_op import CustomOp
from ..distributed import ALONE, init_tensor_parallel
from ..ops.embedding.parallel_lm_head import ParallelLMHead
from ..ops.embedding.vocab_parallel_embedding import VocabParallelEmbedding
from ..ops.linear.column_parallel_linear import ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear
from ..ops.linear.product import Product
from ..ops.linear.replicated_linear import ReplicatedLinear
from ..ops.linear.row_parallel_linear import RowParallelLinear
from ..ops.logits.logits_processor import LogitsProcessor
from .binding import Binding

SHARDS = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)  # that are ops themselves


class _Holder(nn.Module):
    """Stands where a plain layer stood. Its parameters are its op's, under the layer's names; the op is no child."""

    def __init__(self, op: VocabParallelEmbedding) -> None:
        super().__init__()
        self.__dict__["_parameters"] = op._parameters

    def ops(self) -> tuple[CustomOp, ...]:
        """The ops that it calls."""
        raise NotImplementedError


class ShardedHead(_Holder):
    """An output projection over the ranks: hidden states [..., H] -> logits [..., V], whole on every rank."""

    head: ParallelLMHead
    logits: LogitsProcessor

    def __init__(self, head: ParallelLMHead) -> None:
        super().__init__(head)
        self.__dict__["head"] = head
        self.__dict__["logits"] = LogitsProcessor(head.vocabulary.size)

    def ops(self) -> tuple[CustomOp, ...]:
        return self.head, self.logits

    def forward(self, hidden_states: Tensor) -> Any:
        return self.logits(self.head, hidden_states, self.head.bias)

    def extra_repr(self) -> str:
        return str(self.head)


class ShardedEmbedding(_Holder):
    """An embedding over the ranks whose rows are multiplied by a number, rounded to their dtype (Gemma)."""

    table: VocabParallelEmbedding
    scale: Tensor

    def __init__(self, table: VocabParallelEmbedding, scale: Tensor) -> None:
        super().__init__(table)
        self.__dict__["table"] = table
        self.register_buffer("scale", scale.detach().clone(), persistent=False)

    @property
    def num_embeddings(self) -> int:
        """Tokens of the whole vocabulary, by nn.Embedding's name."""
        return self.table.num_embeddings

    def ops(self) -> tuple[CustomOp, ...]:
        return (self.table,)

    def forward(self, input_ids: Tensor) -> Any:
        rows = self.table(input_ids)
        return rows * self.scale.to(rows.dtype)

    def extra_repr(self) -> str:
        return str(self.table)


HOLDERS = (ShardedHead, ShardedEmbedding)


class ShardBinding(Binding):
    """Puts a shard's ops under the config in force. There is no other forward to bind, nor to go back to."""

    def __init__(self, module: Any, *ops: CustomOp) -> None:
        super().__init__(module)
        self.placed = ops
        for op in ops:
            op.redispatch(current_config())

    def ops(self) -> Iterator[tuple[str, CustomOp, str]]:
        for op in self.placed:
            yield "", op, ""

    def bind(self) -> None:
        pass

    def unbind(self) -> None:
        pass


def find_shard(module: Any) -> ShardBinding | None:
    """The binding of a module that ``shard`` put there, None for any other."""
    if isinstance(module, HOLDERS):
        return ShardBinding(module, *module.ops())
    return ShardBinding(module, module) if isinstance(module, SHARDS) else None


def own_op(module: Any) -> Product:
    """A sharded linear layer is its own op, under the config in force."""
    op: Product = module
    op.redispatch(current_config())
    return op


def merged_product(linears: list[Any], head_size: int | None = None) -> Product:
    """One op, without memory, for the rows of all these layers, one layer after the other.

    Args:
        linears: plain layers, or the column-parallel ones of one rank.
        head_size: of q, k and v, which is what the layers then are.
    """
    first = linears[0]
    bias = first.bias is not None
    with torch.device("meta"):
        if not isinstance(first, ColumnParallelLinear):
            rows = sum(m.out_features for m in linears)
            return ReplicatedLinear(first.in_features, rows, bias, return_bias=False)
        whole = [m.output_size for m in linears]
        with init_tensor_parallel(first.tp):
            if head_size is None:
                return MergedColumnParallelLinear(first.input_size, whole, bias, return_bias=False)
            heads, kv_heads = whole[0] // head_size, whole[1] // head_size
            return QKVParallelLinear(first.input_size, head_size, heads, kv_heads, bias, return_bias=False)


def alone(module: nn.Module) -> None:
    """Make the shards of a copy speak to nobody: each rank judges its own part, and no rank waits for another."""
    for part in module.modules():
        if isinstance(part, SHARDS):
            part.tp = ALONE


def note(op: nn.Module) -> str:
    """Which part of a weight this rank's op holds; nothing for one that holds all of it, or is no op."""
    tp = getattr(op, "tp", ALONE)
    if tp.size == 1:
        return ""
    where = f"rank {tp.rank} of {tp.size}"
    if isinstance(op, QKVParallelLinear):
        return f"{where}: {op.num_heads} heads, {op.num_kv_heads} of keys"
    if isinstance(op, RowParallelLinear):
        return f"{where}: {op.local_input_size} of {op.input_size} columns, summed over the ranks"
    if isinstance(op, ColumnParallelLinear):
        return f"{where}: {op.local_output_size} of {op.output_size} rows"
    if isinstance(op, VocabParallelEmbedding):
        first, end = op.vocabulary.base_shard
        return f"{where}: tokens {first} to {end - 1}"
    return where

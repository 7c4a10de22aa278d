"""The matrix product with the weight's rows spread over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.custom_op import CustomOp
from ...core.parameters import copy_checked
from ...distributed import TensorParallel
from .product import Product, Result, ranks

__all__ = ["ColumnParallelLinear", "MergedColumnParallelLinear", "QKVParallelLinear"]


@CustomOp.register("column_parallel_linear")
class ColumnParallelLinear(Product):
    """``y = x @ weight.T + bias`` where each rank holds, and computes, ``out / ranks`` of the outputs.

    Shapes:  x [..., in] -> [..., out / ranks], or [..., out] with ``gather_output``; weight [out / ranks, in].
    Dtypes:  as of ``ReplicatedLinear``.
    Mutates: nothing.      Grad: native only.
    Errors:  TensorParallelError with both numbers if ``output_size`` does not divide; ValueError for another width
             of x.
    Returns: ``(y, bias)`` or ``y``, as of ``ReplicatedLinear``. With ``gather_output`` and ``skip_bias_add`` the bias
             is gathered like y.
    Source:  Shoeybi et al. 2019 (Megatron-LM), arXiv 1909.08053.

    Args:
        input_size, output_size, bias, skip_bias_add, params_dtype, return_bias: as of ``ReplicatedLinear``; sizes are
            those of the whole weight.
        gather_output: give every rank the whole result.
        disable_tp: hold the whole weight on every rank.
        tp_rank, tp_size: share the weight in ``tp_size`` parts, of which this rank holds number ``tp_rank``: fewer than
            there are ranks, where several hold the same (key heads). Both or none, without ``gather_output``.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
        tp_rank: int | None = None,
        tp_size: int | None = None,
        enforce_enable: bool = False,
    ) -> None:
        tp = ranks(disable_tp)
        if tp_rank is not None or tp_size is not None:
            if tp_rank is None or tp_size is None or not 0 <= tp_rank < tp_size or gather_output:
                raise ValueError(
                    f"tp_rank is {tp_rank}, tp_size {tp_size} and gather_output {gather_output}: give both with 0 <= "
                    "tp_rank < tp_size, and gather no output, since other ranks may hold the same part."
                )
            tp = TensorParallel(tp_size, tp_rank)
        self._set_up(input_size, tp.share(output_size, "output_size"), tp, bias, skip_bias_add, params_dtype,
                     return_bias, enforce_enable)  # fmt: skip
        self.input_size = input_size
        self.output_size = output_size
        self.gather_output = gather_output

    def _set_up(
        self, input_size: int, local: int, tp: TensorParallel, bias: bool, skip_bias_add: bool,
        params_dtype: torch.dtype | None, return_bias: bool, enforce_enable: bool,
    ) -> None:  # fmt: skip
        Product.__init__(
            self, input_size, local, tp, bias=bias, bias_size=local, skip_bias_add=skip_bias_add,
            params_dtype=params_dtype, return_bias=return_bias, enforce_enable=enforce_enable,
        )  # fmt: skip

    def _joined(self, y: Tensor) -> Result:
        bias: Tensor | None = self.bias if self.skip_bias_add else None
        if self.gather_output:
            y = self.tp.all_gather(y)
            bias = None if bias is None else self.tp.all_gather(bias)
        return (y, bias) if self.return_bias else y

    def load_weight(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Copy this rank's rows of a checkpoint's whole weight [out, in] and bias [out]."""
        rows = slice(self.tp.rank * self.local_output_size, (self.tp.rank + 1) * self.local_output_size)
        copy_checked(self.weight, weight[rows], "The weight")
        if self.bias is not None and bias is not None:
            copy_checked(self.bias, bias[rows], "The bias")


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel weights in one product; it follows ``column_parallel_linear``'s directives.

    This rank's weight is ``[part of W0; part of W1; ...]``: each weight is sharded by itself.

    Args:
        output_sizes: rows of each whole weight; each must divide by the number of ranks.
        others: as of ``ColumnParallelLinear``.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
        enforce_enable: bool = False,
    ) -> None:
        tp = ranks(disable_tp)
        self.local_sizes = [tp.share(size, f"output_sizes[{i}]") for i, size in enumerate(output_sizes)]
        super().__init__(
            input_size, sum(output_sizes), bias, gather_output, skip_bias_add, params_dtype, return_bias=return_bias,
            disable_tp=disable_tp, enforce_enable=enforce_enable,
        )  # fmt: skip
        self.output_sizes = list(output_sizes)

    def load_shard(
        self, weight: Tensor, shard_id: int | tuple[int, ...] | None = None, bias: Tensor | None = None
    ) -> None:
        """Copy a checkpoint's weight into its place.

        Args:
            weight: the whole weight number ``shard_id`` [size, in]; for a tuple of ids, these weights one after the
                other; for None, all of them.
            shard_id: which; an id that does not exist is a ValueError.
            bias: the same of the bias.
        """
        ids = (
            range(len(self.output_sizes))
            if shard_id is None
            else (shard_id,)
            if isinstance(shard_id, int)
            else shard_id
        )
        if not all(isinstance(i, int) and 0 <= i < len(self.output_sizes) for i in ids):
            raise ValueError(
                f"shard_id is {shard_id!r}; there are 0..{len(self.output_sizes) - 1}, tuples of them, and None."
            )
        begin = 0
        for i in ids:
            size, local = self.output_sizes[i], self.local_sizes[i]
            first = begin + self.tp.rank * local
            place = sum(self.local_sizes[:i])
            copy_checked(self.weight[place : place + local], weight[first : first + local], f"Weight {i}")
            if self.bias is not None and bias is not None:
                copy_checked(self.bias[place : place + local], bias[first : first + local], f"Bias {i}")
            begin += size
        if begin != weight.shape[0]:
            raise ValueError(f"The checkpoint's weight has {weight.shape[0]} rows; shards {tuple(ids)} have {begin}.")


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value in one product, sharded by heads; it follows ``column_parallel_linear``'s directives.

    This rank's weight is ``[q heads | k heads | v heads]``. With more ranks than key heads, each rank holds one key
    head, which ``ranks / total_num_kv_heads`` ranks share.

    Args:
        hidden_size: in.
        head_size: of queries and keys.
        total_num_heads, total_num_kv_heads: of the whole model; None for the second means the first.
        v_head_size: None means ``head_size``.
        others: as of ``ColumnParallelLinear``.
    """

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int | None = None,
        bias: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
        v_head_size: int | None = None,
        enforce_enable: bool = False,
    ) -> None:
        tp = ranks(disable_tp)
        kv_heads = total_num_heads if total_num_kv_heads is None else total_num_kv_heads
        v_head_size = head_size if v_head_size is None else v_head_size
        num_heads = tp.share(total_num_heads, "total_num_heads")
        if tp.size > kv_heads:
            replicas = tp.share_of_ranks(kv_heads)
            num_kv_heads = 1
        else:
            replicas = 1
            num_kv_heads = tp.share(kv_heads, "total_num_kv_heads")
        local = [num_heads * head_size, num_kv_heads * head_size, num_kv_heads * v_head_size]
        self._set_up(hidden_size, sum(local), tp, bias, skip_bias_add, params_dtype, return_bias, enforce_enable)
        self.input_size = hidden_size
        self.output_size = total_num_heads * head_size + kv_heads * (head_size + v_head_size)
        self.gather_output = False
        self.num_heads, self.num_kv_heads, self.num_kv_head_replicas = num_heads, num_kv_heads, replicas
        self.local_sizes = local
        self.whole_sizes = [total_num_heads * head_size, kv_heads * head_size, kv_heads * v_head_size]

    def load_shard(self, weight: Tensor, shard_id: str | None = None, bias: Tensor | None = None) -> None:
        """Copy a checkpoint's whole ``"q"``, ``"k"`` or ``"v"`` weight, or, for None, the three one after the other."""
        if shard_id is None:
            parts = weight.split(self.whole_sizes)
            biases = [None] * 3 if bias is None else bias.split(self.whole_sizes)
            for name, part, part_bias in zip("qkv", parts, biases, strict=True):
                self.load_shard(part, name, part_bias)
            return
        if shard_id not in ("q", "k", "v"):
            raise ValueError(f"shard_id is {shard_id!r}; there are 'q', 'k', 'v' and None.")
        i = "qkv".index(shard_id)
        rank = self.tp.rank if i == 0 else self.tp.rank // self.num_kv_head_replicas
        place, local = sum(self.local_sizes[:i]), self.local_sizes[i]
        rows = slice(rank * local, (rank + 1) * local)
        copy_checked(self.weight[place : place + local], weight[rows], f"The {shard_id} weight")
        if self.bias is not None and bias is not None:
            copy_checked(self.bias[place : place + local], bias[rows], f"The {shard_id} bias")

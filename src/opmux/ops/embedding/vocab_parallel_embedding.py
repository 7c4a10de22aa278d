"""The token embedding."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...core.cases import Case, Cost, Inputs, Tolerance
from ...core.custom_op import CustomOp
from ...core.lazy import lazy_module
from ...core.parameters import frozen
from ...core.requires import requires
from ...distributed import ALONE, tensor_parallel
from . import kernels_cpu
from .vocabulary import Vocabulary

__all__ = ["VocabParallelEmbedding"]

kernels_triton = lazy_module("opmux.ops.embedding.kernels_triton")


@CustomOp.register("vocab_parallel_embedding")
class VocabParallelEmbedding(CustomOp):
    """Looks token ids up in a table whose vocabulary is padded to a multiple of ``padding_size``.

    Shapes:  input_ids, any integer dtype and shape -> [*input_ids.shape, H]; weight [padded vocabulary / ranks, H].
    Dtypes:  rows are copied bit for bit.
    Ids:     an id outside the vocabulary (negative, padding, too large) gives a row of zeros, on every platform and for
             every number of ranks; nothing is read outside the table and no device waits.
    Mutates: nothing.      Grad: native only.
    Errors:  TypeError for ids that are no integers; ValueError at construction for sizes that contradict.

    Args:
        num_embeddings: the whole vocabulary, added tokens included.
        embedding_dim: H.
        params_dtype: of the weight; None means torch's default.
        org_num_embeddings: the base vocabulary, before added tokens; None means ``num_embeddings``.
        padding_size: base and total are padded to multiples of it, and of the number of ranks.
        disable_tp: hold the whole table on every rank.
        reduce_results: sum over the ranks; without it ids of other ranks give zeros.
    """

    tolerance = Tolerance(ulp=0.0, fp32=0.0)

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = 64,
        *,
        disable_tp: bool = False,
        reduce_results: bool = True,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.tp = ALONE if disable_tp else tensor_parallel()
        self.embedding_dim = embedding_dim
        self.reduce_results = reduce_results
        self.vocabulary = Vocabulary.of(num_embeddings, org_num_embeddings, padding_size, self.tp)
        self.weight = frozen(torch.zeros(self.vocabulary.local_rows, embedding_dim, dtype=params_dtype))

    def forward_native(self, input_ids: Tensor) -> Tensor:
        _check_ids(input_ids)
        rows, valid = self.vocabulary.rows(input_ids)
        return self._summed(torch.where(valid.unsqueeze(-1), self.weight[rows], 0))

    @requires(native_library=True, when=lambda self, input_ids: None if self.vocabulary.contiguous else NOT_CONTIGUOUS)
    def forward_cpu(self, input_ids: Tensor) -> Tensor:
        _check_ids(input_ids)
        begin, end = self.vocabulary.base_shard
        first, last, _ = self.vocabulary.added_shard
        held = self.weight[: end - begin + last - first]
        return self._summed(kernels_cpu.embedding_cpu(_int64(input_ids), held, begin, True))

    @requires(triton=True)
    def forward_cuda(self, input_ids: Tensor) -> Tensor:
        _check_ids(input_ids)
        ranges = (*self.vocabulary.base_shard, *self.vocabulary.added_shard)
        return self._summed(kernels_triton.embedding_triton(input_ids, self.weight, *ranges))

    forward_hip = forward_xpu = forward_cuda

    def _summed(self, rows: Tensor) -> Tensor:
        """Every id has its row on one rank at most, and zeros on the others."""
        return self.tp.all_reduce(rows) if self.reduce_results else rows

    def load_weight(self, checkpoint: Tensor) -> None:
        """Copy this rank's rows of a checkpoint's whole table and zero the rest.

        Args:
            checkpoint: [rows, H]; rows of the base vocabulary, of base and added tokens, or of a table padded as
                this one is.

        Errors: ValueError naming the sizes if the row count fits none of these, or the width differs.
        """
        v = self.vocabulary
        if checkpoint.shape[-1] != self.embedding_dim or checkpoint.shape[0] not in (v.base, v.size, v.total_padded):
            raise ValueError(
                f"The checkpoint's table is {tuple(checkpoint.shape)}; this layer takes {v.base} rows (base), {v.size} "
                f"(with added tokens) or {v.total_padded} (padded), each of width {self.embedding_dim}."
            )
        self._fill(self.weight, checkpoint)

    def _fill(self, into: Tensor, checkpoint: Tensor) -> None:
        """This rank's rows of ``checkpoint``, where they belong, and zeros."""
        v = self.vocabulary
        padded = checkpoint.shape[0] == v.total_padded
        added = checkpoint[v.base_padded if padded else v.base :]
        begin, end = v.base_shard
        first, last, row = v.added_shard
        with torch.no_grad():
            into.zero_()
            into[: end - begin] = checkpoint[begin:end]
            if added.shape[0]:
                into[row : row + last - first] = added[first - v.base : last - v.base]

    @property
    def num_embeddings(self) -> int:
        """Tokens of the whole vocabulary, by nn.Embedding's name."""
        return self.vocabulary.size

    def extra_repr(self) -> str:
        return f"{self.vocabulary.size}, {self.embedding_dim}, padded={self.vocabulary.total_padded}"

    @classmethod
    def cases(cls) -> Iterator[Case]:
        sizes = [(t, v, h) for v, h in ((49152, 576), (128256, 4096)) for t in (1, 64, 16384)]
        edges = [(0, 64, 8), (5, 3, 2), (9, 100, 769), (33, 1010, 65)]
        for t, v, h in [*sizes, *edges]:
            yield Case(
                name=f"T={t} V={v} H={h}",
                init={"num_embeddings": v, "embedding_dim": h},
                args=lambda i, t=t, v=v: (i.integers(-2, v + 2, t) if t < 64 else i.integers(0, v, t),),
                dims={"T": t, "V": v, "H": h},
                bench=(t, v, h) in sizes,
                prepare=_random_table,
            )

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        return Cost(size_bytes=case.dims["T"] * (2 * case.dims["H"] * dtype.itemsize + 8))


NOT_CONTIGUOUS = "looks ids up by plain row number; with added tokens behind base padding ids and rows differ"


def _check_ids(input_ids: Tensor) -> None:
    if input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise TypeError(f"vocab_parallel_embedding takes integer token ids; they are {input_ids.dtype}.")


def _int64(input_ids: Tensor) -> Tensor:
    """int32 and int64 are read as they are; the narrower types are widened."""
    return input_ids if input_ids.dtype in (torch.int32, torch.int64) else input_ids.long()


def _random_table(op: VocabParallelEmbedding, inputs: Inputs) -> None:
    op.load_weight(inputs.randn(op.vocabulary.base, op.embedding_dim))

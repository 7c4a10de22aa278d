"""The weight of the output projection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...core.cases import Case
from ...core.custom_op import CustomOp
from ...core.parameters import frozen
from .vocab_parallel_embedding import VocabParallelEmbedding

__all__ = ["ParallelLMHead"]


@CustomOp.register("parallel_lm_head")
class ParallelLMHead(VocabParallelEmbedding):
    """Holds the output projection, laid out like the embedding so that the two can share one tensor.

    It is not called: ``LogitsProcessor`` multiplies by its weight, and adds its bias when given as ``embedding_bias``.

    Shapes:  weight [padded vocabulary / ranks, H]; bias [padded vocabulary / ranks].
    Errors:  RuntimeError when called; ValueError from ``tie_weights`` if the two layouts differ.

    Args:
        num_embeddings, embedding_dim, params_dtype, org_num_embeddings, padding_size: as of ``VocabParallelEmbedding``.
        bias: whether there is one.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        bias: bool = False,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = 64,
        *,
        disable_tp: bool = False,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(
            num_embeddings, embedding_dim, params_dtype, org_num_embeddings, padding_size, disable_tp=disable_tp,
            enforce_enable=enforce_enable,
        )  # fmt: skip
        rows = self.vocabulary.local_rows
        self.bias = frozen(torch.zeros(rows, dtype=params_dtype)) if bias else None

    def tie_weights(self, embedding: VocabParallelEmbedding) -> ParallelLMHead:
        """Share the embedding's weight tensor."""
        if embedding.vocabulary != self.vocabulary:
            raise ValueError(
                f"The head's vocabulary is laid out as {self.vocabulary}, the embedding's as {embedding.vocabulary}: "
                "give both the same padding_size and org_num_embeddings."
            )
        self.weight = embedding.weight
        return self

    def load_bias(self, checkpoint: Tensor) -> None:
        """Copy this rank's part of a checkpoint's whole bias [vocabulary] and zero the rest."""
        v = self.vocabulary
        if self.bias is None or checkpoint.dim() != 1 or checkpoint.shape[0] not in (v.base, v.size, v.total_padded):
            raise ValueError(
                f"The checkpoint's bias is {tuple(checkpoint.shape)}; this head "
                + ("has none." if self.bias is None else f"takes {v.base}, {v.size} or {v.total_padded} values.")
            )
        self._fill(self.bias, checkpoint)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "ParallelLMHead is not called: it holds the weight. Write LogitsProcessor(vocab_size)(lm_head, hidden)."
        )

    # The parent's methods are lookups, which this op has no use for.
    def forward_native(self, input_ids: Tensor) -> Tensor:
        return self(input_ids)  # type: ignore[no-any-return]

    forward_cpu = forward_cuda = forward_hip = forward_xpu = CustomOp.forward_cpu

    @classmethod
    def cases(cls) -> Iterator[Case]:
        """None: ``logits_processor`` has the cases of the product."""
        return iter(())

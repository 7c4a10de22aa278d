"""The embedding table and the output projection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..core.custom_op import CustomOp
from ..ops.embedding.parallel_lm_head import ParallelLMHead
from ..ops.embedding.vocab_parallel_embedding import VocabParallelEmbedding
from ..ops.logits.logits_processor import LogitsProcessor
from .binding import Binding, foreign_forward, share_parameters
from .linears import untouchable
from .shards import find_shard


class EmbeddingBinding(Binding):
    """Runs an ``nn.Embedding`` by ``vocab_parallel_embedding``; an id outside the table is still an error.

    Args:
        module: the table.
        scale: name of the buffer or attribute that holds the number by which rows are multiplied (Gemma), if any.
    """

    def __init__(self, module: nn.Embedding, scale: str | None = None) -> None:
        super().__init__(module)
        self.scale = scale
        with torch.device("meta"):
            self.op = VocabParallelEmbedding(
                module.num_embeddings, module.embedding_dim, padding_size=1, disable_tp=True
            )
        share_parameters(self.op, module)

    def ops(self) -> Iterator[tuple[str, CustomOp, str]]:
        yield "", self.op, "" if self.scale is None else f"times {self.scale}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or self.steps_aside() or not self._inside(args[0]):
            return self.original(*args, **kwargs)
        rows = self.op(args[0])
        return rows if self.scale is None else _times(rows, getattr(self.module, self.scale))

    def _inside(self, ids: Tensor) -> bool:
        # On a GPU torch itself only asserts, later and elsewhere: looking would make the host wait.
        if torch.compiler.is_compiling() or ids.device.type != "cpu" or ids.numel() == 0:
            return True
        low, high = torch.aminmax(ids)
        return int(low) >= 0 and int(high) < self.module.num_embeddings


class HeadBinding(Binding):
    """Runs the output projection by ``logits_processor`` on a ``parallel_lm_head`` that shares the module's weight."""

    def __init__(self, module: nn.Linear) -> None:
        super().__init__(module)
        with torch.device("meta"):
            self.head = ParallelLMHead(
                module.out_features, module.in_features, module.bias is not None, padding_size=1, disable_tp=True
            )
        share_parameters(self.head, module)
        self.op = LogitsProcessor(module.out_features)

    def ops(self) -> Iterator[tuple[str, CustomOp, str]]:
        yield "", self.head, "holds the weight"
        yield "", self.op, ""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or self.steps_aside(args[0]):
            return self.original(*args, **kwargs)
        return self.op(self.head, args[0], self.module._parameters["bias"])


def find_embedding(module: Any) -> Binding | str:
    """The binding for an embedding table, or why there is none."""
    why = find_shard(module) or foreign_forward(module) or untouchable_table(module)
    if why is None:
        return EmbeddingBinding(module)
    scale = scale_of(module) if isinstance(why, str) else None
    return EmbeddingBinding(module, scale) if scale is not None else why


def scale_of(table: Any) -> str | None:
    """The buffer or attribute of an embedding that multiplies its rows and does nothing else, found by trying."""
    weight = getattr(table, "weight", None)
    if not isinstance(table, nn.Embedding) or table.max_norm is not None or foreign_forward(table) is not None:
        return None
    if not isinstance(weight, Tensor) or type(weight.data) is not Tensor or weight.is_meta:
        return None
    names = [n for n, b in table._buffers.items() if b is not None and b.numel() == 1]
    names += [n for n, v in vars(table).items() if isinstance(v, float)]
    ids = torch.arange(min(table.num_embeddings, 64), device=weight.device)
    with torch.no_grad():
        try:
            given = type(table).forward(table, ids)
        except Exception:  # it takes something else than ids
            return None
        return next((n for n in names if torch.equal(given, _times(weight[ids], getattr(table, n)))), None)


def _times(rows: Tensor, scale: Any) -> Tensor:
    return rows * (scale.to(rows.dtype) if isinstance(scale, Tensor) else scale)


def untouchable_table(module: Any) -> str | None:
    """Why an embedding table is left alone, or None for a plain one."""
    if type(module) is not nn.Embedding:
        return f"is a {type(module).__qualname__}, not a plain nn.Embedding"
    weight = module._parameters.get("weight")
    if weight is None or type(weight.data) is not Tensor or weight.is_meta:
        return "its weight is no plain tensor (quantised, sharded or offloaded)"
    if module.max_norm is not None:
        return "renormalises its rows when they are read (max_norm)"
    return None


def find_head(module: Any) -> Binding | str:
    """The binding for an output projection, or why there is none."""
    return find_shard(module) or untouchable(module) or HeadBinding(module)

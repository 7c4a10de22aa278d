"""Hidden states to logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost, Inputs, Tolerance
from ...core.custom_op import CustomOp
from ...core.lazy import lazy_module
from ...core.numerics import wide
from ...core.requires import requires
from ..embedding.parallel_lm_head import ParallelLMHead
from ..embedding.vocab_parallel_embedding import VocabParallelEmbedding
from ..linear.kernels_cpu import linear_cpu
from . import kernels_cpu

__all__ = ["LogitsProcessor"]

kernels_triton = lazy_module("opmux.ops.logits.kernels_triton")


@CustomOp.register("logits_processor")
class LogitsProcessor(CustomOp):
    """Projects hidden states onto the vocabulary, cuts the padding, then caps, then scales.

    ``z = hidden @ weight.T (+ embedding_bias)``; padding columns are cut; ``z = cap * tanh(z / cap)``; ``z = z *
    scale``.
    The order is cap, then scale. A model that scales first (Cohere) passes ``scale`` and no cap, or caps by itself.

    Shapes:  lm_head.weight [P, H]; hidden_states [..., H] -> [..., org_vocab_size] on every rank; embedding_bias [P].
    Dtypes:  fp32, fp16, bf16; the product accumulates in fp32 and is rounded to the hidden states' dtype; cap and
             scale are fp32, rounded once.
    Mutates: nothing.      Grad: native only.
    Errors:  ValueError for a negative cap, or a head with fewer rows than the vocabulary.

    Args:
        vocab_size: of the whole vocabulary.
        org_vocab_size: columns to keep; None means ``vocab_size``.
        scale: factor, applied last.
        logits_as_input: ``hidden_states`` are logits already; nothing is multiplied or cut.
        soft_cap: the cap; None or 0 means none.
    """

    tolerance = Tolerance(ulp=2.0, fp32=64.0, scale=1.0)
    lead = 1

    def __init__(
        self,
        vocab_size: int,
        org_vocab_size: int | None = None,
        scale: float = 1.0,
        logits_as_input: bool = False,
        soft_cap: float | None = None,
        *,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        if soft_cap is not None and soft_cap < 0:
            raise ValueError(f"soft_cap is {soft_cap}; it must be positive, or None for no cap.")
        self.vocab_size = vocab_size
        self.org_vocab_size = vocab_size if org_vocab_size is None else org_vocab_size
        self.scale = float(scale)
        self.logits_as_input = logits_as_input
        self.soft_cap = float(soft_cap) if soft_cap else None

    def forward_native(
        self, lm_head: VocabParallelEmbedding, hidden_states: Tensor, embedding_bias: Tensor | None = None
    ) -> Tensor:
        if self.logits_as_input:
            logits = hidden_states
        else:
            logits = self._cut(lm_head, F.linear(hidden_states, lm_head.weight, embedding_bias))
        if self.soft_cap is None and self.scale == 1.0:
            return logits.clone() if logits is hidden_states else logits
        z = wide(logits)
        if self.soft_cap is not None:
            z = self.soft_cap * torch.tanh(z / self.soft_cap)
        return (z * self.scale).to(logits.dtype)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(
        self, lm_head: VocabParallelEmbedding, hidden_states: Tensor, embedding_bias: Tensor | None = None
    ) -> Tensor:
        if self.logits_as_input:
            logits = hidden_states
        else:
            logits = self._cut(lm_head, linear_cpu(hidden_states, lm_head.weight, embedding_bias))
        if self.soft_cap is None and self.scale == 1.0:
            return logits.clone() if logits is hidden_states else logits
        return kernels_cpu.cap_and_scale_cpu(logits, self.soft_cap or 0.0, self.scale)

    @requires(dtypes=FLOATS, triton=True)
    def forward_cuda(
        self, lm_head: VocabParallelEmbedding, hidden_states: Tensor, embedding_bias: Tensor | None = None
    ) -> Tensor:
        if self.logits_as_input:
            logits = hidden_states
        else:
            logits = self._cut(lm_head, F.linear(hidden_states, lm_head.weight, embedding_bias))
        if self.soft_cap is None and self.scale == 1.0:
            return logits.clone() if logits is hidden_states else logits
        return kernels_triton.softcap_scale_triton(logits, logits.shape[-1], self.soft_cap, self.scale, False, None)

    forward_hip = forward_xpu = forward_cuda

    def _cut(self, lm_head: VocabParallelEmbedding, logits: Tensor) -> Tensor:
        """All ranks' logits, without the columns of padding."""
        vocabulary = getattr(lm_head, "vocabulary", None)
        if vocabulary is not None:
            logits = lm_head.tp.all_gather(logits)
        columns = logits.shape[-1]
        if columns < self.org_vocab_size:
            raise ValueError(f"The head has {columns} rows; the logits of {self.org_vocab_size} tokens were asked for.")
        if vocabulary is not None and not vocabulary.columns_in_order and self.org_vocab_size > vocabulary.base:
            return logits[..., vocabulary.columns()[: self.org_vocab_size].to(logits.device)]
        return logits if columns == self.org_vocab_size else logits[..., : self.org_vocab_size]

    def extra_repr(self) -> str:
        return f"{self.org_vocab_size}, scale={self.scale}, soft_cap={self.soft_cap}"

    @classmethod
    def cases(cls) -> Iterator[Case]:
        sizes = [(t, v, h) for v, h in ((49152, 576), (128256, 4096)) for t in (1, 64)]
        edges = [(0, 3, 8), (2, 3, 2), (5, 100, 65)]
        for t, v, h in [*sizes, *edges]:
            for cap, scale in ((None, 1.0), (30.0, 1.0), (30.0, 0.0625)):
                yield Case(
                    name=f"T={t} V={v} H={h}{f' cap={cap:g} scale={scale:g}' if cap else ''}",
                    init={"vocab_size": v, "soft_cap": cap, "scale": scale},
                    args=lambda i, t=t, v=v, h=h: (_head(i, v, h), i.randn(t, h)),
                    dims={"T": t, "V": v, "H": h},
                    bench=(t, v, h) in sizes,
                )

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        t, v, h = case.dims["T"], case.dims["V"], case.dims["H"]
        return Cost(size_bytes=dtype.itemsize * (t * h + v * h + t * v), flops=2 * t * v * h)


def _head(inputs: Inputs, vocab: int, hidden: int) -> ParallelLMHead:
    head = ParallelLMHead(vocab, hidden, params_dtype=inputs.dtype).to(inputs.device)
    head.requires_grad_(False)
    head.load_weight(inputs.randn(vocab, hidden, scale=hidden**-0.5 * 4))
    return head

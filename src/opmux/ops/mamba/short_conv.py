"""The short convolution of LFM2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost
from ...core.custom_op import CustomOp
from ...core.parameters import frozen
from ...core.requires import requires
from ...distributed import tensor_parallel
from ..linear.column_parallel_linear import MergedColumnParallelLinear
from ..linear.row_parallel_linear import RowParallelLinear
from .causal_conv1d import CausalConv1d
from .mamba_mixer import packed_hidden, prepare
from .mixer import Mixer, Place, dispatched, native, whole
from .requests import MambaState

__all__ = ["ShortConv"]


@CustomOp.register("short_conv")
class ShortConv(Mixer):
    """LFM2's layer: ``B, C, x = in_proj(h)``; ``out_proj(C * conv(B * x))``, without an activation.

    Requests, slots and guesses are as of :class:`CausalConv1d`: prompts, steps and padding are one call, and a slot is
    read only where ``has_initial_state`` says so. Over ranks each holds ``dim / ranks`` channels.

    Shapes:  hidden_states [S, dim], [B, S, dim], or packed [T, dim] with cu_seqlens [R + 1] -> the same; conv_state
             [slots, >= K - 1, dim / ranks]; state_indices, has_initial_state, num_accepted_tokens [R].
    Dtypes:  fp32, fp16, bf16; every product and the convolution are rounded to it.
    Mutates: conv_state, the slots of this call.      Grad: native only, and none through the state.
    Errors:  ValueError for shapes that do not fit; TensorParallelError where the ranks do not divide dim.
    Source:  Liquid AI 2025 (LFM2), arXiv 2511.23404.

    Args:
        config: says ``conv_L_cache`` (K) and ``conv_bias`` (of all three parts).
        dim: features and channels.
    """

    mutates = ("conv_state",)

    def __init__(self, config: Any, dim: int, *, enforce_enable: bool = False) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.tp = tensor_parallel()
        self.local_width = self.tp.share(dim, "dim")
        self.conv_kernel_size = int(config.conv_L_cache)
        bias = bool(config.conv_bias)
        self.in_proj = MergedColumnParallelLinear(dim, [dim] * 3, bias=bias, return_bias=False)
        self.conv_weight = frozen(torch.empty(self.local_width, 1, self.conv_kernel_size))
        self.conv_bias = frozen(torch.zeros(self.local_width)) if bias else None
        self.conv = CausalConv1d(None)
        self.out_proj = RowParallelLinear(dim, dim, bias=bias, return_bias=False)

    def forward_native(
        self, hidden_states: Tensor, conv_state: Tensor | None = None, state_indices: Tensor | None = None,
        has_initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None,
        num_accepted_tokens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return self._run(
            native, hidden_states, conv_state, state_indices, has_initial_state, cu_seqlens, num_accepted_tokens
        )

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(
        self, hidden_states: Tensor, conv_state: Tensor | None = None, state_indices: Tensor | None = None,
        has_initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None,
        num_accepted_tokens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return self._run(
            dispatched, hidden_states, conv_state, state_indices, has_initial_state, cu_seqlens, num_accepted_tokens
        )

    def _run(self, call: Callable[..., Any], hidden_states: Tensor, conv_state: Tensor | None, *requests: Any) -> Tensor:
        b, c, x = call(self.in_proj, hidden_states).chunk(3, -1)
        v = call(self.conv, b * x, self.conv_weight, self.conv_bias, conv_state, *requests)
        return call(self.out_proj, c * v)

    def new_state(
        self, slots: int, speculative_tokens: int = 0, dtype: torch.dtype | None = None
    ) -> MambaState:
        """States of ``slots`` requests; ``dtype`` None means the weights'."""
        rows = self.conv_kernel_size - 1 + speculative_tokens
        return self._new_state(slots, rows, self.local_width, None, dtype, None)

    def _places(self) -> Iterator[tuple[str, Place]]:
        local = slice(self.tp.rank * self.local_width, (self.tp.rank + 1) * self.local_width)

        def thrice(t: Tensor) -> Tensor:
            return torch.cat([part[local] for part in t.chunk(3)])

        yield "in_proj.weight", (self.in_proj.weight, thrice)
        yield "conv.weight", (self.conv_weight, lambda t: t[local])
        yield "out_proj.weight", (self.out_proj.weight, lambda t: t[:, local])
        if self.conv_bias is not None:
            yield "in_proj.bias", (self.in_proj.bias, thrice)
            yield "conv.bias", (self.conv_bias, lambda t: t[local])
            yield "out_proj.bias", (self.out_proj.bias, whole)

    def extra_repr(self) -> str:
        return f"width={self.local_width}, taps={self.conv_kernel_size}"

    @classmethod
    def cases(cls) -> Iterator[Case]:
        for lead, dim, bias, real in (
            ((512,), 1024, False, True), ((64, 1), 1024, False, True), ((1, 1), 1024, False, True),
            ((2, 9), 12, True, False), ((3, 1), 5, True, False), ((0, 3), 4, False, False),
        ):  # fmt: skip
            old = lead[-1] == 1
            yield Case(
                name=f"{'x'.join(map(str, lead))} dim={dim}{' with states' if old else ''}",
                init={"config": SimpleNamespace(conv_L_cache=3, conv_bias=bias), "dim": dim}, bench=real,
                dims={"T": torch.Size(lead).numel(), "H": dim}, prepare=prepare,
                args=lambda i, s=lead, d=dim, o=old: (i.randn(*s, d),
                    *((i.randn(s[0], 2, d), None, i.integers(1, 2, s[0]).bool()) if o else ())),
            )  # fmt: skip
        for guesses in (False, True):
            yield Case(
                name=f"packed, {'guesses' if guesses else 'one slot each'}",
                init={"config": SimpleNamespace(conv_L_cache=4, conv_bias=True), "dim": 12},
                dims={"T": 23, "H": 12}, prepare=prepare, args=lambda i, g=guesses: packed_hidden(i, g, 12, 12, None),
            )  # fmt: skip

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        tokens, dim = case.dims["T"], case.dims["H"]
        return Cost(size_bytes=dtype.itemsize * (4 * dim * dim + 2 * tokens * dim), flops=8 * tokens * dim * dim)

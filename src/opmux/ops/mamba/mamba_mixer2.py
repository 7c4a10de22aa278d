"""The mixer of Mamba-2."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost
from ...core.custom_op import CustomOp
from ...core.parameters import frozen
from ...core.requires import requires
from ...distributed import TensorParallelError, tensor_parallel
from ..linear.replicated_linear import ReplicatedLinear
from ..linear.row_parallel_linear import RowParallelLinear
from .causal_conv1d import CausalConv1d
from .mamba_mixer import packed_hidden, prepare
from .mixer import Mixer, Place, decay, dispatched, native, whole
from .mixer2_gated_rms_norm import Mixer2RMSNormGated
from .requests import MambaState
from .ssd_scan import SSDScan

__all__ = ["MambaMixer2"]


@CustomOp.register("mamba_mixer2")
class MambaMixer2(Mixer):
    """Mamba-2's layer: ``z, xBC, dt = in_proj(h)``; ``x, B, C = silu(conv(xBC))``; ``out_proj(norm(scan(x, ...), z))``.

    The scan is :class:`SSDScan`, the norm :class:`Mixer2RMSNormGated`. Requests, slots and guesses are as of
    :class:`CausalConv1d` and :class:`SelectiveScan`: prompts, steps and padding are one call, and a slot is read only
    where ``has_initial_state`` says so.

    Over ranks each holds ``heads / ranks`` heads and ``G / ranks`` groups, or all of the one group there is.

    Shapes:  hidden_states [S, H], [B, S, H], or packed [T, H] with cu_seqlens [R + 1] -> the same; mup_vector [rows of
             in_proj], of all ranks; conv_state [slots, >= K - 1, local (I + 2 G n)], ssm_state [slots, local heads, P, n],
             both or none; state_indices [R] or [R, W]; has_initial_state [R]; num_accepted_tokens [R].
    Dtypes:  fp32, fp16, bf16; every product, the convolution, the scan and the norm are rounded to it. A is fp32, whatever
             the mixer is cast to.
    Mutates: conv_state and ssm_state, the slots of this call.      Grad: native only, and none through states.
    Errors:  ValueError for shapes that do not fit, or an I that is not heads times head size; TensorParallelError where
             the ranks do not divide heads, or groups of which there are several.
    Source:  Dao and Gu 2024 (Mamba-2), arXiv 2405.21060.

    Args:
        hidden_size, ssm_state_size, conv_kernel_size, intermediate_size: H, n, K and I.
        use_conv_bias: of the convolution.
        use_bias: of in_proj and out_proj.
        n_groups, num_heads, head_dim: G, heads and P.
        rms_norm_eps: of the norm.
        activation: of the convolution, "silu".
        use_rms_norm: without it y is gated only.
        dt_limit: the least and the largest dt.
    """

    def __init__(
        self, hidden_size: int, ssm_state_size: int, conv_kernel_size: int, intermediate_size: int,
        use_conv_bias: bool, use_bias: bool, n_groups: int = 1, num_heads: int = 128, head_dim: int = 64,
        rms_norm_eps: float = 1e-5, activation: str = "silu", use_rms_norm: bool = True, *,
        dt_limit: tuple[float, float] = (0.0, math.inf), enforce_enable: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(enforce_enable=enforce_enable)
        if intermediate_size != num_heads * head_dim or num_heads % n_groups:
            raise ValueError(
                f"mamba_mixer2: intermediate_size is {intermediate_size}, which must be num_heads * head_dim ({num_heads} "
                f"* {head_dim}), and n_groups, {n_groups}, must divide num_heads."
            )
        self.tp = tensor_parallel()
        self.local_heads = self.tp.share(num_heads, "num_heads")
        if n_groups > 1 and n_groups % self.tp.size:
            raise TensorParallelError(
                f"n_groups is {n_groups}, which is neither one nor a multiple of {self.tp.size} tensor-parallel ranks."
            )
        self.local_groups = max(n_groups // self.tp.size, 1)
        self.head_dim, self.ssm_state_size, self.conv_kernel_size = head_dim, ssm_state_size, conv_kernel_size
        self.local_width = self.local_heads * head_dim
        inner, group = intermediate_size, n_groups * ssm_state_size
        local_group = self.local_groups * ssm_state_size
        # Rows of in_proj: z, x, B, C and dt, of all ranks and of this one. One group is on every rank.
        self.blocks = [(inner, self.local_width)] * 2 + [(group, local_group)] * 2 + [(num_heads, self.local_heads)]
        self.sizes = [self.local_width, local_group, local_group]
        self.conv_width = sum(self.sizes)
        self.in_proj = ReplicatedLinear(hidden_size, sum(local for _, local in self.blocks), use_bias, return_bias=False)
        self.conv_weight = frozen(torch.empty(self.conv_width, 1, conv_kernel_size))
        self.conv_bias = frozen(torch.zeros(self.conv_width)) if use_conv_bias else None
        self.conv1d = CausalConv1d(activation)
        self.A = frozen(torch.empty(self.local_heads, dtype=torch.float32))
        self.D = frozen(torch.ones(self.local_heads))
        self.dt_bias = frozen(torch.ones(self.local_heads))
        self.scan = SSDScan(dt_limit)
        self.norm = Mixer2RMSNormGated(inner, n_groups, use_rms_norm, rms_norm_eps)
        self.out_proj = RowParallelLinear(inner, hidden_size, bias=use_bias, return_bias=False)

    def forward_native(
        self, hidden_states: Tensor, mup_vector: Tensor | None = None, conv_state: Tensor | None = None,
        ssm_state: Tensor | None = None, state_indices: Tensor | None = None, has_initial_state: Tensor | None = None,
        cu_seqlens: Tensor | None = None, num_accepted_tokens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return self._run(
            native, hidden_states, mup_vector, conv_state, ssm_state, state_indices, has_initial_state, cu_seqlens,
            num_accepted_tokens,
        )  # fmt: skip

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(
        self, hidden_states: Tensor, mup_vector: Tensor | None = None, conv_state: Tensor | None = None,
        ssm_state: Tensor | None = None, state_indices: Tensor | None = None, has_initial_state: Tensor | None = None,
        cu_seqlens: Tensor | None = None, num_accepted_tokens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return self._run(
            dispatched, hidden_states, mup_vector, conv_state, ssm_state, state_indices, has_initial_state, cu_seqlens,
            num_accepted_tokens,
        )  # fmt: skip

    def _run(
        self, call: Callable[..., Any], hidden_states: Tensor, mup_vector: Tensor | None, conv_state: Tensor | None,
        ssm_state: Tensor | None, *requests: Any,
    ) -> Tensor:  # fmt: skip
        if (conv_state is None) != (ssm_state is None):
            raise ValueError(
                "mamba_mixer2 keeps two states; give conv_state and ssm_state, or neither (new_state makes both)."
            )
        projected = call(self.in_proj, hidden_states)
        if mup_vector is not None:
            projected = projected * self._own_rows(mup_vector.flatten()).to(projected.dtype)
        z, x, dt = projected.split([self.local_width, self.conv_width, self.local_heads], -1)
        x = call(self.conv1d, x, self.conv_weight, self.conv_bias, conv_state, *requests)
        x, b, c = x.split(self.sizes, -1)
        b, c = (t.unflatten(-1, (self.local_groups, self.ssm_state_size)) for t in (b, c))
        x = x.unflatten(-1, (self.local_heads, self.head_dim))
        y = call(self.scan, x, dt, self.A, b, c, self.D, self.dt_bias, ssm_state, *requests)
        return call(self.out_proj, call(self.norm, y.flatten(-2), z))

    def new_state(
        self, slots: int, speculative_tokens: int = 0, dtype: torch.dtype | None = None,
        ssm_dtype: torch.dtype | None = None,
    ) -> MambaState:  # fmt: skip
        """States of ``slots`` requests; ``dtype`` None means the weights', ``ssm_dtype`` None means fp32."""
        rows = self.conv_kernel_size - 1 + speculative_tokens
        recurrent = (self.local_heads, self.head_dim, self.ssm_state_size)
        return self._new_state(slots, rows, self.conv_width, recurrent, dtype, ssm_dtype)

    def _own_rows(self, t: Tensor, first: int = 0, last: int = 5) -> Tensor:
        """This rank's rows of a checkpoint's tensor that holds blocks ``first`` to ``last``."""
        blocks = self.blocks[first:last]
        if self.tp.size == 1 or t.shape[0] != sum(size for size, _ in blocks):
            return t  # another size than a checkpoint's is for the caller to refuse
        parts = []
        for part, (size, local) in zip(t.split([size for size, _ in blocks]), blocks, strict=True):
            begin = 0 if local == size else self.tp.rank * local
            parts.append(part[begin : begin + local])
        return torch.cat(parts)

    def _places(self) -> Iterator[tuple[str, Place]]:
        heads = slice(self.tp.rank * self.local_heads, (self.tp.rank + 1) * self.local_heads)
        local = slice(self.tp.rank * self.local_width, (self.tp.rank + 1) * self.local_width)
        yield "in_proj.weight", (self.in_proj.weight, self._own_rows)
        if self.in_proj.bias is not None:
            yield "in_proj.bias", (self.in_proj.bias, self._own_rows)
        yield "conv1d.weight", (self.conv_weight, lambda t: self._own_rows(t, 1, 4))
        if self.conv_bias is not None:
            yield "conv1d.bias", (self.conv_bias, lambda t: self._own_rows(t, 1, 4))
        yield "A_log", (self.A, lambda t: decay(t[heads]))
        yield "D", (self.D, lambda t: t[heads])
        yield "dt_bias", (self.dt_bias, lambda t: t[heads])
        if self.norm.weight is not None:
            yield "norm.weight", (self.norm.weight, lambda t: t[local])
        yield "out_proj.weight", (self.out_proj.weight, lambda t: t[:, local])
        if self.out_proj.bias is not None:
            yield "out_proj.bias", (self.out_proj.bias, whole)

    def extra_repr(self) -> str:
        return f"heads={self.local_heads}x{self.head_dim}, groups={self.local_groups}, states={self.ssm_state_size}"

    @classmethod
    def cases(cls) -> Iterator[Case]:
        # tokens, H, heads, P, G, n, norm, mup
        for lead, hidden, heads, size, groups, states, norm, mup, real in (
            ((512,), 768, 24, 64, 1, 128, True, False, True), ((64, 1), 768, 24, 64, 1, 128, True, False, True),
            ((1, 1), 768, 24, 64, 1, 128, True, False, True), ((2, 9), 8, 4, 6, 2, 16, True, True, False),
            ((3, 1), 7, 3, 5, 1, 3, False, False, False), ((0, 3), 4, 2, 8, 2, 8, True, False, False),
        ):  # fmt: skip
            old, conv = lead[-1] == 1, heads * size + 2 * groups * states
            sizes = {"T": torch.Size(lead).numel(), "H": hidden, "N": heads, "P": size, "G": groups, "n": states}
            yield Case(
                name=f"{'x'.join(map(str, lead))} H={hidden} N={heads} G={groups}{' mup' if mup else ''}"
                f"{' with states' if old else ''}",
                init=_init(hidden, heads, size, groups, states, norm), bench=real, prepare=prepare,
                dims={**sizes, "R": lead[0] if old else 0},
                args=lambda i, s=lead, h=hidden, c=conv, k=(heads, size, states), o=old, m=mup: (i.randn(*s, h),
                    i.randn(k[0] * k[1] + c + k[0], scale=0.2, shift=1.0) if m else None,
                    *((i.randn(s[0], 3, c), i.randn(s[0], *k), None, i.integers(1, 2, s[0]).bool()) if o else ())),
            )  # fmt: skip
        for guesses in (False, True):
            yield Case(
                name=f"packed, {'guesses' if guesses else 'one slot each'}", init=_init(8, 4, 8, 2, 16, True),
                dims={"T": 23, "H": 8, "N": 4, "P": 8, "G": 2, "n": 16, "R": 6}, prepare=prepare, args=_packed_of(guesses),
            )  # fmt: skip

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        tokens, hidden, heads, size, groups, states, kept = (case.dims[k] for k in "THNPGnR")
        inner = heads * size
        weights = hidden * (3 * inner + 2 * groups * states + heads)
        moved = weights + 2 * tokens * hidden + 2 * kept * inner * states
        return Cost(size_bytes=dtype.itemsize * moved, flops=tokens * (2 * weights + 4 * inner * states))


def _init(hidden: int, heads: int, size: int, groups: int, states: int, norm: bool) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "ssm_state_size": states, "conv_kernel_size": 4, "intermediate_size": heads * size,
        "use_conv_bias": True, "use_bias": not norm, "n_groups": groups, "num_heads": heads, "head_dim": size,
        "use_rms_norm": norm,
    }  # fmt: skip


def _packed_of(guesses: bool) -> Callable[..., Any]:
    def args(i: Any) -> tuple[Tensor | None, ...]:
        hidden, *rest = packed_hidden(i, guesses, 8, 4 * 8 + 2 * 2 * 16, (4, 8, 16))
        return (hidden, None, *rest)

    return args

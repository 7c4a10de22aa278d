"""The mixer of Mamba-1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost, Inputs
from ...core.custom_op import CustomOp
from ...core.parameters import frozen
from ...core.requires import requires
from ...distributed import tensor_parallel
from ..linear.column_parallel_linear import ColumnParallelLinear, MergedColumnParallelLinear
from ..linear.row_parallel_linear import RowParallelLinear
from ..norm.rms_norm import RMSNorm
from .causal_conv1d import CausalConv1d
from .mixer import Mixer, Place, decay, dispatched, native, whole
from .requests import MambaState
from .selective_scan import SelectiveScan, packed

__all__ = ["MambaMixer"]


@CustomOp.register("mamba_mixer")
class MambaMixer(Mixer):
    """Mamba-1's layer: ``x, z = in_proj(h)``; ``c = silu(conv(x))``; ``dt, B, C = x_proj(c)``; ``out_proj(scan(c, ...))``.

    The scan is :class:`SelectiveScan` with ``dt_proj(dt)``, its bias and the gate z. Falcon-Mamba and Jamba normalise
    dt, B and C before. Requests, slots and guesses are as of :class:`CausalConv1d` and :class:`SelectiveScan`: prompts,
    steps and padding are one call, and a slot is read only where ``has_initial_state`` says so.

    Over ranks each holds ``I / ranks`` channels: in_proj and dt_proj by columns, x_proj and out_proj by rows.

    Shapes:  hidden_states [S, H], [B, S, H], or packed [T, H] with cu_seqlens [R + 1] -> the same; conv_state
             [slots, >= K - 1, I / ranks], ssm_state [slots, I / ranks, n], both or none; state_indices [R] or [R, W];
             has_initial_state [R]; num_accepted_tokens [R].
    Dtypes:  fp32, fp16, bf16; every product and the convolution are rounded to it. A is fp32, whatever the mixer is cast to.
    Mutates: conv_state and ssm_state, the slots of this call.      Grad: native only, and none through states.
    Errors:  ValueError for shapes that do not fit; TensorParallelError where the ranks do not divide I.
    Source:  Gu and Dao 2023 (Mamba), arXiv 2312.00752; Zuo et al. 2024 (Falcon Mamba), arXiv 2410.05355; Lieber et al.
             2024 (Jamba), arXiv 2403.19887.

    Args:
        hidden_size, ssm_state_size, conv_kernel_size, intermediate_size, time_step_rank: H, n, K, I and the width of dt
            before dt_proj.
        use_conv_bias: of the convolution.
        use_bias: of in_proj and out_proj.
        use_rms_norm: normalise dt, B and C.
        rms_norm_has_weight, rms_norm_eps: of these norms.
        activation: of the convolution, "silu".
    """

    def __init__(
        self, hidden_size: int, ssm_state_size: int, conv_kernel_size: int, intermediate_size: int, time_step_rank: int,
        use_conv_bias: bool, use_bias: bool, use_rms_norm: bool, rms_norm_has_weight: bool = True,
        rms_norm_eps: float = 1e-5, activation: str = "silu", *, enforce_enable: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(enforce_enable=enforce_enable)
        self.tp = tensor_parallel()
        self.local_width = self.tp.share(intermediate_size, "intermediate_size")
        self.ssm_state_size, self.conv_kernel_size = ssm_state_size, conv_kernel_size
        self.sizes = [time_step_rank, ssm_state_size, ssm_state_size]
        self.in_proj = MergedColumnParallelLinear(
            hidden_size, [intermediate_size] * 2, bias=use_bias, return_bias=False
        )
        self.conv_weight = frozen(torch.empty(self.local_width, 1, conv_kernel_size))
        self.conv_bias = frozen(torch.zeros(self.local_width)) if use_conv_bias else None
        self.conv1d = CausalConv1d(activation)
        self.x_proj = RowParallelLinear(intermediate_size, sum(self.sizes), bias=False, return_bias=False)
        # The scan adds its bias, in fp32.
        self.dt_proj = ColumnParallelLinear(
            time_step_rank, intermediate_size, bias=True, skip_bias_add=True, return_bias=False
        )
        names = ("dt_layernorm", "b_layernorm", "c_layernorm") if use_rms_norm else ()
        self.norms = names
        for name, size in zip(names, self.sizes, strict=False):
            setattr(self, name, RMSNorm(size, rms_norm_eps, has_weight=rms_norm_has_weight))
        self.A = frozen(torch.empty(self.local_width, ssm_state_size, dtype=torch.float32))
        self.D = frozen(torch.ones(self.local_width))
        self.scan = SelectiveScan()
        self.out_proj = RowParallelLinear(intermediate_size, hidden_size, bias=use_bias, return_bias=False)

    def forward_native(
        self, hidden_states: Tensor, conv_state: Tensor | None = None, ssm_state: Tensor | None = None,
        state_indices: Tensor | None = None, has_initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None,
        num_accepted_tokens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return self._run(
            native, hidden_states, conv_state, ssm_state, state_indices, has_initial_state, cu_seqlens,
            num_accepted_tokens,
        )  # fmt: skip

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(
        self, hidden_states: Tensor, conv_state: Tensor | None = None, ssm_state: Tensor | None = None,
        state_indices: Tensor | None = None, has_initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None,
        num_accepted_tokens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return self._run(
            dispatched, hidden_states, conv_state, ssm_state, state_indices, has_initial_state, cu_seqlens,
            num_accepted_tokens,
        )  # fmt: skip

    def _run(
        self, call: Callable[..., Any], hidden_states: Tensor, conv_state: Tensor | None, ssm_state: Tensor | None,
        state_indices: Tensor | None, has_initial_state: Tensor | None, cu_seqlens: Tensor | None,
        num_accepted_tokens: Tensor | None,
    ) -> Tensor:  # fmt: skip
        if (conv_state is None) != (ssm_state is None):
            raise ValueError("mamba_mixer keeps two states; give conv_state and ssm_state, or neither (new_state makes both).")
        requests = (state_indices, has_initial_state, cu_seqlens, num_accepted_tokens)
        x, z = call(self.in_proj, hidden_states).chunk(2, -1)
        x = call(self.conv1d, x, self.conv_weight, self.conv_bias, conv_state, *requests)
        parts = call(self.x_proj, x).split(self.sizes, -1)
        if self.norms:
            parts = [call(getattr(self, name), part) for name, part in zip(self.norms, parts, strict=True)]
        dt, b, c = parts
        dt = call(self.dt_proj, dt)
        y = call(self.scan, x, dt, self.A, b, c, self.D, z, self.dt_proj.bias, ssm_state, *requests)
        return call(self.out_proj, y)

    def new_state(
        self, slots: int, speculative_tokens: int = 0, dtype: torch.dtype | None = None,
        ssm_dtype: torch.dtype | None = None,
    ) -> MambaState:  # fmt: skip
        """States of ``slots`` requests; ``dtype`` None means the weights', ``ssm_dtype`` None means fp32."""
        rows = self.conv_kernel_size - 1 + speculative_tokens
        recurrent = (self.local_width, self.ssm_state_size)
        return self._new_state(slots, rows, self.local_width, recurrent, dtype, ssm_dtype)

    def _places(self) -> Iterator[tuple[str, Place]]:
        local = slice(self.tp.rank * self.local_width, (self.tp.rank + 1) * self.local_width)

        def rows(t: Tensor) -> Tensor:
            return t[local]

        def both(t: Tensor) -> Tensor:
            x, z = t.chunk(2)
            return torch.cat([x[local], z[local]])

        def columns(t: Tensor) -> Tensor:
            return t[:, local]

        yield "in_proj.weight", (self.in_proj.weight, both)
        if self.in_proj.bias is not None:
            yield "in_proj.bias", (self.in_proj.bias, both)
        yield "conv1d.weight", (self.conv_weight, rows)
        if self.conv_bias is not None:
            yield "conv1d.bias", (self.conv_bias, rows)
        yield "x_proj.weight", (self.x_proj.weight, columns)
        yield "dt_proj.weight", (self.dt_proj.weight, rows)
        yield "dt_proj.bias", (self.dt_proj.bias, rows)
        for name in self.norms:
            if getattr(self, name).weight is not None:
                yield f"{name}.weight", (getattr(self, name).weight, whole)
        yield "A_log", (self.A, lambda t: decay(t[local]))
        yield "D", (self.D, rows)
        yield "out_proj.weight", (self.out_proj.weight, columns)
        if self.out_proj.bias is not None:
            yield "out_proj.bias", (self.out_proj.bias, whole)

    def extra_repr(self) -> str:
        return f"width={self.local_width}, states={self.ssm_state_size}, norms={bool(self.norms)}"

    @classmethod
    def cases(cls) -> Iterator[Case]:
        # tokens, H, I, n, rank of dt, norms, bias
        for lead, hidden, width, states, rank, norms, bias, real in (
            ((512,), 768, 1536, 16, 48, False, False, True), ((64, 1), 768, 1536, 16, 48, False, False, True),
            ((1, 1), 768, 1536, 16, 48, False, False, True), ((2, 9), 8, 16, 4, 3, True, False, False),
            ((3, 1), 7, 5, 3, 1, False, True, False), ((0, 3), 4, 8, 4, 2, True, True, False),
        ):  # fmt: skip
            old = lead[-1] == 1
            sizes = {"T": torch.Size(lead).numel(), "H": hidden, "I": width, "n": states, "rho": rank}
            yield Case(
                name=f"{'x'.join(map(str, lead))} H={hidden} I={width}{' norms' if norms else ''}{' with states' if old else ''}",
                init=_init(hidden, width, states, rank, norms, bias), bench=real,
                dims={**sizes, "R": lead[0] if old else 0}, prepare=prepare,
                args=lambda i, s=lead, k=(hidden, width, states), o=old: (i.randn(*s, k[0]),
                    *((i.randn(s[0], 3, k[1]), i.randn(s[0], *k[1:]), None, i.integers(1, 2, s[0]).bool()) if o else ())),
            )  # fmt: skip
        for guesses in (False, True):
            yield Case(
                name=f"packed, {'guesses' if guesses else 'one slot each'}", init=_init(8, 20, 16, 3, True, True),
                dims={"T": 23, "H": 8, "I": 20, "n": 16, "rho": 3, "R": 6}, prepare=prepare,
                args=lambda i, g=guesses: packed_hidden(i, g, 8, 20, (20, 16)),
            )  # fmt: skip

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        tokens, hidden, width, states, rank, kept = (case.dims[k] for k in ("T", "H", "I", "n", "rho", "R"))
        weights = width * (3 * hidden + 2 * rank + 2 * states)
        moved = weights + 2 * tokens * hidden + 2 * kept * width * (states + 3)
        return Cost(size_bytes=dtype.itemsize * moved, flops=tokens * (2 * weights + 6 * width * states))


def _init(hidden: int, width: int, states: int, rank: int, norms: bool, bias: bool) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "ssm_state_size": states, "conv_kernel_size": 4, "intermediate_size": width,
        "time_step_rank": rank, "use_conv_bias": True, "use_bias": bias, "use_rms_norm": norms,
    }  # fmt: skip


def prepare(op: Any, inputs: Inputs) -> None:
    """Weights that keep the products near one, and decays around one half."""
    for name, parameter in op.named_parameters():
        shape = parameter.shape
        if name == "A":
            parameter.data = (-0.1 - inputs.randn(*shape, scale=0.5).abs()).float()
        elif parameter.dim() == 1:
            parameter.data = inputs.randn(*shape, scale=0.2, shift=1.0 if "norm" in name or name == "D" else 0.0)
        else:
            parameter.data = inputs.randn(*shape, scale=shape[-1] ** -0.5)


def packed_hidden(
    i: Inputs, guesses: bool, hidden: int, channels: int, recurrent: tuple[int, ...] | None
) -> tuple[Tensor | None, ...]:
    """A mixer's arguments for the requests of ``selective_scan.packed``; no recurrent state for None."""
    state, *requests = packed(i, guesses, recurrent or ())
    states = (i.randn(20, 3 + 2 * guesses, channels), *([] if recurrent is None else [state]))
    return (i.randn(23, hidden), *states, *requests)

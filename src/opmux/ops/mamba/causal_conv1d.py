"""The causal depthwise convolution of state-space mixers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost, Inputs, Tolerance
from ...core.custom_op import CustomOp
from ...core.numerics import wide
from ...core.requires import requires
from . import kernels_cpu
from .requests import Requests

__all__ = ["CausalConv1d"]


@CustomOp.register("causal_conv1d")
class CausalConv1d(CustomOp):
    """``y[t] = act(bias + sum_j weight[:, j] * x[t - (K - 1) + j])`` for every channel of every request.

    What lies before a request's first token comes from its slot of ``conv_state``, and is zero without one. Prompts and
    single tokens are one call. Afterwards the slot holds the request's last K - 1 inputs.

    With ``num_accepted_tokens`` a request's tokens are guesses of which some may be dropped later. A slot then has room
    for more inputs (K - 1 + guesses): it keeps the last K - 2 inputs and those of all n tokens, if they fit, and the
    next call starts its window at ``num_accepted_tokens - 1``.

    Shapes:  x [S, D], [B, S, D], or packed [T, D] with cu_seqlens [R + 1] -> x's; weight [D, K] or [D, 1, K]; bias [D];
             conv_state [slots, >= K - 1, D], any strides; state_indices [R] or [R, W] (of which the first counts), slots
             outside the state are padding; has_initial_state [R], None means no request has one; num_accepted_tokens [R].
    Dtypes:  fp32, fp16, bf16 for each of x, weight and bias, and the state; computed in fp32, rounded once to x's dtype.
             The state keeps x's values in its own dtype.
    Mutates: conv_state, the slots of this call.      Grad: native only, and none through the state.
    Rows of padding and rows behind the last request are zero.
    Errors:  ValueError for shapes that do not fit, or an unknown activation.
    Source:  Gu and Dao 2023 (Mamba), arXiv 2312.00752.

    Args:
        activation: "silu" (or "swish"), or None.
    """

    mutates = ("conv_state",)
    # The sum of K products may cancel.
    tolerance = Tolerance(ulp=1.0, fp32=16.0, scale=1.0)

    def __init__(self, activation: str | None = "silu", *, enforce_enable: bool = False) -> None:
        super().__init__(enforce_enable=enforce_enable)
        if activation not in (None, "silu", "swish"):
            raise ValueError(f"activation is {activation!r}; causal_conv1d knows 'silu', 'swish' and None.")
        self.activation = activation

    def forward_native(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, conv_state: Tensor | None = None,
        state_indices: Tensor | None = None, has_initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None,
        num_accepted_tokens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        requests = self._check(
            x, weight, bias, conv_state, state_indices, has_initial_state, cu_seqlens, num_accepted_tokens
        )
        rows = wide(x.flatten(0, -2))
        width, kernel = weight.shape[0], weight.shape[-1]
        taps = weight.view(width, kernel).to(rows.dtype).t()
        parts = []
        at = 0
        for start, end, (slot, *_), fresh, accepted in requests:
            parts.append(rows.new_zeros(start - at, width))
            at, n, first = end, end - start, max(accepted, 1) - 1
            before = rows.new_zeros(kernel - 1, width)
            if conv_state is not None and not fresh:
                before = conv_state[slot, first : first + kernel - 1].to(rows.dtype)
            history = torch.cat([before, rows[start:end]])
            parts.append(sum((history[j : j + n] * taps[j] for j in range(kernel)), rows.new_zeros(n, width)))
            if conv_state is not None and (n or fresh):
                keep = kernel - 1
                if num_accepted_tokens is not None and keep - 1 + n <= conv_state.shape[1]:
                    keep = max(keep, keep - 1 + n)
                conv_state[slot, :keep] = history[history.shape[0] - keep :].detach().to(conv_state.dtype)
            parts[-1] = self._activated(parts[-1] if bias is None else parts[-1] + bias.to(rows.dtype))
        parts.append(rows.new_zeros(rows.shape[0] - at, width))
        return torch.cat(parts).view(x.shape).to(x.dtype)

    def _activated(self, y: Tensor) -> Tensor:
        return y if self.activation is None else y * torch.sigmoid(y)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, conv_state: Tensor | None = None,
        state_indices: Tensor | None = None, has_initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None,
        num_accepted_tokens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        requests = self._check(
            x, weight, bias, conv_state, state_indices, has_initial_state, cu_seqlens, num_accepted_tokens
        )
        return kernels_cpu.causal_conv1d_cpu(
            x, weight, bias, conv_state, *requests.loop_arguments(x.device), self.activation is not None
        )

    def _check(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor | None, state_indices: Tensor | None,
        has_initial_state: Tensor | None, cu_seqlens: Tensor | None, num_accepted_tokens: Tensor | None,
    ) -> Requests:  # fmt: skip
        width = x.shape[-1]
        kernel = weight.shape[-1]
        fits = weight.numel() == width * kernel and weight.shape[0] == width and kernel > 0
        if not fits or (bias is not None and bias.shape != (width,)):
            raise ValueError(
                f"causal_conv1d takes x [..., D], weight [D, K] and bias [D]; x is {tuple(x.shape)}, weight "
                f"{tuple(weight.shape)}, bias {None if bias is None else tuple(bias.shape)}."
            )
        if conv_state is not None and (
            conv_state.dim() != 3 or conv_state.shape[1] < kernel - 1 or conv_state.shape[2] != width
        ):
            raise ValueError(
                f"causal_conv1d keeps a state [slots, at least {kernel - 1}, {width}]; it got "
                f"{tuple(conv_state.shape)}."
            )
        return Requests(
            self.name, x.shape[:-1], cu_seqlens, conv_state, state_indices, has_initial_state, num_accepted_tokens
        )

    @classmethod
    def cases(cls) -> Iterator[Case]:
        for name, lead, width, kernel, real in (
            ("1x2048 D=1536 K=4", (2048,), 1536, 4, True),
            ("1x8192 D=8192 K=4", (8192,), 8192, 4, True),
            ("2x7 D=65 K=3", (2, 7), 65, 3, False),
            ("3x1 D=1 K=1", (3, 1), 1, 1, False),
            ("0x5 D=8 K=4", (0, 5), 8, 4, False),
        ):
            yield Case(
                name=name, init={}, bench=real, dims={"T": torch.Size(lead).numel(), "D": width, "K": kernel},
                args=lambda i, s=lead, d=width, k=kernel: (i.randn(*s, d), i.randn(d, k, scale=0.5), i.randn(d)),
            )  # fmt: skip
        for tokens, width, real in ((1, 1536, True), (64, 8192, True), (5, 33, False)):
            yield Case(
                name=f"{tokens}x1 D={width} K=4 with states", init={}, bench=real,
                dims={"T": tokens, "D": width, "K": 4, "R": tokens},
                args=lambda i, b=tokens, d=width: (
                    i.randn(b, 1, d), i.randn(d, 4, scale=0.5), i.randn(d), i.randn(b, 3, d), None,
                    i.integers(1, 2, b).bool(),
                ),
            )  # fmt: skip
        for activation, guesses in (("silu", 0), (None, 2)):
            yield Case(
                name=f"packed, act={activation}, guesses={guesses}", init={"activation": activation},
                dims={"T": 23, "D": 40, "K": 4, "R": 6},
                args=lambda i, g=guesses: (*_packed(i, g),),
            )  # fmt: skip

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        tokens, width, kernel = (case.dims[k] for k in "TDK")
        moved = 2 * tokens * width + (kernel + 1) * width + 2 * case.dims.get("R", 0) * (kernel - 1) * width
        return Cost(size_bytes=dtype.itemsize * moved, flops=2 * tokens * width * kernel)


def _packed(i: Inputs, guesses: int) -> tuple[Tensor | None, ...]:
    """Six requests of 8, 0, 1, 3, 7 and 1 tokens in 23 rows: old, empty, one token, padding, new; three rows of nobody."""
    cu = torch.tensor([0, 8, 8, 9, 12, 19, 20], device=i.device)
    indices = torch.tensor([6, 2, 0, -1, 4, 3], device=i.device)
    old = torch.tensor([True, True, True, True, False, True], device=i.device)
    accepted = torch.tensor([1, 1, 2, 1, 1, 3], device=i.device) if guesses else None
    state = i.randn(8, 3 + guesses, 40)
    return i.randn(23, 40), i.randn(40, 1, 4, scale=0.5), i.randn(40), state, indices, old, cu, accepted

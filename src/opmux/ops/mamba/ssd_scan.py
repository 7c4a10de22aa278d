"""The scan of Mamba-2: one decay for each head (state space duality, SSD)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost, Inputs, Tolerance
from ...core.custom_op import CustomOp
from ...core.numerics import wide
from ...core.requires import requires
from . import kernels_cpu
from .requests import Requests
from .selective_scan import keep, of_requests, packed, start_of

__all__ = ["SSDScan"]


@CustomOp.register("ssd_scan")
class SSDScan(CustomOp):
    """A recurrence for every head h: ``S <- exp(dt_h A_h) S + dt_h x_h (outer) B_g``, ``y_h = S C_g + D_h x_h``.

    dt is ``softplus(dt + dt_bias)``, clamped to ``dt_limit``; head h reads group ``h * G // heads`` of B and C. States
    and requests are as of :class:`SelectiveScan`: prompts and single tokens are one call.

    The Triton kernel computes a chunk of tokens at a time by matrix products, which gives the recurrence's answer; a
    chunk begins where its request does, so its size is no matter of the result.

    Shapes:  x [S, N, P], [B, S, N, P], or packed [T, N, P] with cu_seqlens [R + 1] -> x's; dt [..., N]; A, D, dt_bias [N];
             B, C [..., G, n]; ssm_state [slots, N, P, n], dense in the last three; state_indices [R] or [R, W], slots
             outside the state are padding; has_initial_state [R], None means no request has one;
             num_accepted_tokens [R].
    Dtypes:  fp32, fp16, bf16 for each tensor; fp32 inside and rounded once to x's dtype, or the state's. The matrix
             products of 16-bit inputs take their factors in x's dtype and sum in fp32.
    Mutates: ssm_state, the slots of this call.      Grad: native only, and none through the state.
    Rows of padding and rows behind the last request are zero.
    Errors:  ValueError for shapes that do not fit, or heads that no multiple of the groups are.
    Source:  Dao and Gu 2024 (Mamba-2), arXiv 2405.21060.

    Args:
        dt_limit: the least and the largest dt.
    """

    mutates = ("ssm_state",)
    # In 16 bits the chunk's products round their factors: dt x, the decayed scores, and the state that meets C.
    tolerance = Tolerance(ulp=6.0, fp32=128.0, scale=1.0)

    def __init__(self, dt_limit: tuple[float, float] = (0.0, math.inf), *, enforce_enable: bool = False) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.dt_limit = (float(dt_limit[0]), float(dt_limit[1]))

    def forward_native(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
        dt_bias: Tensor | None = None, ssm_state: Tensor | None = None, state_indices: Tensor | None = None,
        has_initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None,
        num_accepted_tokens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        requests = self._check(
            x, dt, A, B, C, D, dt_bias, ssm_state, state_indices, has_initial_state, cu_seqlens, num_accepted_tokens
        )
        heads, size = x.shape[-2:]
        per_group = heads // B.shape[-2] if B.shape[-2] else 1
        u = wide(x.flatten(0, -3))
        b, c = (t.flatten(0, -3).to(u.dtype).repeat_interleave(per_group, 1) for t in (B, C))
        step = dt.flatten(0, -2).to(u.dtype)
        step = F.softplus(step if dt_bias is None else step + dt_bias.to(u.dtype)).clamp(*self.dt_limit)
        decay = torch.exp(step * A.to(u.dtype))
        nothing = u.new_zeros(heads, size)
        rows: list[Tensor] = []
        for request in requests:
            rows += [nothing] * (request.start - len(rows))
            h = start_of(request, ssm_state, u.new_zeros(heads, size, B.shape[-1]))
            for t in range(request.start, request.end):
                h = decay[t, :, None, None] * h + (step[t, :, None] * u[t])[:, :, None] * b[t][:, None, :]
                rows.append((h @ c[t][:, :, None]).squeeze(-1))
                keep(request, ssm_state, t, h)
            if request.start == request.end:
                keep(request, ssm_state, request.end - 1, h)
        rows += [nothing] * (u.shape[0] - len(rows))
        y = torch.stack(rows) if rows else u
        if D is not None:
            y = y + D.to(u.dtype)[:, None] * u * of_requests(requests, u)[:, :, None]
        return y.view(x.shape).to(x.dtype)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
        dt_bias: Tensor | None = None, ssm_state: Tensor | None = None, state_indices: Tensor | None = None,
        has_initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None,
        num_accepted_tokens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        requests = self._check(
            x, dt, A, B, C, D, dt_bias, ssm_state, state_indices, has_initial_state, cu_seqlens, num_accepted_tokens
        )
        return kernels_cpu.ssd_scan_cpu(
            x, dt, A, B, C, D, dt_bias, ssm_state, *requests.loop_arguments(x.device), *self.dt_limit
        )

    def _check(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, dt_bias: Tensor | None,
        ssm_state: Tensor | None, state_indices: Tensor | None, has_initial_state: Tensor | None,
        cu_seqlens: Tensor | None, num_accepted_tokens: Tensor | None,
    ) -> Requests:  # fmt: skip
        heads, size = x.shape[-2:] if x.dim() > 2 else (-1, -1)
        groups, states = B.shape[-2:] if B.dim() > 2 else (0, -1)
        fits = dt.shape == x.shape[:-1] and B.shape == C.shape == (*x.shape[:-2], groups, states)
        fits = fits and all(t is None or t.shape == (heads,) for t in (A, D, dt_bias))
        if not fits or groups < 1 or heads % groups:
            got = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "dt_bias": dt_bias}
            raise ValueError(
                "ssd_scan takes x [..., N, P], dt [..., N], B, C [..., G, n], A, D, dt_bias [N], N a multiple of G; it "
                "got " + ", ".join(f"{k} {tuple(t.shape)}" for k, t in got.items() if t is not None)
            )
        if ssm_state is not None and ssm_state.shape[1:] != (heads, size, states):
            raise ValueError(
                f"ssd_scan keeps a state [slots, {heads}, {size}, {states}]; it got {tuple(ssm_state.shape)}."
            )
        return Requests(
            self.name, x.shape[:-2], cu_seqlens, ssm_state, state_indices, has_initial_state, num_accepted_tokens
        )

    def extra_repr(self) -> str:
        return f"dt_limit={self.dt_limit}"

    @classmethod
    def cases(cls) -> Iterator[Case]:
        # leading sizes, heads, head size, groups, state
        for lead, heads, size, groups, states, real in (
            ((512,), 24, 64, 1, 128, True), ((8192,), 128, 64, 8, 128, True), ((64, 1), 128, 64, 8, 128, True),
            ((1, 1), 24, 64, 1, 128, True), ((2, 70), 4, 16, 2, 16, False), ((3, 1), 3, 5, 1, 3, False),
            ((19,), 2, 64, 1, 33, False), ((0, 3), 2, 8, 1, 8, False),
        ):  # fmt: skip
            with_state = lead[-1] == 1
            dims = {"T": torch.Size(lead).numel(), "N": heads, "P": size, "G": groups, "n": states}
            yield Case(
                name=f"{'x'.join(map(str, lead))} N={heads} P={size} G={groups} n={states}"
                f"{' with states' if with_state else ''}",
                init={}, bench=real, dims={**dims, "R": lead[0] if with_state else 0},
                args=lambda i, s=lead, k=(heads, size, groups, states), w=with_state: (*ssd_arguments(i, s, *k),
                    *((i.randn(s[0], k[0], k[1], k[3]), None, i.integers(1, 2, s[0]).bool()) if w else ())),
            )  # fmt: skip
        for guesses in (False, True):
            yield Case(
                name=f"packed, {'guesses' if guesses else 'one slot each'}",
                init={"dt_limit": (0.4, 0.9)} if guesses else {},
                dims={"T": 23, "N": 4, "P": 8, "G": 2, "n": 16, "R": 6},
                args=lambda i, g=guesses: (*ssd_arguments(i, (23,), 4, 8, 2, 16), *packed(i, g, (4, 8, 16))),
            )  # fmt: skip

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        tokens, heads, size, groups, states, kept = (case.dims[k] for k in "TNPGnR")
        moved = tokens * (2 * heads * size + 2 * groups * states + heads) + 2 * kept * heads * size * states
        return Cost(size_bytes=dtype.itemsize * moved, flops=4 * tokens * heads * size * states)


def ssd_arguments(
    i: Inputs, lead: tuple[int, ...], heads: int, size: int, groups: int, states: int
) -> tuple[Tensor, ...]:
    """x, dt, A, B, C, D, dt_bias with decays around one half."""
    inputs = (i.randn(*lead, heads, size), i.randn(*lead, heads, scale=0.5), -0.1 - i.randn(heads).abs())
    more = (i.randn(*lead, groups, states), i.randn(*lead, groups, states, shift=0.1))
    return (*inputs, *more, i.randn(heads, shift=0.5), i.randn(heads, scale=0.1))

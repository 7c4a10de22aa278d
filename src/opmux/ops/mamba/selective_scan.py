"""The selective scan of Mamba-1."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost, Inputs, Tolerance
from ...core.custom_op import CustomOp
from ...core.numerics import wide
from ...core.requires import requires
from . import kernels_cpu
from .requests import Request, Requests

__all__ = ["SelectiveScan"]


@CustomOp.register("selective_scan")
class SelectiveScan(CustomOp):
    """A recurrence for every channel d and state index n: ``h <- exp(dt_d A_dn) h + dt_d B_n x_d``, ``y_d = sum_n C_n h_dn``.

    dt is ``softplus(dt + dt_bias)``; ``D_d x_d`` is added to y, and y is multiplied by ``silu(z)``, where they are given.
    Prompts and single tokens are one call. The recurrence starts from a request's slot of ``ssm_state``, or from zero,
    and leaves its last state there. With ``state_indices`` [R, W] and at most W tokens the state after token t goes to
    slot ``state_indices[r, t]``, and the start is read from ``state_indices[r, num_accepted_tokens - 1]``: a step whose
    tokens are guesses.

    Shapes:  x, dt, z [S, I], [B, S, I], or packed [T, I] with cu_seqlens [R + 1] -> x's; A [I, n]; B, C x's, with n for I;
             D, dt_bias [I]; ssm_state [slots, I, n], dense in the last two; state_indices [R] or [R, W], slots outside
             the state are padding; has_initial_state [R], None means no request has one; num_accepted_tokens [R].
    Dtypes:  fp32, fp16, bf16 for each tensor; everything is fp32 inside and rounded once to x's dtype, or the state's.
    Mutates: ssm_state, the slots of this call.      Grad: native only, and none through the state.
    Rows of padding and rows behind the last request are zero.
    Errors:  ValueError for shapes that do not fit.
    Source:  Gu and Dao 2023 (Mamba), arXiv 2312.00752.
    """

    mutates = ("ssm_state",)
    # Sums of n products after a recurrence, whose rounding errors add up while h forgets slowly.
    tolerance = Tolerance(ulp=1.5, fp32=64.0, scale=1.0)

    def __init__(self, *, enforce_enable: bool = False) -> None:
        super().__init__(enforce_enable=enforce_enable)

    def forward_native(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
        dt_bias: Tensor | None = None, ssm_state: Tensor | None = None, state_indices: Tensor | None = None,
        has_initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None,
        num_accepted_tokens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        requests = self._check(
            x, dt, A, B, C, D, z, dt_bias, ssm_state, state_indices, has_initial_state, cu_seqlens, num_accepted_tokens
        )
        u, step, b, c = (wide(t.flatten(0, -2)) for t in (x, dt, B, C))
        step = F.softplus(step if dt_bias is None else step + dt_bias.to(step.dtype))
        a = A.to(u.dtype)
        rows: list[Tensor] = []
        for request in requests:
            rows += [u.new_zeros(u.shape[1])] * (request.start - len(rows))
            h = start_of(request, ssm_state, u.new_zeros(a.shape))
            for t in range(request.start, request.end):
                h = torch.exp(step[t, :, None] * a) * h + (step[t] * u[t])[:, None] * b[t]
                rows.append(h @ c[t])
                keep(request, ssm_state, t, h)
            if request.start == request.end:
                keep(request, ssm_state, request.end - 1, h)
        rows += [u.new_zeros(u.shape[1])] * (u.shape[0] - len(rows))
        y = torch.stack(rows) if rows else u
        if D is not None:
            y = y + D.to(u.dtype) * u * of_requests(requests, u)
        if z is not None:
            gate = wide(z.flatten(0, -2))
            y = y * (gate * torch.sigmoid(gate))
        return y.view(x.shape).to(x.dtype)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
        dt_bias: Tensor | None = None, ssm_state: Tensor | None = None, state_indices: Tensor | None = None,
        has_initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None,
        num_accepted_tokens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        requests = self._check(
            x, dt, A, B, C, D, z, dt_bias, ssm_state, state_indices, has_initial_state, cu_seqlens, num_accepted_tokens
        )
        return kernels_cpu.selective_scan_cpu(
            x, dt, A, B, C, D, z, dt_bias, ssm_state, *requests.loop_arguments(x.device)
        )

    def _check(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
        dt_bias: Tensor | None, ssm_state: Tensor | None, state_indices: Tensor | None,
        has_initial_state: Tensor | None, cu_seqlens: Tensor | None, num_accepted_tokens: Tensor | None,
    ) -> Requests:  # fmt: skip
        width, states = A.shape if A.dim() == 2 else (-1, -1)
        vectors = all(t is None or t.shape == (width,) for t in (D, dt_bias))
        alike = x.shape[-1] == width and dt.shape == x.shape and (z is None or z.shape == x.shape)
        if not (vectors and alike and B.shape == C.shape == (*x.shape[:-1], states)):
            got = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
            raise ValueError(
                "selective_scan takes x, dt, z [..., I], A [I, n], B, C [..., n], D, dt_bias [I]; it got "
                + ", ".join(f"{k} {tuple(t.shape)}" for k, t in got.items() if t is not None)
            )
        if ssm_state is not None and ssm_state.shape[1:] != A.shape:
            raise ValueError(
                f"selective_scan keeps a state [slots, {width}, {states}]; it got {tuple(ssm_state.shape)}."
            )
        return Requests(
            self.name, x.shape[:-1], cu_seqlens, ssm_state, state_indices, has_initial_state, num_accepted_tokens
        )

    @classmethod
    def cases(cls) -> Iterator[Case]:
        for lead, width, states, real in (
            ((512,), 1536, 16, True), ((2048,), 8192, 16, True), ((64, 1), 8192, 16, True), ((1, 1), 1536, 16, True),
            ((2, 7), 33, 16, False), ((3, 1), 5, 3, False), ((19,), 65, 1, False), ((0, 3), 4, 8, False),
        ):  # fmt: skip
            with_state = lead[-1] == 1
            yield Case(
                name=f"{'x'.join(map(str, lead))} I={width} n={states}{' with states' if with_state else ''}",
                init={}, bench=real,
                dims={"T": torch.Size(lead).numel(), "I": width, "n": states, "R": lead[0] if with_state else 0},
                args=lambda i, s=lead, d=width, n=states, w=with_state: (*scan_arguments(i, s, d, n),
                    *((i.randn(s[0], d, n), None, i.integers(1, 2, s[0]).bool()) if w else ())),
            )  # fmt: skip
        for guesses in (False, True):
            yield Case(
                name=f"packed, {'guesses' if guesses else 'one slot each'}", init={},
                dims={"T": 23, "I": 20, "n": 16, "R": 6},
                args=lambda i, g=guesses: (*scan_arguments(i, (23,), 20, 16), *packed(i, g, (20, 16))),
            )  # fmt: skip

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        tokens, width, states, kept = (case.dims[k] for k in "TInR")
        moved = tokens * (4 * width + 2 * states) + 2 * kept * width * states
        return Cost(size_bytes=dtype.itemsize * moved + 4 * width * states, flops=6 * tokens * width * states)


def start_of(request: Request, state: Tensor | None, zeros: Tensor) -> Tensor:
    """The state that a request starts from, in the dtype of ``zeros``."""
    if state is None or request.fresh:
        return zeros
    return state[request.slots[max(request.accepted, 1) - 1]].to(zeros.dtype)


def keep(request: Request, state: Tensor | None, t: int, h: Tensor) -> None:
    """Write the state after row t where it belongs: a slot for each token, or one for the last."""
    if state is None:
        return
    n, slots = request.end - request.start, request.slots
    if len(slots) > 1 and 0 < n <= len(slots):
        slot = slots[t - request.start]
    elif t == request.end - 1:
        slot = slots[0]
    else:
        return
    if 0 <= slot < state.shape[0]:
        state[slot] = h.detach().to(state.dtype)


def of_requests(requests: Requests, like: Tensor) -> Tensor:
    """[T, 1]: 1 for rows of requests, 0 for padding and rows of nobody."""
    rows = like.new_zeros(like.shape[0], 1)
    for request in requests:
        rows[request.start : request.end] = 1
    return rows


def scan_arguments(i: Inputs, lead: tuple[int, ...], width: int, states: int) -> tuple[Tensor, ...]:
    """x, dt, A, B, C, D, z, dt_bias with decays around one half."""
    a = -0.1 - i.randn(width, states, scale=0.5).abs()
    inputs = (i.randn(*lead, width), i.randn(*lead, width, scale=0.5), a)
    more = (i.randn(*lead, states), i.randn(*lead, states, shift=0.1), i.randn(width))
    return (*inputs, *more, i.randn(*lead, width, scale=0.9), i.randn(width, scale=0.1))


def packed(i: Inputs, guesses: bool, shape: tuple[int, ...]) -> tuple[Tensor | None, ...]:
    """State and request arguments of six requests of 8, 0, 1, 3 (padding), 7 (new) and 1 tokens in 23 rows."""
    cu = torch.tensor([0, 8, 8, 9, 12, 19, 20], device=i.device)
    indices = torch.tensor([6, 2, 0, -1, 4, 3], device=i.device)
    if guesses:
        spare = torch.tensor([[7, 8, 9], [-1, 10, -1], [11, 12, 1], [5, 5, 5], [13, 14, 15], [16, 17, 18]])
        indices = torch.cat([indices[:, None], spare.to(i.device)], 1)
    old = torch.tensor([True, True, True, True, False, True], device=i.device)
    accepted = torch.tensor([1, 1, 2, 1, 1, 3], device=i.device) if guesses else None
    return i.randn(20, *shape), indices, old, cu, accepted

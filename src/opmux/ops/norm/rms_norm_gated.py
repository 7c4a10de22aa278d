"""RMS norm with a gate, over groups."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost, Inputs, Tolerance
from ...core.custom_op import CustomOp
from ...core.lazy import lazy_module
from ...core.numerics import wide
from ...core.parameters import copy_checked, frozen
from ...core.requires import requires
from ...distributed import ALONE, tensor_parallel
from . import kernels_cpu
from .groups import Groups

__all__ = ["RMSNormGated"]

kernels_triton = lazy_module("opmux.ops.norm.kernels_triton")


@CustomOp.register("rms_norm_gated")
class RMSNormGated(CustomOp):
    """RMS norm of each group of features, times a weight, with a gate before or after.

    Gate after (``norm_before_gate``): ``norm(x) * weight * act(z)``. Gate before: ``norm(x * act(z)) * weight``.
    Without z there is no gate.

    Over ranks each holds ``H / ranks`` neighbouring features of x, z and the weight. A rank holds whole groups, or a
    group spans ranks, which then add up their squares in fp32 (native only); the ranks' results side by side are one
    process's answer.

    Shapes:  x, z [..., H / ranks] -> [..., H / ranks]; weight [H / ranks]; groups of ``group_size`` neighbours, or the
             whole row.
    Dtypes:  fp32, fp16, bf16 for each of x, z and the weight; computed in fp32, rounded once to x's dtype.
    Mutates: nothing.      Grad: native only.
    Errors:  ValueError at construction for an unknown activation or an H that is no multiple of ``group_size``;
             TensorParallelError with both numbers if H does not divide by the ranks, or a rank would hold parts of
             two groups; ValueError for an x of another width or a z of another shape than x's.
    Source:  the gated norm of Mamba-2, arXiv 2405.21060; Qwen3-Next's gated delta net (norm before gate).

    Args:
        hidden_size: H, of the whole row.
        eps: added to the mean square.
        group_size: features a group, of the whole row; None means H.
        norm_before_gate: the order, see above.
        device, dtype: of the weight.
        activation: of the gate: "swish" or "silu", or "sigmoid".
        disable_tp: hold whole rows on every rank, as for a norm of each head.
    """

    tolerance = Tolerance(ulp=1.0, fp32=32.0)

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        activation: str = "swish",
        *,
        disable_tp: bool = False,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        if activation not in ("swish", "silu", "sigmoid"):
            raise ValueError(f"activation is {activation!r}; rms_norm_gated knows 'swish', 'silu' and 'sigmoid'.")
        self.tp = ALONE if disable_tp else tensor_parallel()
        self.groups = Groups.of(hidden_size, hidden_size if group_size is None else group_size, self.tp)
        self.hidden_size = hidden_size
        self.group_size = self.groups.size
        self.eps = float(eps)
        self.norm_before_gate = norm_before_gate
        self.by_sigmoid = activation == "sigmoid"
        self.weight = frozen(torch.ones(self.groups.local_width, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward_native(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        self._check(x, z)
        y = wide(x)
        gate = None
        if z is not None:
            gate = torch.sigmoid(z.to(y.dtype))
            gate = gate if self.by_sigmoid else z.to(y.dtype) * gate
        if gate is not None and not self.norm_before_gate:
            y = y * gate
        y = (self.groups.apart(y) * torch.rsqrt(self.groups.mean_square(y) + self.eps)).flatten(-2)
        y = y * self.weight.to(y.dtype)
        if gate is not None and self.norm_before_gate:
            y = y * gate
        return y.to(x.dtype)

    def _group_spans_ranks(self, x: Tensor, z: Tensor | None = None) -> str | None:
        if self.groups.ranks_a_group == 1:
            return None
        return f"sees the features of one rank; here a group spans {self.groups.ranks_a_group} ranks"

    @requires(dtypes=FLOATS, native_library=True, when=_group_spans_ranks)
    def forward_cpu(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        self._check(x, z)
        return kernels_cpu.rms_norm_gated_cpu(
            x, z, self.weight, self.eps, self.group_size, self.norm_before_gate, self.by_sigmoid
        )

    @requires(dtypes=FLOATS, triton=True, when=_group_spans_ranks)
    def forward_cuda(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        self._check(x, z)
        return kernels_triton.rms_norm_gated_triton(
            x, z, self.weight, self.eps, self.group_size, self.norm_before_gate, self.by_sigmoid
        )

    forward_hip = forward_xpu = forward_cuda

    def _check(self, x: Tensor, z: Tensor | None) -> None:
        if x.shape[-1] != self.groups.local_width or (z is not None and z.shape != x.shape):
            shared = ""
            if self.tp.size > 1:
                shared = (
                    f", {self.groups.local_width} on each of {self.tp.size} ranks (disable_tp=True keeps rows whole)"
                )
            raise ValueError(
                f"rms_norm_gated was built for hidden_size {self.hidden_size}{shared} and takes a gate of x's shape; x "
                f"is {tuple(x.shape)}, z {None if z is None else tuple(z.shape)}."
            )

    def load_weight(self, weight: Tensor) -> None:
        """Copy this rank's features of a checkpoint's whole weight [H]."""
        first = self.tp.rank * self.groups.local_width
        copy_checked(self.weight, weight[first : first + self.groups.local_width], "The weight")

    def extra_repr(self) -> str:
        order = "norm, gate" if self.norm_before_gate else "gate, norm"
        return f"{self.hidden_size}, eps={self.eps}, group_size={self.group_size}, {order}"

    @classmethod
    def cases(cls) -> Iterator[Case]:
        sizes = [(t, 4096, 4096) for t in (1, 64, 1024, 16384)] + [(64, 8192, 1024)]
        edges = [(0, 64, 64), (7, 1, 1), (7, 6, 3), (3, 769, 769), (2, 65537, 65537)]
        for tokens, hidden, group in [*sizes, *edges]:
            for before in (False, True):
                yield Case(
                    name=f"T={tokens} H={hidden} group={group} {'norm, gate' if before else 'gate, norm'}",
                    init={"hidden_size": hidden, "group_size": group, "norm_before_gate": before},
                    args=lambda i, t=tokens, h=hidden: (i.randn(t, h), i.randn(t, h, scale=2.0)),
                    dims={"T": tokens, "H": hidden},
                    bench=(tokens, hidden, group) in sizes,
                    prepare=_random_weight,
                )

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        return Cost(size_bytes=dtype.itemsize * (3 * case.dims["T"] * case.dims["H"] + case.dims["H"]))


def _random_weight(op: RMSNormGated, inputs: Inputs) -> None:
    op.weight.data = inputs.randn(op.hidden_size, scale=0.2, shift=1.0)

"""RMS norm with a gate, over groups."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost, Inputs, Tolerance
from ...core.custom_op import CustomOp
from ...core.lazy import lazy_module
from ...core.numerics import wide
from ...core.parameters import frozen
from ...core.requires import requires
from . import kernels_cpu

__all__ = ["RMSNormGated"]

kernels_triton = lazy_module("opmux.ops.norm.kernels_triton")


@CustomOp.register("rms_norm_gated")
class RMSNormGated(CustomOp):
    """RMS norm of each group of features, times a weight, with a gate before or after.

    Gate after (``norm_before_gate``): ``norm(x) * weight * act(z)``. Gate before: ``norm(x * act(z)) * weight``.
    Without z there is no gate.

    Shapes:  x, z [..., H] -> [..., H]; weight [H]; groups of ``group_size`` neighbours, or the whole row.
    Dtypes:  fp32, fp16, bf16 for each of x, z and the weight; computed in fp32, rounded once to x's dtype.
    Mutates: nothing.      Grad: native only.
    Errors:  ValueError at construction for an unknown activation or an H that is no multiple of ``group_size``;
             ValueError for an x of another width or a z of another shape than x's.
    Source:  the gated norm of Mamba-2, arXiv 2405.21060; Qwen3-Next's gated delta net (norm before gate).

    Args:
        hidden_size: H.
        eps: added to the mean square.
        group_size: features a group; None means H.
        norm_before_gate: the order, see above.
        device, dtype: of the weight.
        activation: of the gate: "swish" or "silu", or "sigmoid".
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
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        if activation not in ("swish", "silu", "sigmoid"):
            raise ValueError(f"activation is {activation!r}; rms_norm_gated knows 'swish', 'silu' and 'sigmoid'.")
        self.group_size = hidden_size if group_size is None else group_size
        if self.group_size < 1 or hidden_size % self.group_size:
            raise ValueError(
                f"hidden_size {hidden_size} cannot be split into groups of {self.group_size}: it must be a multiple."
            )
        self.hidden_size = hidden_size
        self.eps = float(eps)
        self.norm_before_gate = norm_before_gate
        self.by_sigmoid = activation == "sigmoid"
        self.weight = frozen(torch.ones(hidden_size, device=device, dtype=dtype))
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
        groups = y.view(*y.shape[:-1], self.hidden_size // self.group_size, self.group_size)
        y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)).flatten(-2)
        y = y * self.weight.to(y.dtype)
        if gate is not None and self.norm_before_gate:
            y = y * gate
        return y.to(x.dtype)

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        self._check(x, z)
        return kernels_cpu.rms_norm_gated_cpu(
            x, z, self.weight, self.eps, self.group_size, self.norm_before_gate, self.by_sigmoid
        )

    @requires(dtypes=FLOATS, triton=True)
    def forward_cuda(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        self._check(x, z)
        return kernels_triton.rms_norm_gated_triton(
            x, z, self.weight, self.eps, self.group_size, self.norm_before_gate, self.by_sigmoid
        )

    forward_hip = forward_xpu = forward_cuda

    def _check(self, x: Tensor, z: Tensor | None) -> None:
        if x.shape[-1] != self.hidden_size or (z is not None and z.shape != x.shape):
            raise ValueError(
                f"rms_norm_gated was built for hidden_size {self.hidden_size} and takes a gate of x's shape; x is "
                f"{tuple(x.shape)}, z {None if z is None else tuple(z.shape)}."
            )

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

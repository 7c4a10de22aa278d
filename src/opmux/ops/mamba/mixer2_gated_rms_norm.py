"""The gated norm of Mamba-2."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost, Inputs, Tolerance
from ...core.custom_op import CustomOp
from ...core.numerics import wide
from ...core.parameters import copy_checked, frozen
from ...core.requires import requires
from ...distributed import tensor_parallel
from . import kernels_cpu

__all__ = ["Mixer2RMSNormGated"]


@CustomOp.register("mixer2_gated_rms_norm")
class Mixer2RMSNormGated(CustomOp):
    """``u = x * silu(gate)``, then ``round(u / sqrt(mean(u^2) + eps)) * weight`` over groups of neighbouring features.

    Over ranks each holds ``I / ranks`` neighbouring features of x, gate and weight. Where every rank holds whole groups
    nothing is exchanged. One group over all ranks costs one sum a row; any other division gathers the rows. The ranks'
    results side by side are one process's answer.

    Shapes:  x, gate [..., I / ranks] -> [..., I / ranks]; weight [I / ranks].
    Dtypes:  fp32, fp16, bf16 for each; fp32 inside, the normalised value rounded to x's dtype, its product with the
             weight to the wider one of x's dtype and the weight's. Without the norm u is rounded once to x's dtype.
    Mutates: nothing.      Grad: native only, and none across ranks.
    Errors:  ValueError where the groups do not divide I, or for an x of another width or a gate of another shape;
             TensorParallelError with both numbers where the ranks do not divide I.
    Source:  Dao and Gu 2024 (Mamba-2), arXiv 2405.21060.

    Args:
        full_hidden_size: I, of the whole row.
        full_n_groups: groups of the whole row.
        use_rms_norm: without it the op is the gate alone, and has no weight.
        eps: added to the mean square.
    """

    # A weight product of a value that was rounded before.
    tolerance = Tolerance(ulp=2.5, fp32=32.0)

    def __init__(
        self, full_hidden_size: int, full_n_groups: int, use_rms_norm: bool = True, eps: float = 1e-6, *,
        enforce_enable: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(enforce_enable=enforce_enable)
        if full_n_groups < 1 or full_hidden_size % full_n_groups:
            raise ValueError(
                f"mixer2_gated_rms_norm cannot split {full_hidden_size} features into {full_n_groups} groups: the first "
                "must be a multiple of the second."
            )
        self.tp = tensor_parallel()
        self.full_hidden_size = full_hidden_size
        self.n_groups = full_n_groups
        self.group_size = full_hidden_size // full_n_groups
        self.local_width = self.tp.share(full_hidden_size, "full_hidden_size")
        self.use_rms_norm = use_rms_norm
        self.variance_epsilon = float(eps)
        self.weight = frozen(torch.ones(self.local_width)) if use_rms_norm else None

    def forward_native(self, x: Tensor, gate: Tensor) -> Tensor:
        self._check(x, gate)
        u = wide(x)
        gate = gate.to(u.dtype)
        u = u * (gate * torch.sigmoid(gate))
        if self.weight is None:
            return u.to(x.dtype)
        if self.tp.size == 1 or self.n_groups % self.tp.size == 0:
            normed = self._normed(u)
        elif self.n_groups == 1:
            squares = self.tp.all_reduce(u.square().sum(-1, keepdim=True))
            normed = u * torch.rsqrt(squares / self.full_hidden_size + self.variance_epsilon)
        else:
            first = self.tp.rank * self.local_width
            normed = self._normed(self.tp.all_gather(u))[..., first : first + self.local_width]
        return normed.to(x.dtype) * self.weight

    def _normed(self, u: Tensor) -> Tensor:
        groups = u.unflatten(-1, (-1, self.group_size))
        return (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.variance_epsilon)).flatten(-2)

    def _group_spans_ranks(self, x: Tensor, gate: Tensor) -> str | None:
        if not self.use_rms_norm or self.tp.size == 1 or self.n_groups % self.tp.size == 0:
            return None
        return f"sees the features of one rank; here {self.n_groups} groups lie over {self.tp.size} ranks"

    @requires(dtypes=FLOATS, native_library=True, when=_group_spans_ranks)
    def forward_cpu(self, x: Tensor, gate: Tensor) -> Tensor:
        self._check(x, gate)
        return kernels_cpu.mixer2_gated_norm_cpu(x, gate, self.weight, self._group_here(), self.variance_epsilon)

    def _group_here(self) -> int:
        return min(self.group_size, self.local_width)

    def _check(self, x: Tensor, gate: Tensor) -> None:
        if x.shape[-1] != self.local_width or gate.shape != x.shape:
            raise ValueError(
                f"mixer2_gated_rms_norm holds {self.local_width} of {self.full_hidden_size} features and takes a gate of "
                f"x's shape; x is {tuple(x.shape)}, gate {tuple(gate.shape)}."
            )

    def load_weight(self, weight: Tensor) -> None:
        """Copy this rank's features of a checkpoint's whole weight [I]."""
        if self.weight is None:
            raise ValueError("mixer2_gated_rms_norm has no weight here: it was built with use_rms_norm=False.")
        first = self.tp.rank * self.local_width
        copy_checked(self.weight, weight[first : first + self.local_width], "The weight")

    def extra_repr(self) -> str:
        return f"{self.full_hidden_size}, groups={self.n_groups}, norm={self.use_rms_norm}, eps={self.variance_epsilon}"

    @classmethod
    def cases(cls) -> Iterator[Case]:
        sizes = [(t, 4096, 1) for t in (1, 64, 1024, 16384)] + [(64, 8192, 8)]
        edges = [(0, 64, 1), (7, 1, 1), (7, 6, 2), (3, 769, 1), (5, 96, 4)]
        for tokens, width, groups in [*sizes, *edges]:
            for norm in (True, False) if (tokens, width, groups) in edges else (True,):
                yield Case(
                    name=f"T={tokens} I={width} groups={groups}{'' if norm else ' without norm'}",
                    init={"full_hidden_size": width, "full_n_groups": groups, "use_rms_norm": norm},
                    args=lambda i, t=tokens, h=width: (i.randn(t, h), i.randn(t, h, scale=2.0)),
                    dims={"T": tokens, "I": width},
                    bench=(tokens, width, groups) in sizes,
                    prepare=_random_weight,
                )

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        return Cost(size_bytes=dtype.itemsize * (3 * case.dims["T"] * case.dims["I"] + case.dims["I"]))


def _random_weight(op: Mixer2RMSNormGated, inputs: Inputs) -> None:
    if op.weight is not None:
        op.weight.data = inputs.randn(op.local_width, scale=0.2, shift=1.0)

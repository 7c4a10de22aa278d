"""What the mixers share: weights by their checkpoint names, a decay that stays fp32, new states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...core.cases import Tolerance
from ...core.custom_op import CustomOp
from ...core.parameters import copy_checked
from .requests import MambaState

Place = tuple[Tensor, Callable[[Tensor], Tensor]]  # a parameter, and what gives this rank's part of a checkpoint's whole


class Mixer(CustomOp):
    """A layer made of ops. ``forward_native`` runs the definitions of them, every other method runs what each decides."""

    mutates: ClassVar[tuple[str, ...]] = ("conv_state", "ssm_state")
    # Three to five products one after the other, each of which rounds to the input's dtype, and the scan between them.
    tolerance = Tolerance(ulp=16.0, fp32=128.0, scale=1.0)

    def _places(self) -> Iterator[tuple[str, Place]]:
        """Name in a checkpoint -> where it goes."""
        raise NotImplementedError

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy a checkpoint's whole tensors, by their names below the mixer, as ``in_proj.weight``; each rank takes its part.

        ``A_log`` becomes ``A = -exp(A_log)``, kept in fp32.

        Raises:
            ValueError: a tensor is missing, unknown, or of another shape than this rank's place for it.
        """
        places = dict(self._places())
        if places.keys() != weights.keys():
            raise ValueError(
                f"{self.name} takes {', '.join(places)}; missing: {', '.join(places.keys() - weights.keys()) or 'none'}, "
                f"unknown: {', '.join(weights.keys() - places.keys()) or 'none'}."
            )
        for name, (parameter, part) in places.items():
            copy_checked(parameter, part(weights[name]), name)

    def _new_state(
        self, slots: int, rows: int, width: int, recurrent: tuple[int, ...] | None, dtype: torch.dtype | None,
        ssm_dtype: torch.dtype | None,
    ) -> MambaState:  # fmt: skip
        own = next(self.parameters())
        conv = torch.zeros(slots, rows, width, dtype=dtype or own.dtype, device=own.device)
        if recurrent is None:
            return MambaState(conv)
        return MambaState(conv, torch.zeros(slots, *recurrent, dtype=ssm_dtype or torch.float32, device=own.device))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        # A cast to 16 bits leaves A as it is: a rounding of the decay's exponent grows with every token.
        a = self._parameters.get("A")
        before = None if a is None else a.data
        result = super()._apply(fn, recurse)
        after = self._parameters.get("A")
        if before is not None and after is not None and after.dtype.itemsize < before.dtype.itemsize:
            after.data = before.to(after.device)
        return result


def native(op: CustomOp, *args: Any) -> Any:
    """The definition of an op inside a mixer."""
    return op.forward_native(*args)


def dispatched(op: CustomOp, *args: Any) -> Any:
    """What the op itself decides."""
    return op(*args)


def decay(a_log: Tensor) -> Tensor:
    """A of a checkpoint's A_log."""
    return -torch.exp(a_log.float())


def whole(tensor: Tensor) -> Tensor:
    """The part of every rank, where each holds all."""
    return tensor

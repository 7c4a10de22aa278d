"""Tensor parallelism over ``torch.distributed``: which group ops shard over, and the four collectives they need.

::

    torch.distributed.init_process_group("gloo")          # torchrun started this process
    opmux.distributed.init_tensor_parallel()              # ops built from now on shard over all ranks
    up = ColumnParallelLinear(4096, 14336)                # holds this rank's rows

The collectives are torch.distributed's; there is none of our own.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .core.errors import OpmuxError


class TensorParallelError(OpmuxError, ValueError):
    """A size does not divide by the number of ranks, or no process group is there."""


@dataclass(frozen=True)
class TensorParallel:
    """The ranks that share a model's weights. An op keeps the one in force when it was built."""

    size: int = 1
    rank: int = 0
    group: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallel:
        return self  # a copied op has the same ranks, and a process group cannot be copied

    def share(self, size: int, what: str) -> int:
        """This rank's part of ``size``; an error with both numbers where it does not divide."""
        if size % self.size:
            raise TensorParallelError(
                f"{what} is {size}, which does not divide by {self.size} tensor-parallel ranks. Choose a number of "
                "ranks that divides it."
            )
        return size // self.size

    def share_of_ranks(self, size: int) -> int:
        """How many ranks share one of ``size`` things, where there are more ranks than things."""
        if self.size % size:
            raise TensorParallelError(
                f"{self.size} tensor-parallel ranks cannot share {size} key heads. Choose a multiple or a divisor of "
                f"{size}."
            )
        return self.size // size

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in x's memory: give it a tensor of your own."""
        if self.size > 1:
            _refuse_gradient(x)
            dist.all_reduce(x, group=self.group)
        return x

    def gather_objects(self, mine: Any) -> list[Any]:
        """Every rank's object, in the order of ranks."""
        if self.size == 1:
            return [mine]
        everybody: list[Any] = [None] * self.size
        dist.all_gather_object(everybody, mine, group=self.group)
        return everybody

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' tensors side by side in the last dimension."""
        if self.size == 1:
            return x
        _refuse_gradient(x)
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self.group)
        return torch.cat(parts, dim=-1)

    def all_to_all(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Rows of x to every rank, in the order of ranks, against theirs.

        Args:
            sent: how many rows go to each rank.
            received: how many come from each.
        """
        _refuse_gradient(x)
        out = x.new_empty((sum(received), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=self.group)
        return out


def _refuse_gradient(x: Tensor) -> None:
    # torch's collectives work in place and would leave every rank with the gradient of its own part.
    if x.requires_grad and torch.is_grad_enabled():
        raise TensorParallelError(
            "Sharded ops serve inference: there is no gradient across ranks. Call them under torch.inference_mode()."
        )


ALONE = TensorParallel()

_current = ALONE


def tensor_parallel() -> TensorParallel:
    """The ranks that ops built now shard over."""
    return _current


class init_tensor_parallel:  # reads as the function it is; as a context manager it ends with its block
    """Shard ops built from now on over a process group.

    Args:
        mesh_or_group: a one-dimensional ``DeviceMesh``, a process group, a ``TensorParallel``, or None for all ranks.

    As a context manager it restores what was in force before. Errors: TensorParallelError where
    ``torch.distributed`` is not initialised, or the mesh has several dimensions.
    """

    def __init__(self, mesh_or_group: Any = None) -> None:
        global _current
        self._before = _current
        _current = _ranks_of(mesh_or_group)

    def __enter__(self) -> TensorParallel:
        return _current

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        global _current
        _current = self._before


def _ranks_of(mesh_or_group: Any) -> TensorParallel:
    if isinstance(mesh_or_group, TensorParallel):
        return mesh_or_group
    if not dist.is_available() or not dist.is_initialized():
        raise TensorParallelError(
            "Tensor parallelism needs a process group: start the processes with torchrun and call "
            "torch.distributed.init_process_group first."
        )
    group = mesh_or_group
    if hasattr(group, "get_group"):  # a DeviceMesh
        if group.ndim != 1:
            raise TensorParallelError(f"The mesh has {group.ndim} dimensions; name one of them, as mesh['tp'].")
        group = group.get_group()
    return TensorParallel(dist.get_world_size(group), dist.get_rank(group), group)

"""Groups of neighbouring features, on one rank or spread over several."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...distributed import ALONE, TensorParallel, TensorParallelError


@dataclass(frozen=True)
class Groups:
    """A row of ``width`` features in groups of ``size``, of which each rank holds ``local_width`` in a row.

    Attributes:
        width, size: of the whole row, whatever the number of ranks.
        tp: the ranks that share it.
    """

    width: int
    size: int
    tp: TensorParallel = ALONE

    @classmethod
    def of(cls, width: int, size: int, tp: TensorParallel = ALONE) -> Groups:
        """Checked: whole groups, and on each rank whole groups or an equal part of one.

        Raises:
            ValueError: ``width`` is no multiple of ``size``.
            TensorParallelError: the ranks cannot share the groups; with both numbers.
        """
        if size < 1 or width % size:
            raise ValueError(f"hidden_size {width} cannot be split into groups of {size}: it must be a multiple.")
        tp.share(width, "hidden_size")
        count = width // size
        if count % tp.size and tp.size % count:
            raise TensorParallelError(
                f"{count} groups of {size} features do not divide over {tp.size} tensor-parallel ranks: a rank would "
                f"hold parts of two groups. Choose a multiple or a divisor of {count}."
            )
        return cls(width, size, tp)

    @property
    def local_width(self) -> int:
        """Features on this rank."""
        return self.width // self.tp.size

    @property
    def ranks_a_group(self) -> int:
        """How many ranks share one group; 1 where each rank holds whole groups."""
        return max(1, self.size // self.local_width)

    def apart(self, x: Tensor) -> Tensor:
        """x [..., local_width] -> [..., this rank's groups, their features here]."""
        return x.unflatten(-1, (-1, min(self.size, self.local_width)))

    def mean_square(self, x: Tensor) -> Tensor:
        """The mean square of each whole group: x [..., local_width] in the dtype to sum in -> [..., groups here, 1].

        Where a group spans ranks their sums are added by one all-reduce of a column for each group of the row.
        """
        squares = self.apart(x).square()
        if self.ranks_a_group == 1:
            return squares.mean(-1, keepdim=True)
        mine = self.tp.rank // self.ranks_a_group
        sums = x.new_zeros(*x.shape[:-1], self.width // self.size)
        sums[..., mine] = squares.sum((-2, -1))
        return self.tp.all_reduce(sums)[..., mine, None, None] / self.size

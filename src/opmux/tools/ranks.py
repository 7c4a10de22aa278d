"""The processes that ``torchrun`` started for one command, as one tensor-parallel group."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from ..core.errors import UsageError

if TYPE_CHECKING:
    import torch

# The others wait while the first process downloads or converts a model. A process that ends is noticed by torchrun.
_PATIENCE = timedelta(hours=2)


@dataclass(frozen=True)
class Launch:
    """How this process was started: its number among all processes, and among those on this machine."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1


def launch() -> Launch:
    """What torchrun says in the environment; one process by itself where it says nothing."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    values = [os.environ.get(name, "") for name in names]
    return Launch(*map(int, values)) if all(value.isdigit() for value in values) else Launch()


def check(size: int) -> None:
    """Raise UsageError unless ``size`` is the number of processes that run. Costs nothing."""
    world_size = launch().world_size
    if size < 1:
        raise UsageError(f"--tensor-parallel-size {size}: it takes a number from 1 up.")
    if size == world_size:
        return
    if world_size == 1:
        raise UsageError(
            f"--tensor-parallel-size {size} needs {size} processes, and this one runs by itself. Start them with "
            f"torchrun: torchrun --nproc-per-node {size} -m opmux run --tensor-parallel-size {size} ..."
        )
    raise UsageError(
        f"torchrun started {world_size} processes, and --tensor-parallel-size is {size}. Make the two numbers equal."
    )


@contextlib.contextmanager
def group(size: int, device: torch.device) -> Iterator[torch.device]:
    """Join the other processes; ops built inside shard over all of them.

    Args:
        size: how many processes there are.
        device: the kind of device, without a number: each process takes the one of its local rank.

    Yields: this process's device.
    """
    import torch
    import torch.distributed as dist

    from ..distributed import init_tensor_parallel

    me = launch()
    if device.index is not None:
        raise UsageError(
            f"--device {device}: with --tensor-parallel-size each process takes a device of its own. Write --device "
            f"{device.type}."
        )
    if device.type != "cpu":
        count = torch.accelerator.device_count()
        if me.local_rank >= count:
            raise UsageError(
                f"Local rank {me.local_rank} has no {device.type} device: this machine has {count}. Start at most "
                f"{count} processes on it, or give --device cpu."
            )
        device = torch.device(device.type, me.local_rank)
        torch.accelerator.set_device_index(me.local_rank)
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        timeout=_PATIENCE,
        device_id=None if device.type == "cpu" else device,
    )
    with init_tensor_parallel():
        yield device
    # Not after an error: the other ranks may wait in a collective, and torchrun ends them when this process has ended.
    dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def first_alone() -> Iterator[None]:
    """The first process goes through the block alone, then the others: it downloads or converts, they find it done."""
    import torch.distributed as dist

    first = launch().rank == 0
    if not first:
        dist.barrier()
    yield
    if first:
        dist.barrier()

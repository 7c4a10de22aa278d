"""One start of several processes for all test files of this folder: starting them costs more than what they do."""

from __future__ import annotations

import functools
import importlib
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

FILES = ("test_expert_parallel", "test_tensor_parallel", "test_tensor_parallel_model")
# The ranks are forked from a process that has these already.
SLOW_IMPORTS = ["torch._dynamo", "opmux.apply", "transformers.generation", "transformers.models.llama.modeling_llama"]

# gloo on the CPU everywhere, NCCL where there is a GPU for each rank.
STARTS = pytest.mark.parametrize(
    ("size", "device"),
    [
        pytest.param(
            size, device, marks=pytest.mark.skipif(device == "cuda" and torch.cuda.device_count() < size, reason="GPUs")
        )
        for device in ("cpu", "cuda")
        for size in (2, 3, 4)
    ],
)


@functools.cache
def together(size: int, device: str) -> dict[str, Any]:
    """What rank 0 got from each file's ``on_each_rank(size, device)``. Raises what a rank raised."""
    with tempfile.TemporaryDirectory() as folder:
        mp.get_context("forkserver").set_forkserver_preload(SLOW_IMPORTS)
        mp.start_processes(_worker, (size, device, Path(folder)), size, start_method="forkserver")
        found: dict[str, Any] = pickle.loads((Path(folder) / "results").read_bytes())
        return found


def _worker(rank: int, size: int, device: str, folder: Path) -> None:
    torch.set_num_threads(1)
    mine = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(mine)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size)
    results = {name: importlib.import_module(name).on_each_rank(size, mine) for name in FILES}
    if rank == 0:
        (folder / "results").write_bytes(pickle.dumps(results))
    dist.barrier()
    dist.destroy_process_group()

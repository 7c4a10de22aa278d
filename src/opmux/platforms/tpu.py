"""TPUs through JAX: kernels in Pallas. torch has no TPU device here, so tensors cross by DLPack."""

from __future__ import annotations

import glob
import importlib.util
from typing import ClassVar

import torch

from ..core.decide import Facts
from .interface import Platform


class TpuPlatform(Platform):
    """Present where the machine shows TPU device files and JAX is installed."""

    name: ClassVar[str] = "tpu"
    kind: ClassVar[str] = "tpu"
    device_type: ClassVar[str] = "xla"

    @classmethod
    def detect(cls) -> str | None:
        files = glob.glob("/dev/accel*")
        if not files or importlib.util.find_spec("jax") is None:
            return None
        return f"{len(files)} TPU device file(s) and JAX are there"

    @classmethod
    def facts(
        cls, device: torch.device | None, dtype: torch.dtype | None, shape: tuple[int, ...] | None, present: bool
    ) -> Facts:
        missing = (
            "JAX is not installed; `pip install 'opmux[tpu]'`" if importlib.util.find_spec("jax") is None else None
        )
        return Facts(cls.name, cls.kind, cls.device_type, dtype, shape, pallas=missing if present else None)

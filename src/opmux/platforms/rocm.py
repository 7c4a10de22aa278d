"""AMD GPUs: the same Triton kernels; torch calls the device ``cuda``."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..core.decide import Facts
from .interface import Platform, triton_missing


class RocmPlatform(Platform):
    """Present where a HIP build of torch sees a device."""

    name: ClassVar[str] = "rocm"
    kind: ClassVar[str] = "rocm"
    device_type: ClassVar[str] = "cuda"

    @classmethod
    def detect(cls) -> str | None:
        if torch.version.hip is None or not torch.cuda.is_available():
            return None
        return f"torch {torch.__version__} (HIP {torch.version.hip}) sees {torch.cuda.device_count()} device(s)"

    @classmethod
    def facts(
        cls, device: torch.device | None, dtype: torch.dtype | None, shape: tuple[int, ...] | None, present: bool
    ) -> Facts:
        triton = triton_missing() if present else None
        return Facts(cls.name, cls.kind, cls.device_type, dtype, shape, triton=triton)

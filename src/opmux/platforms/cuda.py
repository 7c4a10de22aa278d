"""NVIDIA GPUs: kernels in Triton."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..core.decide import Facts
from .interface import Platform, triton_missing


class CudaPlatform(Platform):
    """Present where this torch build sees a CUDA device."""

    name: ClassVar[str] = "cuda"
    kind: ClassVar[str] = "cuda"
    device_type: ClassVar[str] = "cuda"

    @classmethod
    def detect(cls) -> str | None:
        if torch.version.hip is not None or not torch.cuda.is_available():
            return None
        return f"torch {torch.__version__} sees {torch.cuda.device_count()} CUDA device(s)"

    @classmethod
    def facts(
        cls, device: torch.device | None, dtype: torch.dtype | None, shape: tuple[int, ...] | None, present: bool
    ) -> Facts:
        if not present:
            return Facts(cls.name, cls.kind, cls.device_type, dtype, shape)
        capability = torch.cuda.get_device_capability(device)
        return Facts(cls.name, cls.kind, cls.device_type, dtype, shape, capability=capability, triton=triton_missing())

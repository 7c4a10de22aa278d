"""What a platform is. A vendor's platform implements the same interface (``docs/out_of_tree.md``)."""

from __future__ import annotations

import importlib.util
import os
from typing import ClassVar

import torch

from ..core.decide import Facts


class Platform:
    """One kind of hardware.

    A vendor subclasses it, leaves ``kind`` at ``"oot"``, and returns the class from an entry point of the group
    ``opmux.platform_plugins``.

    Attributes:
        name: what users call it, as in ``OPMUX_PLATFORM``.
        kind: the dispatch chain it uses, one of ``opmux.core.decide.CHAINS``.
        device_type: ``torch.device.type`` of its tensors.
    """

    name: ClassVar[str]
    kind: ClassVar[str] = "oot"
    device_type: ClassVar[str]

    @classmethod
    def detect(cls) -> str | None:
        """How the hardware was found in this process, or None if it was not."""
        raise NotImplementedError

    @classmethod
    def facts(
        cls, device: torch.device | None, dtype: torch.dtype | None, shape: tuple[int, ...] | None, present: bool
    ) -> Facts:
        """What a decision needs to know. ``present`` is False where the hardware is only spoken of."""
        return Facts(cls.name, cls.kind, cls.device_type, dtype, shape)


def triton_missing() -> str | None:
    """Why Triton cannot be used in this process, or None."""
    if importlib.util.find_spec("triton") is None:
        return "it is not installed; `pip install triton`"
    return None


def triton_interprets() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1" and triton_missing() is None

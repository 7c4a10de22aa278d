"""Which platform this process is on, and what a decision may know about it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from ..core.decide import CHAINS, Facts
from ..core.errors import HardwareMissingError, PlatformError, did_you_mean
from ..core.plugins import PLATFORM_GROUP, load_group
from .cpu import CpuPlatform
from .cuda import CudaPlatform
from .interface import Platform, triton_interprets
from .rocm import RocmPlatform
from .tpu import TpuPlatform
from .xpu import XpuPlatform

VARIABLE = "OPMUX_PLATFORM"

BUILT_IN: tuple[type[Platform], ...] = (CudaPlatform, RocmPlatform, XpuPlatform, TpuPlatform, CpuPlatform)


class OotPlatform(Platform):
    """Stands for a vendor's platform where none is installed: ``OPMUX_PLATFORM=oot`` shows what would be decided."""

    name = "oot"
    device_type = "privateuseone"

    @classmethod
    def detect(cls) -> str | None:
        return None


@dataclass(frozen=True)
class Current:
    """The platform of this process, how it was found, and whether its hardware is there."""

    platform: type[Platform]
    how: str
    present: bool


_current: tuple[str | None, Current] | None = None
_vendors: dict[str, type[Platform]] | None = None


def current() -> Current:
    """The current platform, detected when first asked for; ``OPMUX_PLATFORM`` forces one."""
    global _current
    forced = os.environ.get(VARIABLE) or None
    if _current is None or _current[0] != forced:
        _current = forced, _force(forced) if forced else _detect()
    return _current[1]


def by_name(name: str) -> type[Platform]:
    """The platform that goes by ``name``."""
    known = {p.name: p for p in BUILT_IN} | {OotPlatform.name: OotPlatform} | vendors()
    if not isinstance(name, str) or name not in known:
        raise PlatformError(f"There is no platform {name!r}. {did_you_mean(name, known)}")
    return known[name]


def vendors() -> dict[str, type[Platform]]:
    """The platforms that plugins brought, by name."""
    global _vendors
    if _vendors is None:
        found: dict[str, tuple[str, type[Platform]]] = {}
        for plugin, platform in load_group(PLATFORM_GROUP, _check_platform):
            if platform is None:
                continue
            if platform.name in found and found[platform.name][1] is not platform:
                raise PlatformError(
                    f"The platform plugins {found[platform.name][0]!r} and {plugin!r} both bring a platform called "
                    f"{platform.name!r}. Name the plugins to load in OPMUX_PLUGINS."
                )
            found[platform.name] = plugin, platform
        _vendors = {name: platform for name, (_, platform) in found.items()}
    return _vendors


def _check_platform(platform: Any) -> None:
    if platform is None:
        return
    if not (isinstance(platform, type) and issubclass(platform, Platform)):
        raise TypeError(
            f"it returned {platform!r}; it must return a subclass of opmux.platforms.Platform, or None where its "
            "hardware is not there"
        )
    for attribute in ("name", "kind", "device_type"):
        if not isinstance(getattr(platform, attribute, None), str):
            raise TypeError(f"its platform {platform.__qualname__} sets no {attribute} (a string)")
    if platform.kind not in CHAINS:
        raise TypeError(
            f"its platform {platform.__qualname__} has kind {platform.kind!r}; there are {', '.join(CHAINS)}"
        )
    if platform.name in {p.name for p in BUILT_IN}:
        raise TypeError(f"its platform {platform.__qualname__} is called {platform.name!r} like a built-in one")
    platform.detect()  # one that raises fails here, under its plugin's name


def facts_for(device: torch.device | None, dtype: torch.dtype | None, shape: tuple[int, ...] | None) -> Facts:
    """Facts for tensors on ``device`` (None: the current platform). Dispatch follows the tensors."""
    here = current()
    if device is not None and device.type == "meta":
        return Facts("meta", "meta", "meta", dtype, shape)
    # A platform forced without its hardware decides for CPU tensors too: there are no other ones to show it with.
    if device is None or device.type == here.platform.device_type or (not here.present and device.type == "cpu"):
        return here.platform.facts(device, dtype, shape, here.present)
    for platform in (*vendors().values(), *BUILT_IN):
        if platform.device_type == device.type and platform.detect() is not None:
            return platform.facts(device, dtype, shape, True)
    return Facts(device.type, "oot", device.type, dtype, shape)


def facts_of_platform(name: str | None, dtype: torch.dtype | None, shape: tuple[int, ...] | None) -> Facts:
    """Facts of a platform by name, with or without its hardware; None: the current platform."""
    if name is None:
        return facts_for(None, dtype, shape)
    platform = by_name(name)
    present = platform.detect() is not None
    return platform.facts(None, dtype, shape, present)


def require_hardware(method: str, device_type: str) -> None:
    """Raise if a Triton kernel of a platform that was forced is about to get CPU tensors, which it cannot read."""
    here = current()
    if here.present or device_type != "cpu" or triton_interprets():
        return
    raise HardwareMissingError(
        f"{method} was decided for platform {here.platform.name!r} ({here.how}) and got tensors on {device_type!r}: "
        f"this process has no such hardware. Unset {VARIABLE}, or set TRITON_INTERPRET=1 before Triton is imported to "
        "run its kernels in the interpreter."
    )


def _force(name: str) -> Current:
    platform = by_name(name)
    return Current(platform, f"{VARIABLE}={name}", platform.detect() is not None)


def _detect() -> Current:
    claims = [(p, how) for p in vendors().values() if (how := p.detect()) is not None]
    if len(claims) > 1:
        names = " and ".join(repr(p.name) for p, _ in claims)
        raise PlatformError(
            f"The platform plugins {names} both claim this machine. Set {VARIABLE} to the one to use, or name the "
            "plugins to load in OPMUX_PLUGINS."
        )
    if claims:
        return Current(*claims[0], present=True)
    for platform in BUILT_IN:
        how = platform.detect()
        if how is not None:
            return Current(platform, how, True)
    raise PlatformError("No platform was found, not even a CPU.")

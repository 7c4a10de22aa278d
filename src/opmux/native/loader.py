"""Finds, checks and loads the compiled CPU library that fits this processor."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import platform
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

# torch comes first: its copy of libgomp must be in the process before ours asks for one, so that both share one thread
# pool and torch.set_num_threads holds for both.
import torch

from opmux.core.errors import OpmuxError

DTYPE_CODE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# Best first. Features that /proc/cpuinfo must show, and the names by which kernels ask for them (`requires(isa=...)`).
_V2 = ["cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2"]
_V3 = [*_V2, *["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"]]
_V4 = [*_V3, *["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"]]
_NEEDS: dict[str, list[str]] = {
    "v4bf16": [*_V4, "avx512_bf16", "avx512_vnni"],
    "v4": _V4,
    "v3": _V3,
    "v2": _V2,
    "neon": ["asimd"],
    "generic": [],
}
_ISA = {
    "v4bf16": ("sse4", "avx2", "avx512", "avx512_vnni", "avx512_bf16"),
    "v4": ("sse4", "avx2", "avx512"),
    "v3": ("sse4", "avx2"),
    "v2": ("sse4",),
    "neon": ("neon",),
    "generic": (),
}
_REBUILD = "install g++ (or set CXX), then run: python -m opmux.native.build"


class NativeLibraryError(OpmuxError, RuntimeError):
    """The compiled CPU library is missing or cannot be used; the message says why and what to do."""


class NativeLibrary:
    """The compiled library, loaded on the first question. Its facts never change within a process.

    ``OPMUX_NATIVE_VARIANT`` (or ``variant``, for a second library beside the first) forces a variant; ``none`` runs
    every op native.
    """

    def __init__(self, folder: Path | None = None, variant: str | None = None) -> None:
        self.folder = folder or Path(__file__).parent / "lib"
        self._forced = variant

    @property
    def available(self) -> bool:
        """Whether kernels can be called."""
        return self._load[0] is not None

    @property
    def variant(self) -> str | None:
        """The variant loaded: v2, v3, v4, v4bf16, neon or generic."""
        return self._load[1]

    @property
    def reason(self) -> str | None:
        """Why the library is not available and what to do; None if it is."""
        return self._load[2]

    @property
    def isa(self) -> frozenset[str]:
        """Instruction sets that the loaded variant uses, as ``@requires(isa=...)`` names them."""
        return frozenset(_ISA[self.variant] if self.variant else ())

    @property
    def calls_by(self) -> str:
        """How Python calls a kernel: ``fastcall`` or, without the small extension, ``ctypes``."""
        return "ctypes" if self._bind is None else "fastcall"

    @cached_property
    def build(self) -> dict[str, Any]:
        """What the build recorded (``build.Report``); empty if it never ran."""
        try:
            record: dict[str, Any] = json.loads((self.folder / "build.json").read_text())
        except (OSError, ValueError):
            return {}
        return record

    def supported(self) -> list[str]:
        """The variants that are built and that this processor can run, best first."""
        have = _cpu_features()
        built = [name for name in _NEEDS if (self.folder / f"libopmux_{name}.so").exists()]
        # Without a list of features (not Linux) only the lowest variant is safe.
        return [name for name in built if have.issuperset(_NEEDS[name])] if have else built[-1:]

    def kernel(self, name: str) -> Callable[..., int]:
        """The kernel ``opmux_<name>``: takes ints (addresses, sizes, codes, strides), floats and None (null)."""
        handle, variant, reason = self._load
        if handle is None:
            raise NativeLibraryError(f"kernel {name!r} needs the compiled CPU library: {reason}")
        try:
            symbol = getattr(handle, f"opmux_{name}")
        except AttributeError:
            raise NativeLibraryError(
                f"the compiled CPU library (variant {variant}) has no kernel {name!r}: it is older than the Python "
                "code; run: python -m opmux.native.build"
            ) from None
        if self._bind is None:
            return _ctypes_kernel(symbol, name)
        address = ctypes.cast(symbol, ctypes.c_void_p).value
        function: Callable[..., int] = self._bind(address, name)
        return function

    @cached_property
    def _load(self) -> tuple[ctypes.PyDLL | None, str | None, str | None]:
        """(handle, variant, why not)."""
        forced = self._forced or os.environ.get("OPMUX_NATIVE_VARIANT")
        if forced == "none":
            return None, None, "switched off by OPMUX_NATIVE_VARIANT=none; unset it"
        supported = self.supported()
        if forced and forced not in supported:
            can = ", ".join(supported) or "nothing"
            raise NativeLibraryError(f"OPMUX_NATIVE_VARIANT={forced}: this build and this processor offer {can}")
        if not supported:
            return None, None, self._why_nothing()
        variant = forced or supported[0]
        try:
            # PyDLL keeps the interpreter lock; kernels that run long release it themselves (threads.h).
            handle = ctypes.PyDLL(str(self.folder / f"libopmux_{variant}.so"))
        except OSError as error:
            return None, None, f"{error}; {_REBUILD}"
        api = ctypes.pythonapi
        functions = [
            ctypes.cast(f, ctypes.c_void_p).value or 0 for f in (api.PyEval_SaveThread, api.PyEval_RestoreThread)
        ]
        _ctypes_kernel(handle.opmux_set_gil_functions, "set_gil_functions")(*functions)
        return handle, variant, None

    @cached_property
    def _bind(self) -> Callable[[int | None, str], Callable[..., int]] | None:
        try:
            extension = importlib.import_module("opmux.native._fastcall")
        except ImportError:
            return None
        bind: Callable[[int | None, str], Callable[..., int]] = extension.bind
        return bind

    def _why_nothing(self) -> str:
        if not self.build:
            return f"it was never built; {_REBUILD}"
        errors = "; ".join(f"{what}: {why.splitlines()[0]}" for what, why in self.build["errors"].items())
        if not self.build["variants"]:
            return f"the build failed ({errors}); {_REBUILD}"
        return (
            f"built for {', '.join(self.build['variants'])}, none of which this {platform.machine()} processor can run"
        )


class Kernels:
    """Kernels as attributes: ``kernels.rms_norm(...)``. Bound on first use, then as cheap as any attribute."""

    def __init__(self, source: NativeLibrary) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("__"):
            raise AttributeError(name)
        kernel = self._source.kernel(name)
        setattr(self, name, kernel)
        return kernel


library = NativeLibrary()
kernels = Kernels(library)


class _Arg(ctypes.Union):
    _fields_ = [("i", ctypes.c_int64), ("f", ctypes.c_double)]


def _ctypes_kernel(symbol: Any, name: str) -> Callable[..., int]:
    symbol.restype = ctypes.c_int64
    symbol.argtypes = [ctypes.c_void_p]

    def call(*args: int | float | None) -> int:
        values = (_Arg * len(args))()
        for value, arg in zip(values, args, strict=True):
            if isinstance(arg, float):
                value.f = arg
            else:
                value.i = arg or 0
        result: int = symbol(values)
        return result

    call.__name__ = name
    return call


def _cpu_features() -> frozenset[str]:
    """The features that Linux lists for the first processor; empty elsewhere."""
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() in ("flags", "Features"):
                    return frozenset(value.split())
    except OSError:
        pass
    return frozenset()

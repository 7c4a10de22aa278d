"""The loader: what it finds, what it says when it finds nothing; torch and the library share one thread pool."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from opmux.native import kernels, library
from opmux.native.loader import NativeLibrary, NativeLibraryError, _ctypes_kernel

needs_library = pytest.mark.skipif(not library.available, reason=f"compiled CPU library: {library.reason}")


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)


def test_importing_loads_no_library() -> None:
    code = "import opmux.native; print('libopmux' in open('/proc/self/maps').read())"
    if not Path("/proc/self/maps").exists():
        pytest.skip("reads /proc, which only Linux has")
    assert run_python(code).stdout.strip() == "False"


def test_a_folder_without_a_library_says_how_to_build_one(tmp_path: Path) -> None:
    empty = NativeLibrary(tmp_path)
    assert not empty.available
    assert empty.variant is None
    assert empty.isa == frozenset()
    assert "never built" in str(empty.reason)
    assert "python -m opmux.native.build" in str(empty.reason)
    with pytest.raises(NativeLibraryError, match=r"rms_norm.*never built"):
        empty.kernel("rms_norm")


def test_a_failed_build_is_explained(tmp_path: Path) -> None:
    record = {"variants": [], "errors": {"compiler": "no C++ compiler: 'g++' does not run"}}
    (tmp_path / "build.json").write_text(json.dumps(record))
    assert "no C++ compiler" in str(NativeLibrary(tmp_path).reason)


def test_a_damaged_library_is_explained(tmp_path: Path) -> None:
    best = library.supported()[:1] or ["generic"]
    (tmp_path / f"libopmux_{best[0]}.so").write_bytes(b"not a library")
    damaged = NativeLibrary(tmp_path)
    assert not damaged.available
    assert "invalid ELF header" in str(damaged.reason) or "too short" in str(damaged.reason)


def test_the_library_can_be_switched_off() -> None:
    code = "from opmux.native import library; print(library.available, library.reason)"
    done = run_python(code, OPMUX_NATIVE_VARIANT="none")
    assert done.stdout.startswith("False switched off by OPMUX_NATIVE_VARIANT=none")


@needs_library
def test_the_best_supported_variant_is_taken() -> None:
    if "OPMUX_NATIVE_VARIANT" not in os.environ:
        assert library.variant == library.supported()[0]
    assert library.reason is None


@needs_library
def test_a_variant_can_be_forced() -> None:
    variant = library.supported()[-1]
    code = "from opmux.native import kernels, library; kernels.max_threads(); print(library.variant)"
    assert run_python(code, OPMUX_NATIVE_VARIANT=variant).stdout.strip() == variant


def test_a_variant_that_is_not_there_is_an_error_naming_those_that_are() -> None:
    done = run_python("from opmux.native import library; library.available", OPMUX_NATIVE_VARIANT="v9")
    assert "OPMUX_NATIVE_VARIANT=v9" in done.stderr
    assert all(variant in done.stderr for variant in library.supported())


@needs_library
def test_an_unknown_kernel_says_that_the_library_is_old() -> None:
    with pytest.raises(NativeLibraryError, match=r"no kernel 'no_such'.*python -m opmux\.native\.build"):
        library.kernel("no_such")


@needs_library
def test_threads_follow_torch() -> None:
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert kernels.max_threads() == threads
    finally:
        torch.set_num_threads(before)


@needs_library
def test_one_openmp_runtime_serves_torch_and_the_library() -> None:
    code = (
        "from opmux.native import kernels; kernels.max_threads()\n"
        "lines = [l for l in open('/proc/self/maps') if 'gomp' in l and ' r-xp ' in l]; print(len(lines), lines)"
    )
    assert run_python(code).stdout.startswith("1 ")


@needs_library
@pytest.mark.skipif(library.calls_by != "fastcall", reason="the extension is not built")
def test_wrong_arguments_are_type_errors() -> None:
    with pytest.raises(TypeError, match="kernel max_threads: argument 1 is a <class 'str'>"):
        kernels.max_threads(1, "2")
    with pytest.raises(TypeError, match="at most 64"):
        kernels.max_threads(*range(65))
    with pytest.raises(OverflowError):
        kernels.max_threads(2**70)


@needs_library
def test_ctypes_calls_give_the_same_answer() -> None:
    x, out = torch.randn(3, 65), torch.empty(3, 65)
    handle = library._load[0]
    assert handle is not None
    by_ctypes = _ctypes_kernel(handle.opmux_activation, "activation")
    by_ctypes(x.data_ptr(), 65, out.data_ptr(), 3, 65, 0, 2, 0.0, 0.0, 0.0, 0.0)
    assert torch.equal(out, torch.relu(x).square())


@pytest.mark.skipif(shutil.which("g++") is None, reason="without a compiler there is no library, and ops run native")
@pytest.mark.skipif(os.environ.get("OPMUX_NATIVE_VARIANT") == "none", reason="the library is switched off on purpose")
def test_with_a_compiler_the_library_is_there() -> None:
    """The kernels' tests skip themselves without it, which must never be what makes a run green."""
    assert library.available, library.reason

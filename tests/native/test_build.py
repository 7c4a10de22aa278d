"""The build: what it makes and records, and that no failure stops an install."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import opmux
from opmux.native import build

PACKAGE = Path(opmux.__file__).parent


@pytest.fixture
def small_package(tmp_path: Path) -> Path:
    """A package folder with the shared native files and one kernel."""
    package = tmp_path / "opmux"
    shutil.copytree(PACKAGE / "native", package / "native", ignore=shutil.ignore_patterns("lib", "objects", "*.so"))
    (package / "ops" / "one").mkdir(parents=True)
    (package / "ops" / "one" / "kernels_cpu.cpp").write_text(
        '// flags: -DANSWER=42\n#include "abi.h"\nOPMUX_EXPORT int64_t opmux_answer(const Arg*) { return ANSWER; }\n'
    )
    return package


def test_no_compiler_is_recorded_and_nothing_raises(small_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler --fast")
    report = build.build(small_package, small_package, small_package / "objects")
    assert report.variants == []
    assert "no-such-compiler" in report.errors["compiler"]
    assert "CPU ops run native" in str(report.warning())
    assert "python -m opmux.native.build" in str(report.warning())
    assert json.loads((small_package / "native" / "lib" / "build.json").read_text())["errors"] == report.errors


def test_a_compiler_that_refuses_is_recorded_for_each_variant(
    small_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses = tmp_path / "refuses"
    refuses.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo refuses 1.0 && exit 0\necho "unknown flag" >&2; exit 1\n'
    )
    refuses.chmod(0o755)
    monkeypatch.setenv("CXX", str(refuses))
    report = build.build(small_package, small_package, small_package / "objects")
    assert report.compiler_version == "refuses 1.0"
    assert report.variants == []
    assert all("unknown flag" in why for what, why in report.errors.items() if what in build.X86)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_kernels_are_built_once_and_called(small_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from opmux.native.loader import NativeLibrary

    monkeypatch.delenv("CXX", raising=False)
    report = build.build(small_package, small_package, small_package / "objects")
    assert list(report.variants) == list(build.VARIANTS.get(report.machine, {"generic": []}))
    assert NativeLibrary(small_package / "native" / "lib").kernel("answer")() == 42

    made = sorted((small_package / "objects").iterdir())
    times = [path.stat().st_mtime_ns for path in made]
    build.build(small_package, small_package, small_package / "objects")
    assert sorted((small_package / "objects").iterdir()) == made
    assert [path.stat().st_mtime_ns for path in made] == times

"""`opmux doctor`: sound where all is well; each problem with its remedy, and code 1 if it matters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opmux import native
from opmux.core import plugins
from opmux.native.loader import NativeLibrary
from opmux.tools import health, models

Opmux = Any


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine is like, the kernels are there and threads fit."""
    monkeypatch.setattr(native, "library", _Library())
    monkeypatch.setattr(health.compare, "machine", lambda: {"processor": "a processor", "threads": 1, "cores": 2})


class _Library:
    available, reason, variant, calls_by = True, None, "v3", "fastcall"
    isa = frozenset({"avx2"})
    build = {"compiler_version": "a compiler"}

    def supported(self) -> list[str]:
        return ["v3"]


def test_a_sound_installation(opmux: Opmux, sound: None) -> None:
    done = opmux("doctor", "--json")
    assert (done.code, done.json["sound"]) == (0, True)
    assert done.json["versions"]["torch"]
    assert done.json["platform"]["found by"]
    assert done.json["cpu"]["compiled kernels"] == "variant v3, called by fastcall"
    assert "No serious problem" in opmux("doctor").out


def problem(done: Any) -> dict[str, Any]:
    assert done.code == 1
    [found] = [p for p in done.json["problems"] if p["serious"]]
    return found


@pytest.mark.parametrize(
    ("build", "what", "remedy"),
    [
        (None, "it was never built", "install g++"),
        ('{"errors": {"v3": "no compiler found"}, "variants": []}', "no compiler found", "install g++"),
    ],
)
def test_no_compiled_library(
    opmux: Opmux,
    sound: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    build: str | None,
    what: str,
    remedy: str,
) -> None:
    if build is not None:
        (tmp_path / "build.json").write_text(build)
    monkeypatch.setattr(native, "library", NativeLibrary(tmp_path))
    found = problem(opmux("doctor", "--json"))
    assert what in found["what"]
    assert remedy in found["remedy"]
    assert "remedy:" in opmux("doctor").out


def test_a_plugin_that_failed(opmux: Opmux, sound: None, monkeypatch: pytest.MonkeyPatch) -> None:
    record = plugins.PluginRecord(
        "vendor", plugins.GENERAL_GROUP, "vendor:register", "failed", "ImportError: no driver"
    )
    monkeypatch.setattr(plugins, "records", lambda: [record])
    found = problem(opmux("doctor", "--json"))
    assert "'vendor'" in found["what"]
    assert "ImportError: no driver" in found["what"]
    assert "OPMUX_PLUGINS" in found["remedy"]


def test_a_platform_that_is_forced_and_not_there(opmux: Opmux, sound: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPMUX_PLATFORM", "tpu")
    found = problem(opmux("doctor", "--json"))
    assert "OPMUX_PLATFORM=tpu" in found["what"]
    monkeypatch.setenv("OPMUX_PLATFORM", "nonesuch")
    done = opmux("doctor", "--json")
    assert done.code == 1
    assert "There is no platform 'nonesuch'" in done.json["problems"][0]["what"]


def test_a_cache_that_cannot_be_written(
    opmux: Opmux, sound: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OPMUX_CACHE", str(tmp_path / "file" / "cache"))
    assert "set OPMUX_CACHE" in problem(opmux("doctor", "--json"))["remedy"]


def test_more_threads_than_cores(opmux: Opmux, sound: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health.compare, "machine", lambda: {"processor": "a processor", "threads": 64, "cores": 2})
    assert problem(opmux("doctor", "--json"))["remedy"].startswith("set OMP_NUM_THREADS=2")


def test_a_missing_default_model_is_only_noted(opmux: Opmux, sound: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_DEFAULT_PACKAGE", "no_such_package")
    done = opmux("doctor", "--json")
    assert done.code == 0
    assert [p["what"] for p in done.json["problems"]] == ["The default model is not installed"]
    assert "pip install" in done.json["problems"][0]["remedy"]

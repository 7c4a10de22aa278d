"""Every test leaves the registries, the environment and the process's knowledge of its parent as it found them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import opmux
from opmux.core import heritage


@pytest.fixture(autouse=True)
def clean_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("OPMUX_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(heritage, "_inherited", {})
    monkeypatch.setattr(heritage, "_said", set())
    with opmux.oot_scope():
        yield


RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """Run code (or a script's path) in a fresh interpreter; the test fails with its stderr unless ``fails`` is set."""

    def run(
        code: str | Path, *, env: dict[str, str] | None = None, options: tuple[str, ...] = (), fails: bool = False
    ) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("OPMUX_")}
        path = os.pathsep.join(filter(None, [str(tmp_path), kept.get("PYTHONPATH", "")]))
        command = [sys.executable, *options, *([str(code)] if isinstance(code, Path) else ["-c", code])]
        done = subprocess.run(
            command, env={**kept, "PYTHONPATH": path, **(env or {})}, capture_output=True, text=True, timeout=120
        )
        assert fails or done.returncode == 0, done.stderr
        return done

    return run


@pytest.fixture
def install_plugin(tmp_path: Path) -> Callable[..., Path]:
    """Lay out an installed distribution in a folder on ``run_python``'s path: a module and its entry points."""

    def install(name: str, module: str, **entry_points: str) -> Path:
        module_file = tmp_path / f"{name}.py"
        module_file.write_text(module)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        groups = dict(entry_points.items())
        (info / "entry_points.txt").write_text(
            "".join(f"[opmux.{group}]\n{name} = {name}:{function}\n" for group, function in groups.items())
        )
        return module_file

    return install

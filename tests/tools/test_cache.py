"""The cache: whole entries or none, one builder at a time, and a clear word where nothing can be written."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest
from safetensors import SafetensorError

from opmux.core.errors import CacheError
from opmux.tools import cache


def fill(path: Path) -> None:
    (path / "weights").write_text("whole")


def names(folder: Path) -> set[str]:
    return {p.name for p in (folder / "models").iterdir() if not p.name.endswith(".lock")}


def test_an_entry_is_built_once(cache_folder: Path) -> None:
    place = cache.entry("a", fill)
    assert place == cache_folder / "models" / "a"
    again: list[Path] = []
    assert cache.entry("a", again.append) == place
    assert again == []
    assert (place / "weights").read_text() == "whole"


def test_a_failed_build_leaves_nothing(cache_folder: Path) -> None:
    def fails(path: Path) -> None:
        fill(path)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cache.entry("a", fails)
    assert names(cache_folder) == set()
    assert (cache.entry("a", fill) / "weights").exists()


KILLED = """
import os, signal
from opmux.tools import cache

def build(path):
    (path / "weights").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)

cache.entry("a", build)
"""


def test_the_run_after_a_killed_one_starts_clean(cache_folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(names(cache_folder)) == 1  # the half-built folder, under a name that nobody reads
    place = cache.entry("a", fill)
    assert (place / "weights").read_text() == "whole"
    assert names(cache_folder) == {"a"}


SLOW = """
import sys, time
from pathlib import Path
from opmux.tools import cache

def build(path):
    with open(sys.argv[1], "a") as log:
        log.write("built\\n")
    time.sleep(0.5)
    (path / "weights").write_text("whole")

print((cache.entry("a", build) / "weights").read_text())
"""


def test_two_processes_build_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", SLOW, str(log)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=60)[0] for process in started] == ["whole\n"] * 2
    assert log.read_text() == "built\n"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=["python", "safetensors"],
)
def test_a_full_disk_is_said_and_nothing_is_kept(cache_folder: Path, error: Exception) -> None:
    def runs_full(path: Path) -> None:
        fill(path)
        raise error

    with pytest.raises(CacheError, match=r"No space is left in .* set OPMUX_CACHE"):
        cache.entry("a", runs_full)
    assert names(cache_folder) == set()


def test_space_is_asked_for_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 10**6, 10**6))
    built: list[Path] = []
    with pytest.raises(CacheError, match="1 MB free, 270 MB needed"):
        cache.entry("a", built.append, needs_bytes=270_000_000)
    assert built == []


def test_a_cache_that_cannot_be_written_gives_way_to_a_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A file where the folder should be: the one obstacle that stops root too.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OPMUX_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="OPMUX_CACHE"):
        place = cache.entry("a", fill)
    assert (place / "weights").read_text() == "whole"
    assert not place.is_relative_to(tmp_path)


def test_a_read_only_file_system_does_too(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(self: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.warns(UserWarning, match="Read-only file system"):
        assert cache.entry("a", fill).is_dir()
    assert not cache_folder.exists()


def test_the_folder_of_the_operating_system_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPMUX_CACHE")
    assert cache.folder().name == "opmux"


def test_a_built_entry_costs_no_lock(cache_folder: Path) -> None:
    (cache_folder / "models" / "a").mkdir(parents=True)
    start = time.perf_counter()
    cache.entry("a", fill)
    assert time.perf_counter() - start < 0.1
    assert not (cache_folder / "models" / "a.lock").exists()

"""The user's cache folder: entries are built beside their place and moved in whole, by one process at a time."""

from __future__ import annotations

import atexit
import errno
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import filelock
import platformdirs

from ..core.errors import CacheError

VARIABLE = "OPMUX_CACHE"
_PARTIAL = ".partial-"


def folder() -> Path:
    """``$OPMUX_CACHE``, or the user's cache folder of this operating system. It need not exist."""
    given = os.environ.get(VARIABLE)
    return Path(given).expanduser() if given else platformdirs.user_cache_path("opmux", appauthor=False)


def entry(key: str, build: Callable[[Path], None], *, needs_bytes: int = 0) -> Path:
    """The folder ``models/<key>`` of the cache, built by ``build(path)`` if it is not there.

    A half-built entry is never seen: ``build`` fills a folder beside the final place, which is then renamed. What a
    killed process left behind is removed by the next one. Where the cache cannot be written, the entry goes, with a
    warning, to a temporary folder that lasts as long as this process.

    Raises:
        CacheError: the disk is full, or has less than ``needs_bytes`` left.
    """
    place = folder() / "models" / key
    if place.is_dir():
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _require_space(place.parent, needs_bytes)
        lock = filelock.FileLock(place.parent / f"{key}.lock")
        with lock:
            if not place.is_dir():
                _build(place, build)
    except OSError as error:
        if _is_full(error):
            raise _no_space(place.parent, needs_bytes) from error
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise CacheError(
                f"The cache folder {place.parent} cannot be used: {error}. Set {VARIABLE} to another folder."
            ) from error
        return _temporary(place, error, build, needs_bytes)
    return place


def _build(place: Path, build: Callable[[Path], None]) -> None:
    # The lock is held, so whatever carries this mark belongs to a process that was killed.
    for stale in place.parent.glob(f"{place.name}{_PARTIAL}*"):
        shutil.rmtree(stale, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{place.name}{_PARTIAL}", dir=place.parent))
    try:
        build(partial)
        os.replace(partial, place)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, Exception) and _is_full(error):
            raise _no_space(place.parent, 0) from error
        raise


def _temporary(place: Path, error: OSError, build: Callable[[Path], None], needs_bytes: int) -> Path:
    parent = Path(tempfile.mkdtemp(prefix="opmux-"))
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    warnings.warn(
        f"The cache folder {place.parent} cannot be written ({error.strerror}), so the converted model lasts only as "
        f"long as this process. Set {VARIABLE} to a folder that can be written.",
        stacklevel=3,
    )
    _require_space(parent, needs_bytes)
    _build(parent / place.name, build)
    return parent / place.name


def _require_space(where: Path, needs_bytes: int) -> None:
    if needs_bytes > shutil.disk_usage(where).free:
        raise _no_space(where, needs_bytes)


def _is_full(error: BaseException) -> bool:
    # safetensors writes in Rust and reports the operating system's error as text.
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or f"os error {errno.ENOSPC}" in str(error)


def _no_space(where: Path, needs_bytes: int) -> CacheError:
    free = f"{shutil.disk_usage(where).free / 1e6:,.0f} MB free"
    needed = f", {needs_bytes / 1e6:,.0f} MB needed" if needs_bytes else ""
    return CacheError(
        f"No space is left in {where} ({free}{needed}). Nothing was kept of the unfinished entry. Free some space, or "
        f"set {VARIABLE} to a folder on a larger disk."
    )

"""What of this installation works: facts, and problems with their remedies."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from ..core.errors import ModelError, OpmuxError
from . import cache, compare, models

# Each of these changes what opmux does.
_VARIABLES = (
    "OPMUX_PLATFORM", "OPMUX_PLUGINS", "OPMUX_STRICT_PLUGINS", "OPMUX_COMPILATION_CONFIG", "OPMUX_CONFIG",
    "OPMUX_CACHE", "OPMUX_NATIVE_VARIANT", "TRITON_INTERPRET", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "HF_HOME",
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """Something that is not as it should be. ``serious``: opmux is slower or does less than it was installed for."""

    what: str
    remedy: str
    serious: bool = True


@dataclass
class Health:
    """Facts by section and name, and what is wrong."""

    facts: dict[str, dict[str, str]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Whether no serious problem was found."""
        return not any(problem.serious for problem in self.problems)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"sound": self.sound, "problems": [asdict(p) for p in self.problems], **self.facts}


def examine() -> Health:
    """Look at everything; one failing part does not hide the others."""
    health = Health()
    looks: dict[str, Callable[[Health], dict[str, str]]] = {
        "versions": _versions,
        "platform": _platform,
        "cpu": _cpu,
        "compilers": _compilers,
        "plugins": _plugins,
        "model": _model,
        "folders": _folders,
        "environment": lambda _: {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
    for section, look in looks.items():
        try:
            health.facts[section] = look(health)
        except OpmuxError as error:
            health.facts[section] = {}
            health.problems.append(Problem(f"{section}: {error}", "Do as the message says, then run doctor again."))
    return health


def _versions(health: Health) -> dict[str, str]:
    found = compare.versions()
    if found["transformers"] is None:
        health.problems.append(
            Problem(
                "transformers is not installed, so `opmux run` and `opmux.apply` have no models",
                "pip install 'opmux[transformers]'",
                serious=False,
            )
        )
    return {name: version or "not installed" for name, version in found.items()}


def _platform(health: Health) -> dict[str, str]:
    from .. import platforms

    here = platforms.current()
    if not here.present:
        health.problems.append(
            Problem(
                f"{platforms.VARIABLE}={here.platform.name} is set, but its hardware is not there: decisions "
                "can be shown, kernels cannot run",
                f"unset {platforms.VARIABLE}",
            )
        )
    every = (*platforms.vendors().values(), *platforms.BUILT_IN)
    present = [p.name for p in every if p.detect() is not None]
    return {"name": here.platform.name, "found by": here.how, "present": ", ".join(present)}


def _cpu(health: Health) -> dict[str, str]:
    from ..native import library

    machine = compare.machine()
    facts = {
        "processor": machine["processor"],
        "threads": f"{machine['threads']} of {machine['cores']} cores",
        "compiled kernels": f"variant {library.variant}, called by {library.calls_by}" if library.available else "none",
        "instruction sets in use": ", ".join(sorted(library.isa)) or "none",
        "variants that run here": ", ".join(library.supported()) or "none",
        "built by": library.build.get("compiler_version") or "no compiler",
    }
    if not library.available:
        reason = library.reason or "the reason is not known"
        what, _, remedy = reason.rpartition("; ")
        health.problems.append(Problem(f"The CPU ops run native, without kernels: {what or reason}", remedy or reason))
    elif library.calls_by == "ctypes":
        health.problems.append(
            Problem(
                "Kernels are called by ctypes, a microsecond slower a call, because the fast-call extension is missing",
                "install g++ and the Python headers, then run: python -m opmux.native.build",
                serious=False,
            )
        )
    if machine["threads"] > machine["cores"]:
        health.problems.append(
            Problem(
                f"{machine['threads']} threads share {machine['cores']} cores, and will wait for each other",
                f"set OMP_NUM_THREADS={machine['cores']}, or give --threads",
            )
        )
    return facts


def _compilers(health: Health) -> dict[str, str]:
    from .. import platforms
    from ..platforms.interface import triton_interprets, triton_missing

    missing = triton_missing()
    gpu = platforms.current().platform.kind in ("cuda", "rocm", "xpu")
    if missing is not None and gpu:
        remedy = missing.rpartition("; ")[2].strip("`")
        health.problems.append(Problem("The GPU ops run native: Triton is missing", remedy))
    triton = missing or ("interprets its kernels (TRITON_INTERPRET=1)" if triton_interprets() else "there")
    jax = compare.versions()["jax"]
    return {
        "triton (GPU kernels)": triton if gpu or missing is None else f"{triton} (needed only for a GPU)",
        "jax (TPU kernels)": "there" if jax else "not installed (needed only for a TPU)",
    }


def _plugins(health: Health) -> dict[str, str]:
    from .. import platforms
    from ..core import plugins

    plugins.load_general_plugins()
    platforms.vendors()
    facts = {}
    for record in plugins.records():
        facts[f"{record.name} ({record.group})"] = f"{record.status}: {record.value} {record.detail}".strip()
        if record.status == "failed":
            health.problems.append(
                Problem(
                    f"The plugin {record.name!r} ({record.value}) was skipped: {record.detail}",
                    f"fix or uninstall it, or name the plugins to load in {plugins.ALLOW_VARIABLE}",
                )
            )
    return facts or {"installed": "none"}


def _model(health: Health) -> dict[str, str]:
    try:
        found = models.find(None).place
    except ModelError as error:
        health.problems.append(Problem("The default model is not installed", str(error), serious=False))
        found = "not installed"
    return {models.DEFAULT_MODEL: found}


def _folders(health: Health) -> dict[str, str]:
    folder = cache.folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        state = "can be written"
    except OSError as error:
        state = f"cannot be written: {error.strerror}"
        health.problems.append(
            Problem(
                f"The cache folder {folder} {state}, so a GGUF model is converted anew in every process",
                f"set {cache.VARIABLE} to a folder that can be written",
            )
        )
    return {"cache": f"{folder} ({state})"}

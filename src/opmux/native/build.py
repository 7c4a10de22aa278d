"""Compiles the CPU kernels: at install (setup.py runs this file) and later by ``python -m opmux.native.build``.

Every ``ops/*/kernels_cpu*.cpp`` is compiled once per instruction-set variant, and each variant is linked into one
shared library; the loader picks the best one for the processor at run time. A failure never raises: it is recorded in
``lib/build.json``, where ``opmux doctor`` finds it, and the ops run native.

Only the standard library is used, and nothing of opmux is imported: at install time there is no opmux yet.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

COMMON_FLAGS = [
    *["-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-Wall"],
    # Reductions may be vectorised; infinities and NaN keep their meaning, which -ffast-math would take from them.
    *["-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"],
]

X86 = {
    "v2": ["-march=x86-64-v2"],
    "v3": ["-march=x86-64-v3"],
    "v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
    "v4bf16": ["-march=x86-64-v4", "-mprefer-vector-width=512", "-mavx512bf16", "-mavx512vnni"],
}
VARIANTS = {"x86_64": X86, "AMD64": X86, "aarch64": {"neon": ["-march=armv8-a"]}, "arm64": {"neon": ["-march=armv8-a"]}}

FASTCALL = "_fastcall.abi3.so"
# A source may ask for flags of its own in a line that begins so.
SOURCE_FLAGS = "// flags:"


@dataclass
class Report:
    """What a build made, and what it did not and why; written to ``lib/build.json``."""

    compiler: str | None = None
    compiler_version: str | None = None
    machine: str = field(default_factory=lambda: platform.machine())
    variants: list[str] = field(default_factory=list)
    fastcall: bool = False
    errors: dict[str, str] = field(default_factory=dict)

    def warning(self) -> str | None:
        """One paragraph for the person who installs, or None if everything was built."""
        if not self.errors:
            return None
        lost = "; ".join(f"{what}: {why.splitlines()[0]}" for what, why in self.errors.items())
        effect = f"only {', '.join(self.variants)} built" if self.variants else "none built, so CPU ops run native"
        return f"opmux CPU kernels: {effect} ({lost}). Install g++ (or set CXX), then run: python -m opmux.native.build"


def sources(package: Path) -> list[Path]:
    """The kernel sources of the package folder."""
    return [package / "native" / "library.cpp", *sorted(package.glob("ops/*/kernels_cpu*.cpp"))]


def headers(source: Path, package: Path) -> list[Path]:
    """The package's headers that ``source`` includes, directly or through another."""
    found: dict[Path, None] = {}
    waiting = [source]
    while waiting:
        file = waiting.pop()
        for name in re.findall(r'^#include "(.+)"', file.read_text(), re.MULTILINE):
            header = next((p for p in (file.parent / name, package / "native" / name) if p.exists()), None)
            if header and header not in found:
                found[header] = None
                waiting.append(header)
    return sorted(found)


def library_name(variant: str) -> str:
    """The file name of a variant's library."""
    return f"libopmux_{variant}.so"


def build(package: Path, destination: Path, objects: Path, variants: Sequence[str] = ()) -> Report:
    """Build everything of the package folder ``package`` into the package folder ``destination``.

    ``variants`` limits the build to these of the machine's. Object files are kept in ``objects`` under names that hold
    a hash of all that went into them, so that a second build compiles what changed.
    """
    report = Report()
    lib = destination / "native" / "lib"
    lib.mkdir(parents=True, exist_ok=True)
    try:
        compiler = _find_compiler(report)
        if compiler:
            objects.mkdir(parents=True, exist_ok=True)
            _build_variants(report, compiler, package, lib, objects, variants)
            _build_fastcall(report, compiler, package, destination)
    except OSError as error:
        report.errors["build"] = str(error)
    (lib / "build.json").write_text(json.dumps(asdict(report), indent=2) + "\n")
    return report


def _find_compiler(report: Report) -> list[str] | None:
    wanted = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if not os.environ.get("CXX") and not shutil.which("g++"):
        wanted = ["c++"]
    report.compiler = shlex.join(wanted)
    try:
        output = subprocess.run([*wanted, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        report.errors["compiler"] = f"no C++ compiler: {report.compiler!r} does not run ({error})"
        return None
    report.compiler_version = output.splitlines()[0] if output else "unknown"
    return wanted


def _build_variants(
    report: Report, compiler: list[str], package: Path, lib: Path, objects: Path, wanted: Sequence[str]
) -> None:
    variants = VARIANTS.get(report.machine, {"generic": []})
    variants = {name: flags for name, flags in variants.items() if not wanted or name in wanted}

    def compile_one(job: tuple[str, Path]) -> tuple[Path, str | None]:
        variant, source = job
        text = source.read_text()
        own = [line.removeprefix(SOURCE_FLAGS).split() for line in text.splitlines() if line.startswith(SOURCE_FLAGS)]
        flags = [*COMMON_FLAGS, *variants[variant], *itertools.chain(*own), f"-I{package / 'native'}"]
        inputs = [report.compiler_version, *flags, text, *(path.read_text() for path in headers(source, package))]
        stem = f"{variant}-{source.parent.name}-{source.stem}"
        target = objects / f"{stem}-{hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]}.o"
        if target.exists():
            return target, None
        partial = target.with_suffix(f".{os.getpid()}")
        error = _run([*compiler, *flags, "-c", str(source), "-o", str(partial)])
        if error is None:
            for stale in objects.glob(f"{stem}-*.o"):
                stale.unlink()
            partial.replace(target)
        return target, error

    jobs = [(variant, source) for source in sources(package) for variant in variants]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = dict(zip(jobs, pool.map(compile_one, jobs), strict=True))
    for variant in variants:
        made = [result for (name, _), result in results.items() if name == variant]
        error = next((error for _, error in made if error), None)
        target = lib / library_name(variant)
        # Linked beside and moved into place: a process that has the old library loaded keeps it.
        partial = target.with_suffix(f".{os.getpid()}")
        error = error or _run([*compiler, "-shared", "-fopenmp", *(str(path) for path, _ in made), "-o", str(partial)])
        if error:
            report.errors[variant] = error
            target.unlink(missing_ok=True)
        else:
            partial.replace(target)
            report.variants.append(variant)


def _build_fastcall(report: Report, compiler: list[str], package: Path, destination: Path) -> None:
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").exists():
        report.errors["fastcall"] = f"no Python headers in {include}; kernels are called by ctypes, about 1 us slower"
        return
    target = destination / "native" / FASTCALL
    partial = target.with_suffix(f".{os.getpid()}")
    source = package / "native" / "fastcall.cpp"
    error = _run([*compiler, "-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{include}",
                  str(source), "-o", str(partial)])  # fmt: skip
    if error:
        report.errors["fastcall"] = error
    else:
        partial.replace(target)
        report.fastcall = True


def _run(command: list[str]) -> str | None:
    """Run a compiler; what it said if it failed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else (done.stderr.strip() or f"{command[0]} returned {done.returncode}")


def main() -> int:
    """Build in place, into the package that holds this file."""
    names = list(VARIANTS.get(platform.machine(), {"generic": []}))
    parser = argparse.ArgumentParser(prog="python -m opmux.native.build", description="Compile opmux's CPU kernels.")
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=f"of {', '.join(names)}; all if none is named")
    wanted = parser.parse_args().variants
    if unknown := set(wanted).difference(names):
        parser.error(f"unknown variant {', '.join(unknown)}; this machine has {', '.join(names)}")
    package = Path(__file__).resolve().parent.parent
    report = build(package, package, package / "native" / "objects", wanted)
    for what, why in report.errors.items():
        print(f"{what}: {why}", file=sys.stderr)
    print(f"built {', '.join(report.variants) or 'nothing'} with {report.compiler_version}")
    return 0 if report.variants else 1


if __name__ == "__main__":
    sys.exit(main())

"""Adds the compiled CPU kernels to the build; everything else is in pyproject.toml."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

PACKAGE = Path("src", "opmux")

# Loaded by path: the package itself needs torch, which a build environment does not have.
_spec = importlib.util.spec_from_file_location("opmux_native_build", PACKAGE / "native" / "build.py")
native = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = native
_spec.loader.exec_module(native)


class BuildNative(Command):
    """A sub-command of ``build`` (setuptools' SubCommand protocol) that compiles the kernels for every variant."""

    description = "compile the CPU kernels for every instruction-set variant"
    user_options = [("build-lib=", None, "folder that receives the packages"), ("build-temp=", None, "object files")]

    def initialize_options(self) -> None:
        self.build_lib = None
        self.build_temp = None
        self.editable_mode = False
        self.report = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"), ("build_temp", "build_temp"))

    @property
    def destination(self) -> Path:
        return PACKAGE if self.editable_mode else Path(self.build_lib, "opmux")

    def run(self) -> None:
        if not self.editable_mode:
            # What an earlier build left in build/ must not reach the wheel if this build fails.
            shutil.rmtree(self.destination / "native" / "lib", ignore_errors=True)
        self.report = native.build(PACKAGE, self.destination, Path(self.build_temp, "opmux"))
        if self.report.warning():
            self.warn(self.report.warning())

    def get_outputs(self) -> list[str]:
        variants = native.VARIANTS.get(native.Report().machine, {"generic": []})
        lib = self.destination / "native" / "lib"
        made = [lib / "build.json", *(lib / native.library_name(v) for v in variants), lib.parent / native.FASTCALL]
        return [str(path) for path in made if path.exists()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        kernels = native.sources(PACKAGE)
        headers = {header for source in kernels for header in native.headers(source, PACKAGE)}
        return [str(path) for path in [*kernels, *sorted(headers), PACKAGE / "native" / "fastcall.cpp"]]


class Build(build):
    sub_commands = [*build.sub_commands, ("build_native", None)]


class Wheel(bdist_wheel):
    """The libraries depend on the platform, not on the Python: without the small extension, ctypes serves."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(
    distclass=PlatformDistribution,
    cmdclass={"build": Build, "build_native": BuildNative, "bdist_wheel": Wheel},
)

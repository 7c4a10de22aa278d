"""Contract P1 and P3: which platform this is, forced ones, vendors' ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import opmux
from opmux import platforms
from opmux.core import plugins
from opmux.core.custom_op import CustomOp
from opmux.core.errors import HardwareMissingError, PlatformError, PluginError
from opmux.ops import RMSNorm, SiluAndMul
from opmux.platforms import Platform

X = torch.ones(2, 4)
on_a_cpu = pytest.mark.skipif(torch.accelerator.is_available(), reason="speaks of a machine without an accelerator")

FORCED = {
    "cpu": "forward_cpu", "cuda": "forward_cuda", "rocm": "forward_hip", "xpu": "forward_xpu", "tpu": "forward_tpu",
    "oot": "forward_oot",
}  # fmt: skip


class Everywhere(CustomOp):
    """Each method says its name."""

    def forward_native(self, x: Tensor) -> Any:
        return "forward_native"

    forward_cpu = lambda self, x: "forward_cpu"  # noqa: E731
    forward_cuda = lambda self, x: "forward_cuda"  # noqa: E731
    forward_hip = lambda self, x: "forward_hip"  # noqa: E731
    forward_xpu = lambda self, x: "forward_xpu"  # noqa: E731
    forward_tpu = lambda self, x: "forward_tpu"  # noqa: E731
    forward_oot = lambda self, x: "forward_oot"  # noqa: E731


@on_a_cpu
def test_p1_detected() -> None:
    assert opmux.current_platform.name == "cpu"
    assert platforms.current().present
    assert "CPU is always there" in platforms.current().how


@on_a_cpu
@pytest.mark.parametrize("name", FORCED)
def test_p1_forced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPMUX_PLATFORM", name)
    assert opmux.current_platform.name == name
    assert platforms.current().how == f"OPMUX_PLATFORM={name}"
    op = Everywhere()
    assert op(X) == FORCED[name]
    assert op.decision(X).platform == op.decision().platform == name
    assert op(X.to("meta")) == "forward_native"
    assert opmux.explain(Everywhere).method == FORCED[name]
    monkeypatch.setenv("OPMUX_PLATFORM", "")
    assert Everywhere()(X) == "forward_cpu"


@pytest.mark.parametrize("name", FORCED)
def test_explain_for_another_platform(name: str) -> None:
    assert opmux.explain(Everywhere, platform=name).method == FORCED[name]


@on_a_cpu
@pytest.mark.parametrize("name", ["cuda", "rocm", "xpu"])
def test_forced_without_hardware_a_triton_kernel_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPMUX_PLATFORM", name)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    op = RMSNorm(4).requires_grad_(False)
    assert op.decision(X).method in ("forward_cuda", "forward_hip", "forward_xpu")
    words = rf"rms_norm.forward_\w+ was decided for platform '{name}' \(OPMUX_PLATFORM={name}\).*Unset OPMUX_PLATFORM"
    for _ in range(2):
        with pytest.raises(HardwareMissingError, match=words):
            op(X)
    with pytest.raises(HardwareMissingError, match=r"^silu_and_mul\.forward"):
        SiluAndMul()(X)


@pytest.mark.parametrize("name", ["cuba", "CUDA", "gpu", "all", "3"])
def test_p1_a_typo(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPMUX_PLATFORM", name)
    for _ in range(2):
        with pytest.raises(PlatformError, match=rf"no platform {name!r}.*(cuda|cpu)"):
            opmux.explain("rms_norm")
    with pytest.raises(PlatformError, match="no platform"):
        RMSNorm(4)(X)
    monkeypatch.setenv("OPMUX_PLATFORM", "cpu")
    with pytest.raises(PlatformError, match="Did you mean 'rocm'"):
        opmux.explain("rms_norm", platform="rcom")


# -- vendors ---------------------------------------------------------------------------------------------------------


class Npu(Platform):
    name: ClassVar[str] = "npu"
    device_type: ClassVar[str] = "cpu"  # so that this machine's tensors are its own

    @classmethod
    def detect(cls) -> str | None:
        return "the test says so"


class Absent(Platform):
    name: ClassVar[str] = "absent"
    device_type: ClassVar[str] = "privateuseone"

    @classmethod
    def detect(cls) -> str | None:
        return None


class Second(Npu):
    name: ClassVar[str] = "second"


class Twin(Second):
    name: ClassVar[str] = "npu"


class Nameless(Platform):
    device_type: ClassVar[str] = "cpu"


class Kindless(Npu):
    kind: ClassVar[str] = "gpu"


class NoDetect(Platform):
    name: ClassVar[str] = "no_detect"
    device_type: ClassVar[str] = "cpu"


class Impostor(Npu):
    name: ClassVar[str] = "cuda"


_results: dict[str, Any] = {}


def __getattr__(name: str) -> Any:  # entry points name attributes of this module
    if name not in _results:
        raise AttributeError(name)
    return lambda: _results[name]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Pretend that platform plugins are installed, each with what its callable returns."""
    monkeypatch.setattr(plugins, "_records", {})
    monkeypatch.setattr(platforms, "_vendors", None)
    monkeypatch.setattr(platforms, "_current", None)

    def install(**results: Any) -> None:
        _results.update(results)
        points = [EntryPoint(name, f"{__name__}:{name}", plugins.PLATFORM_GROUP) for name in results]
        monkeypatch.setattr(plugins, "entry_points", lambda group: [p for p in points if p.group == group])

    yield install
    _results.clear()


def test_a_vendors_platform_is_used(installed: Callable[..., None]) -> None:
    installed(npu=Npu, other=Absent, nothing=None)
    assert opmux.current_platform is Npu
    assert platforms.current().how == "the test says so"
    op = Everywhere()
    assert op(X) == "forward_oot"
    assert op.decision(X).platform == "npu"
    assert opmux.explain(Everywhere, platform="absent").method == "forward_oot"


def test_a_vendors_platform_by_force(installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    installed(npu=Npu, second=Second)
    monkeypatch.setenv("OPMUX_PLATFORM", "second")
    assert opmux.current_platform is Second
    monkeypatch.setenv("OPMUX_PLATFORM", "npuu")
    with pytest.raises(PlatformError, match="Did you mean 'npu'"):
        opmux.explain("rms_norm")


def test_p3_two_claim_the_machine(installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    installed(a=Npu, b=Second)
    for _ in range(2):
        with pytest.raises(PlatformError, match=r"'npu' and 'second' both claim.*OPMUX_PLATFORM.*OPMUX_PLUGINS"):
            RMSNorm(4)(X)
    monkeypatch.setattr(platforms, "_vendors", None)
    monkeypatch.setenv("OPMUX_PLUGINS", "b")
    assert opmux.current_platform is Second


def test_p3_two_bring_one_name(installed: Callable[..., None]) -> None:
    installed(a=Npu, b=Twin)
    for _ in range(2):
        with pytest.raises(PlatformError, match=r"'a' and 'b' both bring a platform called 'npu'"):
            opmux.explain("rms_norm")


GARBAGE = {
    "a string": ("vendor.Platform", "must return a subclass of opmux.platforms.Platform"),
    "an object": (Npu(), "must return a subclass"),
    "another class": (int, "must return a subclass"),
    "no name": (Nameless, "sets no name"),
    "an unknown kind": (Kindless, "kind 'gpu'; there are cpu, cuda"),
    "no detect": (NoDetect, "NotImplementedError"),
    "a built-in's name": (Impostor, "called 'cuda' like a built-in"),
}


@on_a_cpu
@pytest.mark.parametrize("case", GARBAGE)
def test_p2_a_platform_plugin_that_returns_garbage(
    case: str, installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    result, words = GARBAGE[case]
    installed(broken=result)
    with pytest.warns(plugins.PluginWarning, match=rf"'broken'.*skipped: .*{words}"):
        assert opmux.current_platform.name == "cpu"
    assert Everywhere()(X) == "forward_cpu"
    monkeypatch.setattr(platforms, "_vendors", None)
    monkeypatch.setattr(platforms, "_current", None)
    monkeypatch.setenv("OPMUX_STRICT_PLUGINS", "true")
    for _ in range(2):
        with pytest.raises(PluginError, match=words):
            opmux.explain("rms_norm")

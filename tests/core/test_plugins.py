"""Contract P2 and P4 inside one process: entry points, the allow-list, failing plugins."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from torch import Tensor

import opmux
from opmux.core import plugins
from opmux.core.custom_op import CustomOp
from opmux.core.errors import PluginError
from opmux.ops import RMSNorm

Install = Callable[..., None]
_callables: dict[str, Callable[[], Any]] = {}


def __getattr__(name: str) -> Any:  # entry points name attributes of this module
    if name not in _callables:
        raise AttributeError(name)
    return _callables[name]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Pretend that plugins are installed, in a process that has loaded none."""
    points: list[EntryPoint] = []
    monkeypatch.setattr(plugins, "entry_points", lambda group: [p for p in points if p.group == group])
    monkeypatch.setattr(plugins, "_records", {})
    monkeypatch.setattr(plugins, "_general_started", False)
    monkeypatch.setattr(plugins, "_general_done", False)

    def install(name: str, function: Callable[[], Any], group: str = plugins.GENERAL_GROUP) -> None:
        _callables[name] = function
        points.append(EntryPoint(name, f"{__name__}:{name}", group))

    yield install
    _callables.clear()


def vendor_norm() -> type:
    class VendorNorm(RMSNorm):
        def forward_oot(self, x: Tensor, residual: Tensor | None = None) -> Any:
            return x

    return CustomOp.register_oot("RMSNorm")(VendorNorm)  # type: ignore[no-any-return]


def boom() -> None:
    raise OSError("the vendor's driver is too old")


def test_p2_loaded_once_before_the_first_construction(installed: Install) -> None:
    calls: list[int] = []
    installed("counting", lambda: calls.append(1))
    installed("vendor", vendor_norm)
    assert [type(RMSNorm(4)).__name__ for _ in range(3)] == ["VendorNorm"] * 3
    assert calls == [1]
    assert {(r.name, r.status) for r in plugins.records()} == {("counting", "loaded"), ("vendor", "loaded")}


@pytest.mark.parametrize(
    "first_use",
    [
        lambda: opmux.explain("rms_norm"),
        lambda: opmux.explain(RMSNorm),
        lambda: opmux.CompilationConfig(custom_ops="+rms_norm"),
        lambda: RMSNorm(4),
    ],
)
def test_p2_loaded_before_any_decision(installed: Install, first_use: Callable[[], Any]) -> None:
    installed("vendor", vendor_norm)
    first_use()
    assert opmux.explain("rms_norm").cls.endswith("VendorNorm")


def test_p2_a_plugin_found_twice_is_called_once(installed: Install) -> None:
    calls: list[int] = []
    for _ in range(2):
        installed("twice", lambda: calls.append(1))
    RMSNorm(4)
    assert calls == [1]


def test_c4_ops_of_plugins_are_known(installed: Install) -> None:
    def register() -> None:
        @CustomOp.register("plugin_op")
        class PluginOp(CustomOp):
            def forward_native(self, x: Tensor) -> Tensor:
                return x

    installed("ops", register)
    config = opmux.CompilationConfig(custom_ops=["none", "+plugin_op"])
    assert config.is_custom_op_enabled("PluginOp")


@pytest.mark.parametrize(
    ("value", "loaded"),
    [(None, {"a", "b"}), ("a", {"a"}), (" b , a ", {"a", "b"}), ("", set())],
)
def test_p2_allow_list(
    installed: Install, value: str | None, loaded: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: set[str] = set()
    installed("a", lambda: calls.add("a"))
    installed("b", lambda: calls.add("b"))
    if value is not None:
        monkeypatch.setenv("OPMUX_PLUGINS", value)
    RMSNorm(4)
    assert calls == loaded
    assert {r.name for r in plugins.records() if r.status == "not allowed"} == {"a", "b"} - loaded


def test_p2_allow_list_with_a_name_that_is_not_installed(installed: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("vendor", vendor_norm)
    monkeypatch.setenv("OPMUX_PLUGINS", "vendr")
    with pytest.warns(plugins.PluginWarning, match=r"names the plugin 'vendr', which is not installed.*'vendor'"):
        RMSNorm(4)


def test_p2_a_plugin_that_raises_is_reported_and_skipped(installed: Install) -> None:
    installed("broken", boom)
    installed("vendor", vendor_norm)
    with pytest.warns(plugins.PluginWarning, match=r"'broken'.*skipped: OSError: the vendor's driver is too old"):
        assert type(RMSNorm(4)).__name__ == "VendorNorm"
    (record,) = [r for r in plugins.records() if r.status == "failed"]
    assert record.name == "broken"
    assert "driver" in record.detail


def test_p2_a_skipped_plugin_leaves_nothing_in_force(installed: Install) -> None:
    def half() -> None:
        vendor_norm()
        boom()

    installed("half", half)
    with pytest.warns(plugins.PluginWarning, match="'half'"):
        assert type(RMSNorm(4)) is RMSNorm
    assert not CustomOp.op_registry_oot


def test_p2_a_plugin_that_cannot_be_imported(installed: Install) -> None:
    installed("gone", boom)
    _callables.clear()
    with pytest.warns(plugins.PluginWarning, match=r"'gone' .*AttributeError"):
        RMSNorm(4)


def test_p2_strict_is_fatal_each_time(installed: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPMUX_STRICT_PLUGINS", "1")
    installed("broken", boom)
    for _ in range(2):
        with pytest.raises(PluginError, match=r"'broken'.*OPMUX_STRICT_PLUGINS is set.*driver"):
            RMSNorm(4)


@pytest.mark.filterwarnings("ignore::opmux.core.plugins.PluginWarning")
def test_p2_a_strict_config_is_fatal_too(installed: Install) -> None:
    installed("broken", boom)
    RMSNorm(4)
    with (
        opmux.use_config(opmux.CompilationConfig(strict=True)),
        pytest.raises(PluginError, match=r"'broken'.*strict=True is set.*driver"),
    ):
        RMSNorm(4)


def test_p2_other_threads_wait_for_the_registrations(installed: Install) -> None:
    started = threading.Event()

    def slow() -> None:
        started.set()
        time.sleep(0.2)
        vendor_norm()

    installed("slow", slow)
    built: list[str] = []
    first = threading.Thread(target=lambda: built.append(type(RMSNorm(4)).__name__))
    first.start()
    started.wait(10)
    built.append(type(RMSNorm(4)).__name__)
    first.join()
    assert built == ["VendorNorm"] * 2


@pytest.fixture
def declares(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Have this module, which stands for the plugin's, declare a version of the interface."""
    return lambda version: monkeypatch.setattr(sys.modules[__name__], "OPMUX_API", version, raising=False)


def test_a_plugin_of_this_version(installed: Install, declares: Callable[[Any], None]) -> None:
    declares(plugins.API_VERSION)
    installed("vendor", vendor_norm)
    assert type(RMSNorm(4)).__name__ == "VendorNorm"
    assert [r.api for r in plugins.records()] == [plugins.API_VERSION]


@pytest.mark.parametrize(
    ("version", "remedy"),
    [(plugins.API_VERSION + 1, "a newer opmux"), (0, "a newer version of the plugin"), ("two", "a newer version of the")],
)
def test_a_plugin_of_another_version(
    installed: Install, declares: Callable[[Any], None], version: Any, remedy: str
) -> None:
    declares(version)
    installed("vendor", vendor_norm)
    words = rf"'vendor'.*OPMUX_API = {version!r}, and this opmux has version 1 of the plugin interface.*{remedy}"
    with pytest.warns(plugins.PluginWarning, match=words):
        assert type(RMSNorm(4)) is RMSNorm


def test_the_record_names_what_a_plugin_registered(installed: Install) -> None:
    vendor = vendor_norm()
    installed("vendor", lambda: CustomOp.register_oot(vendor, "RMSNorm"))  # a second time, as at a reload
    installed("nothing", lambda: None)
    RMSNorm(4)
    assert {r.name: r.registered for r in plugins.records()} == {"vendor": (vendor,), "nothing": ()}

"""`opmux list` and `opmux explain`: the core's own decisions, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opmux import CompilationConfig, CustomOp, explain
from opmux.core.registry import op_registry
from opmux.ops import RMSNorm

Opmux = Any


def ops_of(done: Any) -> dict[str, Any]:
    return {op["name"]: op for op in done.json["ops"]}


def test_list_has_every_op_with_both_names(opmux: Opmux) -> None:
    ops = ops_of(opmux("list", "--json"))
    assert set(ops) == set(op_registry)
    assert ops["rms_norm"]["class"] == "RMSNorm"
    assert ops["rms_norm"]["implemented"]["rocm"] == ["forward_hip", "forward_cuda"]
    text = opmux("list").out
    assert all(name in text and cls.__name__ in text for name, cls in op_registry.items())


def test_list_says_what_is_enabled_and_by_what(opmux: Opmux) -> None:
    done = opmux("list", "--json", "-cc.custom_ops", "all,-rms_norm")
    ops = ops_of(done)
    assert (ops["rms_norm"]["enabled"], ops["rms_norm"]["runs"]) == (False, "forward_native")
    assert ops["rms_norm"]["directive"] == "'-rms_norm' is given"
    assert ops["rms_norm"]["directive_source"] == "command line"
    assert ops["silu_and_mul"]["enabled"]
    text = opmux("list", "-cc.custom_ops", "all,-rms_norm").out
    assert "'-rms_norm' is given (command line)" in text
    assert "custom_ops from command line" in text


def test_list_says_why_a_kernel_cannot_run_here(opmux: Opmux, monkeypatch: pytest.MonkeyPatch) -> None:
    from opmux import native
    from opmux.native.loader import NativeLibrary

    monkeypatch.setattr(native, "library", NativeLibrary(variant="none"))
    ops = ops_of(opmux("list", "--json", "--platform", "cpu"))
    assert ops["rms_norm"]["runs"] == "forward_native"
    assert "needs the compiled CPU library" in ops["rms_norm"]["rejected"]["forward_cpu"]
    assert "needs the compiled CPU library" in opmux("list", "--platform", "cpu").out


def test_list_shows_replacements_and_pending_ones(opmux: Opmux) -> None:
    class VendorNorm(RMSNorm):
        def forward_oot(self, x: Any, residual: Any = None) -> Any:
            return self.forward_native(x, residual)

    class Waiting(CustomOp):
        def forward_native(self, x: Any) -> Any:
            return x

    CustomOp.register_oot(VendorNorm, "RMSNorm")
    CustomOp.register_oot(Waiting, "NotThereYet", lazy=True)
    done = opmux("list", "--json")
    assert ops_of(done)["rms_norm"]["replacement"].endswith("VendorNorm")
    assert ops_of(done)["rms_norm"]["runs"] == "forward_oot"
    assert done.json["pending_replacements"]["NotThereYet"].endswith("Waiting")
    text = opmux("list").out
    assert "replaced by" in text
    assert "'NotThereYet'" in text


def test_list_for_another_platform(opmux: Opmux) -> None:
    assert ops_of(opmux("list", "--json", "--platform", "rocm"))["rms_norm"]["runs"] == "forward_hip"


def test_explain_an_op_without_the_hardware(opmux: Opmux) -> None:
    words = ("explain", "rms_norm", "--platform", "rocm", "--dtype", "float16", "--shape", "1x4096")
    decision = opmux(*words, "--json").json
    assert (decision["cls"], decision["method"], decision["dtype"]) == ("RMSNorm", "forward_hip", "float16")
    assert {r["candidate"] for r in decision["rejected"]} == {"forward_cuda", "forward_native"}
    text = opmux(*words).out
    assert "rms_norm on rocm, float16, 1x4096 runs RMSNorm.forward_hip" in " ".join(text.split())
    assert "not forward_cuda" in text


def test_explain_is_the_decision_of_the_core(opmux: Opmux) -> None:
    said = opmux("explain", "RMSNorm", "--json", "-cc.custom_ops", "none").json
    expected = explain("rms_norm", config=CompilationConfig(custom_ops=["none"])).to_dict()
    assert said.pop("directive_source") == "command line"
    assert expected.pop("directive_source") == "argument"
    assert said == json.loads(json.dumps(expected))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rms_nrom"], "'rms_norm'"),
        (["rms_norm", "--platform", "rcm"], "Did you mean 'rocm'"),
        (["rms_norm", "--shape", "big"], "--shape big"),
        (["rms_norm", "--device", "cpu"], "say --platform"),
        (["no_such_thing"], "neither an op nor a model"),
        (["/no/such/model"], "no such file or folder"),
        (["owner/model", "--platform", "rocm"], "--platform goes with an op"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_explain_answers_mistakes(opmux: Opmux, words: list[str], message: str) -> None:
    done = opmux("explain", *words)
    assert (done.code, done.out) == (2, "")
    assert message in done.err


def test_explain_a_model_is_the_report_of_apply(opmux: Opmux, saved_model: Path) -> None:
    entries = opmux("explain", saved_model, "--dtype", "float32", "--device", "cpu", "--json").json["report"]["entries"]
    assert {"path", "op", "class", "method", "status", "reason"} <= set(entries[0])
    assert any(e["path"] == "model.norm" and e["op"] == "rms_norm" for e in entries)
    assert "model.layers.*" in opmux("explain", saved_model, "--dtype", "float32", "--device", "cpu").out

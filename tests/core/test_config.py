"""Contract section 3: directives, the config and its scope (C1-C9)."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import opmux
from opmux import CompilationConfig, CompilationMode, CustomOp, use_config
from opmux.core.config import current_config
from opmux.core.errors import ConfigError, DirectiveError
from opmux.ops import GemmaRMSNorm, RMSNorm, SiluAndMul

NAMES = ("rms_norm", "silu_and_mul", "gemma_rms_norm")


def states(config: CompilationConfig) -> dict[str, bool]:
    return {name: config.is_custom_op_enabled(name) for name in NAMES}


ALL, NONE = dict.fromkeys(NAMES, True), dict.fromkeys(NAMES, False)

GRAMMAR: list[tuple[Any, dict[str, bool]]] = [
    (["all"], ALL),
    ("all", ALL),
    (("all",), ALL),
    ([" all "], ALL),
    ([], ALL),
    (["none"], NONE),
    ("none", NONE),
    (["all", "-rms_norm"], {**ALL, "rms_norm": False}),
    (["all,-rms_norm"], {**ALL, "rms_norm": False}),
    ("all,-rms_norm", {**ALL, "rms_norm": False}),
    (" all , -rms_norm ", {**ALL, "rms_norm": False}),
    (["-rms_norm", "all"], {**ALL, "rms_norm": False}),
    (["none,+rms_norm,+silu_and_mul"], {**NONE, "rms_norm": True, "silu_and_mul": True}),
    (("none", "+rms_norm", "+silu_and_mul"), {**NONE, "rms_norm": True, "silu_and_mul": True}),
    (["none,+rms_norm", "+silu_and_mul"], {**NONE, "rms_norm": True, "silu_and_mul": True}),
    (["+rms_norm,-silu_and_mul"], {**ALL, "silu_and_mul": False}),
    (["+RMSNorm", "none"], {**NONE, "rms_norm": True}),
    (["+rms_norm", "+RMSNorm", "+rms_norm", "none"], {**NONE, "rms_norm": True}),
]


@pytest.mark.parametrize(("directives", "wanted"), GRAMMAR)
def test_c1_c2_grammar(directives: Any, wanted: dict[str, bool]) -> None:
    config = CompilationConfig(custom_ops=directives)
    assert states(config) == wanted
    with use_config(config):
        built = {cls.name: cls(8) if cls is not SiluAndMul else cls() for cls in (RMSNorm, SiluAndMul, GemmaRMSNorm)}
        assert {name: op.decision().enabled for name, op in built.items()} == wanted


@pytest.mark.parametrize("backend", [None, "eager", "inductor", "aot_eager"])
@pytest.mark.parametrize("mode", [None, *CompilationMode])
def test_c3_default_base_mode(backend: str | None, mode: CompilationMode | None) -> None:
    config = CompilationConfig(custom_ops=["-silu_and_mul"], backend=backend, mode=mode)
    none = backend == "inductor" and bool(mode)
    assert config.is_custom_op_enabled("rms_norm") is not none
    assert not config.is_custom_op_enabled("silu_and_mul")
    with use_config(config):
        record = opmux.explain("rms_norm")
        assert CustomOp.default_on() is not none
    assert "no base mode is given" in record.directive
    assert f"'{'none' if none else 'all'}'" in record.directive
    assert config.mode.name in record.directive
    assert config.backend in record.directive
    assert record.directive_source == "default"
    named = CompilationConfig(custom_ops="all", backend=backend, mode=mode)
    assert named.is_custom_op_enabled("rms_norm"), "a base mode that is given wins"


BAD = [
    (["all", "none"], r"'all' and 'none'.*one base mode"),
    ("all,none", r"one base mode"),
    (["all", "all"], r"'all' and 'all'"),
    (["none,none"], r"one base mode"),
    (["+rms_norm", "-rms_norm"], r"'\+rms_norm' and '-rms_norm'"),
    (["+rms_norm", "-RMSNorm"], r"'\+rms_norm' and '-RMSNorm'.*either on or off"),
    (["+rms_nrom"], r"'\+rms_nrom'.*no op 'rms_nrom'.*Did you mean 'rms_norm'"),
    (["-SiluAndMull"], r"Did you mean 'SiluAndMul'"),
    (["rms_norm"], r"'rms_norm' is not a directive.*Did you mean '\+rms_norm' or '-rms_norm'"),
    (["rms_nrm"], r"'rms_nrm' is not a directive.*Did you mean 'rms_norm'"),
    (["ALL"], r"'ALL' is not a directive.*Did you mean 'all'"),
    (["+ rms_norm"], r"Did you mean '\+rms_norm'"),
    (["++rms_norm"], r"'\+\+rms_norm' is not a directive.*'all', 'none', '\+op' and '-op'"),
    (["+"], r"'\+' is not a directive"),
    (["-"], r"'-' is not a directive"),
    ([""], r"'' is not a directive"),
    ("", r"'' is not a directive"),
    (["all,"], r"'' is not a directive"),
    (["+all"], r"no op 'all'"),
    (["-rms_norm*"], r"no wildcards"),
    (["+rms norm"], r"'\+rms norm' is not a directive"),
    ('["none", "+rms_norm"]', r"written as JSON must be parsed"),
    ([["none"]], r"list of strings"),
    ([None], r"list of strings"),
    (["all", 3], r"list of strings"),
    (3, r"list of strings"),
    ({"all": 1}, r"list of strings"),
    ({"all"}, r"list of strings"),
    (b"all", r"list of strings"),
    (RMSNorm, r"list of strings"),
]


@pytest.mark.parametrize(("directives", "words"), BAD)
def test_c4_rejected(directives: Any, words: str) -> None:
    with pytest.raises(DirectiveError, match=words):
        CompilationConfig(custom_ops=directives)

    def change() -> None:
        config = CompilationConfig(custom_ops=["all"])
        config.custom_ops = directives
        config.directives()

    with pytest.raises(DirectiveError, match=words):
        change()


ENTRIES = st.one_of(
    st.sampled_from(
        ["all", "none", "+rms_norm", "-rms_norm", "+SiluAndMul", "-silu_and_mul", " all ", "all,-rms_norm"]
    ),
    st.text(max_size=6),
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ENTRIES, max_size=5))
def test_c4_any_list_is_taken_or_refused_by_name(entries: list[str]) -> None:
    try:
        config = CompilationConfig(custom_ops=entries)
    except DirectiveError as error:
        assert any(repr(part.strip()) in str(error) for entry in entries for part in entry.split(","))  # noqa: PT017
    else:
        assert CompilationConfig(custom_ops=",".join(config.custom_ops) if config.custom_ops else []) == config
        assert pickle.loads(pickle.dumps(config)).directives() == config.directives()


def test_c4_checked_again_when_the_list_changes() -> None:
    config = CompilationConfig(custom_ops=["none"])
    config.custom_ops.append("+rms_nrom")
    for ask in (lambda: config.is_custom_op_enabled("rms_norm"), lambda: build_under(config), config.base_mode):
        with pytest.raises(DirectiveError, match="Did you mean 'rms_norm'"):
            ask()
    config.custom_ops[-1] = "+rms_norm"
    assert build_under(config).decision().enabled
    assert opmux.explain("rms_norm", config=config).directive_source == "changed after construction"
    config.custom_ops = "all,-rms_norm"  # type: ignore[assignment]
    assert not build_under(config).decision().enabled


def build_under(config: CompilationConfig) -> Any:
    with use_config(config):
        return RMSNorm(8)


def test_c4_unknown_name_in_a_question() -> None:
    config = CompilationConfig()
    with pytest.raises(DirectiveError, match=r"no op 'silu_and_mull'.*Did you mean 'silu_and_mul'"):
        config.is_custom_op_enabled("silu_and_mull")
    for bad in (None, 3, ["rms_norm"], RMSNorm):
        with pytest.raises(DirectiveError, match="There is no op"):
            config.is_custom_op_enabled(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mode": 4}, r"mode is 4; there are 0 \(NONE\), .*3 \(VLLM_COMPILE\)"),
        ({"mode": "fast"}, "mode is 'fast'; there are"),
        ({"mode": True}, "mode is True"),
        ({"mode": 1.0}, "mode is 1.0"),
        ({"mode": []}, "mode is"),
        ({"backend": ""}, "backend is ''.*'eager' or 'inductor'"),
        ({"backend": 3}, "backend is 3"),
        ({"strict": "yes"}, "strict is 'yes'; it takes true or false"),
        ({"mm_encoder": 3}, "mm_encoder: custom_ops is 3"),
        ({"mm_encoder": ["rms_norm"]}, r"mm_encoder: .*Did you mean '\+rms_norm'"),
        ({"mm_encoder": {"custom_op": ["none"]}}, "mm_encoder has no field 'custom_op'.*Did you mean 'custom_ops'"),
    ],
)
def test_c6_fields_are_checked(fields: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, DirectiveError), match=words):
        CompilationConfig(**fields)
    ((name, value),) = fields.items()
    with pytest.raises((ConfigError, DirectiveError), match=words):
        setattr(CompilationConfig(), name, value)


def test_c6_fields_set_later() -> None:
    config = CompilationConfig()
    config.mode, config.backend = 1, "inductor"  # type: ignore[assignment]
    assert config.mode is CompilationMode.STOCK_TORCH_COMPILE
    assert config.base_mode()[0] == "none"
    with pytest.raises(ConfigError, match=r"no field 'custom_op'.*Did you mean 'custom_ops'"):
        config.custom_op = ["none"]  # type: ignore[attr-defined]


def test_c6_modes() -> None:
    assert [(m.name, m.value) for m in CompilationMode] == [
        ("NONE", 0), ("STOCK_TORCH_COMPILE", 1), ("DYNAMO_TRACE_ONCE", 2), ("VLLM_COMPILE", 3),
    ]  # fmt: skip
    for mode in (3, "3", "VLLM_COMPILE", "vllm_compile", CompilationMode.VLLM_COMPILE):
        assert CompilationConfig(mode=mode).mode is CompilationMode.VLLM_COMPILE  # type: ignore[arg-type]


def test_c6_outside_any_context() -> None:
    config = current_config()
    assert (config.backend, config.mode, config.base_mode()[0]) == ("eager", CompilationMode.NONE, "all")
    assert RMSNorm(4).decision().enabled


def test_c6_nesting_and_exceptions() -> None:
    off, on = CompilationConfig(custom_ops="none"), CompilationConfig(custom_ops="all")
    outside = current_config()
    with use_config(off):
        assert not RMSNorm.enabled()
        with use_config(on):
            assert RMSNorm.enabled()
        assert current_config() is off
        with pytest.raises(ZeroDivisionError), use_config(on):
            raise ZeroDivisionError
        assert current_config() is off
    assert current_config() is outside
    for bad in (None, ["none"], "none", {"custom_ops": ["none"]}):
        with pytest.raises(ConfigError, match="use_config takes a CompilationConfig"), use_config(bad):  # type: ignore[arg-type]
            pass


def test_c6_an_op_keeps_its_config() -> None:
    off, on = CompilationConfig(custom_ops="none"), CompilationConfig(custom_ops="all")
    with use_config(off):
        op = SiluAndMul()
    x = torch.randn(2, 8)
    with use_config(on):
        op(x)
        assert op.decision(x).method == "forward_native"
    op(x)
    assert [r.decision.method for r in op.routes] == ["forward_native"]
    off.custom_ops[:] = ["all"]
    assert op.decision(x).method == "forward_native", "a later change of the config asks for redispatch"
    op.redispatch(on)
    op(x)
    assert [r.decision.method for r in op.routes] == ["forward_cpu"]
    with use_config(CompilationConfig(custom_ops="none")):
        op.redispatch()
    assert op.decision(x).method == "forward_native"


def test_c6_threads_see_their_own_config() -> None:
    seen: dict[str, bool] = {}
    start = threading.Barrier(3)

    def build(name: str) -> None:
        with use_config(CompilationConfig(custom_ops=name)):
            start.wait(10)
            seen[name] = RMSNorm(4).decision().enabled
        seen[f"{name} after"] = RMSNorm(4).decision().enabled

    with use_config(CompilationConfig(custom_ops="none")):
        threads = [threading.Thread(target=build, args=(name,)) for name in ("all", "none", "all,-rms_norm")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == {
        "all": True, "none": False, "all,-rms_norm": False,
        "all after": True, "none after": True, "all,-rms_norm after": True,
    }  # fmt: skip


def test_c6_async_tasks_see_their_own_config() -> None:
    async def build(directives: str) -> bool:
        with use_config(CompilationConfig(custom_ops=directives)):
            await asyncio.sleep(0.01)
            return bool(RMSNorm(4).decision().enabled)

    async def main() -> list[bool]:
        with use_config(CompilationConfig(custom_ops="none")):
            inherited = asyncio.create_task(asyncio.sleep(0, RMSNorm.enabled()))
            return [*await asyncio.gather(build("all"), build("none"), build("all,-rms_norm")), await inherited]

    assert asyncio.run(main()) == [True, False, False, False]


def test_c7_questions_and_counters() -> None:
    config = CompilationConfig(custom_ops=["none", "+rms_norm"])
    with use_config(config):
        assert not CustomOp.default_on()
        assert RMSNorm.enabled()
        assert not SiluAndMul.enabled()
        norms, gate = [RMSNorm(4), RMSNorm(4)], SiluAndMul()
        SiluAndMul(enforce_enable=True)
    assert config.enabled_custom_ops == {"rms_norm": 2, "silu_and_mul": 1}
    assert config.disabled_custom_ops == {"silu_and_mul": 1}
    gate.redispatch(config)
    assert config.disabled_custom_ops == {"silu_and_mul": 1}, "decided anew is not built anew"
    other = CompilationConfig(custom_ops="none")
    norms[0].redispatch(other)
    assert config.enabled_custom_ops["rms_norm"] == 1
    assert other.disabled_custom_ops == {"rms_norm": 1}
    assert config.is_custom_op_enabled("RMSNorm")


# -- C8: precedence --------------------------------------------------------------------------------------------------


def setting(on: str) -> dict[str, Any]:
    return {"custom_ops": ["none", f"+{on}"]}


LAYERS = ["file", "environment", "command line", "argument"]
OPS = ["rms_norm", "silu_and_mul", "gemma_rms_norm", "apply_rotary_emb"]


@pytest.mark.parametrize("present", range(16))
def test_c8_precedence(present: int, tmp_path: Path) -> None:
    layers = [bool(present >> i & 1) for i in range(4)]
    path = tmp_path / "opmux.json"
    path.write_text(json.dumps({"compilation_config": setting(OPS[0])}))
    config = CompilationConfig.resolve(
        file=path if layers[0] else None,
        environ={"OPMUX_COMPILATION_CONFIG": json.dumps(setting(OPS[1]))} if layers[1] else {},
        cli=setting(OPS[2]) if layers[2] else None,
        argument=setting(OPS[3]) if layers[3] else None,
    )
    on = [name for name in OPS if config.is_custom_op_enabled(name)]
    if not present:
        assert on == OPS
        assert config.sources["custom_ops"] == "default"
        return
    winner = max(i for i in range(4) if layers[i])
    assert on == [OPS[winner]]
    record = opmux.explain(OPS[winner], config=config)
    assert record.directive_source.startswith(LAYERS[winner])
    assert LAYERS[winner] in str(record)


def test_c8_fields_are_merged_one_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "opmux.yaml"
    path.write_text("compilation_config:\n  backend: inductor\n  mode: 1\n  custom_ops: none\n")
    monkeypatch.setenv("OPMUX_CONFIG", str(path))
    monkeypatch.setenv("OPMUX_COMPILATION_CONFIG", '{"custom_ops": "none,+rms_norm", "strict": true}')
    config = CompilationConfig.resolve(cli={"mode": 2})
    assert (config.backend, config.mode, config.strict) == ("inductor", CompilationMode.DYNAMO_TRACE_ONCE, True)
    assert config.sources == {
        "backend": f"file {path}", "mode": "command line", "custom_ops": "environment OPMUX_COMPILATION_CONFIG",
        "strict": "environment OPMUX_COMPILATION_CONFIG", "mm_encoder": "default",
    }  # fmt: skip
    assert not SiluAndMul().decision().enabled, "outside any context the environment and the file hold"
    assert RMSNorm(4).decision().directive_source == "environment OPMUX_COMPILATION_CONFIG"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{custom_ops: none}", r"OPMUX_COMPILATION_CONFIG is not JSON .*Example"),
        ('["none"]', r"OPMUX_COMPILATION_CONFIG holds \['none'\]; it takes a mapping of custom_ops"),
        ("3", "it takes a mapping"),
        ('{"custom_op": ["none"]}', r"no field 'custom_op' \(environment .*Did you mean 'custom_ops'"),
        ('{"custom_ops": ["+rms_nrom"]}', r"Did you mean 'rms_norm'.*custom_ops from environment"),
        ('{"mode": 9}', r"mode is 9.*mode from environment"),
    ],
)
def test_c8_malformed_environment(text: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPMUX_COMPILATION_CONFIG", text)
    for _ in range(2):
        with pytest.raises((ConfigError, DirectiveError), match=words):
            RMSNorm(4)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "{", "cannot be parsed"),
        ("a.yaml", "a: [", "cannot be parsed"),
        ("a.json", "[]", "it takes a mapping"),
        ("a.yaml", "compilation_config: [none]", r"compilation_config in .*a.yaml holds \['none'\]"),
        ("missing.json", None, "cannot be read: No such file"),
    ],
)
def test_c8_malformed_file(name: str, text: str | None, words: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words):
        CompilationConfig.resolve(file=tmp_path / name, environ={})


@pytest.mark.parametrize("layer", ["cli", "argument"])
def test_c8_wrong_types(layer: str) -> None:
    with pytest.raises(ConfigError, match="takes a mapping of custom_ops"):
        CompilationConfig.resolve(environ={}, **{layer: ["none"]})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"no field 'customops'.*Did you mean 'custom_ops'"):
        CompilationConfig.resolve(environ={}, **{layer: {"customops": ["none"]}})


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_c8_configs_travel(copy_of: Any) -> None:
    config = CompilationConfig.resolve(
        cli={"custom_ops": "none,+rms_norm", "mm_encoder": ["all", "-silu_and_mul"], "strict": True}, environ={}
    )
    twin = copy_of(config)
    assert twin == config
    assert twin.to_dict() == config.to_dict()
    assert twin.sources["custom_ops"] == "command line"
    assert states(twin) == states(config)
    assert not twin.mm_encoder.is_custom_op_enabled("silu_and_mul")
    twin.custom_ops.append("+silu_and_mul")
    assert not config.is_custom_op_enabled("silu_and_mul")
    assert twin != config


def test_c9_the_encoders_config() -> None:
    config = CompilationConfig(backend="inductor", mode=1)
    encoder, enforced = config.for_encoder()
    assert encoder is config
    assert enforced
    for own in (["all", "-apply_rotary_emb"], "all,-apply_rotary_emb", {"custom_ops": ["all", "-apply_rotary_emb"]}):
        encoder, enforced = CompilationConfig(custom_ops="none", mm_encoder=own).for_encoder()
        assert not enforced
        assert not encoder.is_custom_op_enabled("apply_rotary_emb")
        assert encoder.is_custom_op_enabled("rms_norm")
    with use_config(config):
        op = type("Tower", (RMSNorm,), {})(4, enforce_enable=True)
        assert op.decision().enabled
        assert "enforce_enable=True" in op.decision().directive


def test_b53_variants_follow_their_family() -> None:
    class Variant(RMSNorm):
        def forward_cpu(self, x: Tensor, residual: Tensor | None = None) -> Any:
            return "variant"

    with use_config(CompilationConfig(custom_ops="all,-rms_norm")):
        assert Variant(4).decision().method == "forward_native"
        assert "'-rms_norm' is given" in Variant(4).decision().directive

"""One setting, every spelling and every place."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from opmux.cli import options
from opmux.core.config import ENVIRONMENT, FIELDS, FILE_ENVIRONMENT, CompilationConfig
from opmux.core.errors import ConfigError

Opmux = Any
BOTH = ["none", "+rms_norm"]


def config_of(*words: str) -> CompilationConfig:
    call = options.parse(["list", *words])
    call.resolve()
    return call.args.compilation_config


@pytest.mark.parametrize(
    "words",
    [
        ["--compilation_config.custom_ops", '["none","+rms_norm"]'],
        ["--compilation_config.custom_ops", '["none,+rms_norm"]'],
        ["--compilation_config.custom_ops", "none,+rms_norm"],
        ["--compilation_config.custom_ops=none, +rms_norm"],
        ["--compilation-config.custom_ops", '["none","+rms_norm"]'],
        ["--compilation-config.custom-ops", '["none","+rms_norm"]'],
        ["--compilation_config", '{"custom_ops": ["none", "+rms_norm"]}'],
        ["--compilation-config", '{"custom_ops": ["none", "+rms_norm"]}'],
        ['--compilation-config={"custom_ops": ["none", "+rms_norm"]}'],
        ["-cc.custom_ops", '["none","+rms_norm"]'],
        ["-cc.custom_ops", "none,+rms_norm"],
        ["-cc.custom_ops=none,+rms_norm"],
        ["-cc.custom_ops+", "none", "-cc.custom_ops+", "+rms_norm"],
        ["-cc", '{"custom_ops": ["none", "+rms_norm"]}'],
    ],
    ids=lambda words: " ".join(words),
)
def test_c8_every_spelling_gives_the_same(words: list[str]) -> None:
    config = config_of(*words)
    assert config.custom_ops == BOTH
    assert config.sources["custom_ops"] == "command line"


@pytest.mark.parametrize(
    ("words", "custom_ops"),
    [
        (["-cc.custom_ops", "none"], ["none"]),
        (["-cc.custom_ops", "-rms_norm"], ["-rms_norm"]),
        (["-cc.custom_ops", "-rms_norm,-attention"], ["-rms_norm", "-attention"]),
        (["-cc.custom_ops", '["-rms_norm"]'], ["-rms_norm"]),
        (["-cc.custom_ops", "all", "--json"], ["all"]),
        ([], []),
    ],
)
def test_directives_alone(words: list[str], custom_ops: list[str]) -> None:
    assert config_of(*words).custom_ops == custom_ops


def test_every_field_of_the_config_has_an_option() -> None:
    assert {field.name for field in dataclasses.fields(options.CompilationOptions)} == set(FIELDS)
    words = ["-cc.backend", "inductor", "-cc.mode", "1", "-cc.mm_encoder", "none", "-cc.strict", "true"]
    config = config_of(*words)
    assert (config.backend, int(config.mode), config.strict) == ("inductor", 1, True)
    assert config.mm_encoder is not None
    assert config.mm_encoder.custom_ops == ["none"]
    assert int(config_of("-cc.mode", "STOCK_TORCH_COMPILE").mode) == 1


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "opmux.yaml"
    path.write_text("max-new-tokens: 7\nmodel: from-file\ncompilation_config:\n  custom_ops: [none]\n  backend: file\n")
    return path


def test_c8_command_line_over_environment_over_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from_file = config_of("--config", str(file))
    assert (from_file.custom_ops, from_file.sources["custom_ops"]) == (["none"], f"file {file}")
    monkeypatch.setenv(ENVIRONMENT, json.dumps({"custom_ops": ["all"]}))
    both = config_of("--config", str(file))
    assert (both.custom_ops, both.sources["custom_ops"]) == (["all"], f"environment {ENVIRONMENT}")
    assert (both.backend, both.sources["backend"]) == ("file", f"file {file}")
    three = config_of("--config", str(file), "-cc.custom_ops", "none,+attention")
    assert (three.custom_ops, three.sources["custom_ops"]) == (["none", "+attention"], "command line")
    assert three.sources["mode"] == "default"


def test_other_options_from_the_file_stand_under_the_command_line(file: Path) -> None:
    args = options.parse(["run", "--config", str(file)]).args
    assert (args.max_new_tokens, args.model, args.dtype) == (7, "from-file", "bfloat16")
    args = options.parse(["run", "--config", str(file), "--max_new_tokens", "128"]).args
    assert args.max_new_tokens == 128  # given, although it is the default


def test_the_environment_names_a_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert options.FILE_ENVIRONMENT == FILE_ENVIRONMENT
    monkeypatch.setenv(FILE_ENVIRONMENT, str(file))
    assert options.parse(["run"]).args.model == "from-file"


def test_one_file_serves_every_command(file: Path) -> None:
    assert options.parse(["list", "--config", str(file)]).args.platform is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("modle: x", "Did you mean 'model'"),
        ("compilation-config: {}", "Did you mean 'compilation_config'"),
        ("compilation_config: {custom_op: [none]}", "Did you mean 'custom_ops'"),
        ("[1, 2]", "a mapping of options"),
        ("a: [", "cannot be parsed"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "opmux.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        config_of("--config", str(path))


@pytest.mark.parametrize("prompt", ["a: b", "{a: b}", "[1]", "123", "null", "true", "1e3", "-"])
def test_a_prompt_is_text_whatever_it_looks_like(prompt: str) -> None:
    assert options.parse(["run", prompt]).args.prompt == prompt


def test_after_two_dashes_nothing_is_an_option() -> None:
    assert options.parse(["run", "--", "--max_new_tokens"]).args.prompt == "--max_new_tokens"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nonesuch"],
        ["run", "--nonesuch"],
        ["run", "--max-new-tokens", "many"],
        ["run", "--dtype", "int3"],
        ["run", "-cc.nonesuch", "1"],
        ["run", "-cc", '{"nonesuch": 1}'],
        ["run", "-cc", '{"custom_ops":'],
        ["run", "-cc.custom_ops"],
        ["explain"],
        ["list", "-cc.custom_ops", "all,none"],
        ["list", "-cc.mode", "9"],
    ],
    ids=lambda words: " ".join(words) or "nothing",
)
def test_a_wrong_call_is_code_2_and_says_why_on_stderr(opmux: Opmux, words: list[str]) -> None:
    done = opmux(*words)
    assert done.code == 2
    assert "Traceback" not in done.err
    assert "error:" in done.err or "usage:" in done.out


def test_an_unknown_op_is_answered_with_the_nearest(opmux: Opmux) -> None:
    done = opmux("list", "-cc.custom_ops", "none,+rms_nrom")
    assert done.code == 2
    assert "'rms_norm'" in done.err
    assert done.out == ""


def test_bad_json_in_the_environment_is_named(opmux: Opmux, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "{custom_ops")
    done = opmux("list")
    assert done.code == 2
    assert f"{ENVIRONMENT} is not JSON" in done.err

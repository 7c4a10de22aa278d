"""`opmux run`: the answer, the comparison, and every wrong input."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny_model

Opmux = Any
FEW = ("--max-new-tokens", "4", "--dtype", "float32", "--device", "cpu")


def test_it_answers_and_shows_what_ran(opmux: Opmux, saved_model: Path) -> None:
    done = opmux("run", "hello", "--model", saved_model, *FEW)
    assert done.code == 0
    for word in ("tiny", "'hello'", "tokens/s", "What ran", "rms_norm", "RMSNorm.forward_", "model.layers.*"):
        assert word in done.out
    assert "all defaults" in done.out
    assert "Loading tiny" in done.err


def test_json_is_the_only_thing_on_stdout(opmux: Opmux, saved_model: Path) -> None:
    answer = opmux("run", "hello", "--model", saved_model, "--json", "-cc.custom_ops", "none,+rms_norm", *FEW).json
    assert answer["model"] == "tiny"
    assert answer["prompt"] == "hello"
    assert 1 <= answer["new_tokens"] <= 4
    assert answer["config"]["custom_ops"] == ["none", "+rms_norm"]
    assert answer["config"]["sources"]["custom_ops"] == "command line"
    methods = {(e["op"], e["method"]) for e in answer["report"]["entries"] if e["status"] == "applied"}
    assert {method for op, method in methods if op not in ("rms_norm", None)} <= {"forward_native"}


def test_the_streamed_text_is_what_json_gives(opmux: Opmux, saved_model: Path) -> None:
    words = ("run", "hello", "--model", saved_model, *FEW)
    text = opmux(*words, "--json").json["text"]
    assert text.strip() in opmux(*words).out


def test_without_the_chat_template(opmux: Opmux, saved_model: Path) -> None:
    words = ("run", "xyz", "--model", saved_model, "--json", *FEW)
    assert opmux(*words, "--no-chat-template").json["prompt_tokens"] == 3
    assert opmux(*words).json["prompt_tokens"] > 3


def test_the_prompt_from_standard_input(opmux: Opmux, saved_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("xyz"))
    assert opmux("run", "-", "--model", saved_model, "--json", *FEW).json["prompt"] == "xyz"


def test_compare_gives_the_promised_keys(opmux: Opmux, saved_model: Path) -> None:
    result = opmux("run", "--compare", "--rounds", "1", "--model", saved_model, "--json", *FEW).json
    for key in ("decode_ratio", "prefill_ratio", "generate_ratio"):
        assert result[key] > 0
    assert result["logprob_diff"] < 1e-3
    for side in ("stock", "opmux"):
        assert set(result[side]) >= {"decode_tokens_per_s", "prefill_ms"}
    assert result["report"]["entries"]
    assert result["config"]["sources"]["custom_ops"] == "default"
    assert result["machine"]["versions"]["torch"]


def test_compare_prints_a_page_for_people(opmux: Opmux, saved_model: Path) -> None:
    done = opmux("run", "--compare", "--rounds", "1", "--model", saved_model, *FEW)
    assert done.code == 0
    for word in ("untouched", "decode", "tokens/s", "log-probability", "Medians of 1 of 1 round", "What ran"):
        assert word in done.out


def test_compiled_by_the_setting(opmux: Opmux, saved_model: Path) -> None:
    # Dynamo without Inductor, which takes a minute here; the default directives depend on the name inductor alone.
    words = ("run", "hello", "--model", saved_model, "--json", "-cc.backend", "eager", "-cc.mode", "1", *FEW)
    result = opmux(*words).json
    assert result["config"]["mode"] == 1
    assert result["new_tokens"] >= 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", ""], "The prompt is empty"),
        (["run", "x", "--model", "/no/such/model"], "no such file or folder"),
        (["run", "x", "--max-new-tokens", "0"], "--max-new-tokens 0"),
        (["run", "x", "--threads", "-1"], "--threads -1"),
        (["run", "x", "--device", "nonesuch"], "--device nonesuch"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_code_2_with_a_remedy(opmux: Opmux, saved_model: Path, words: list[str], message: str) -> None:
    done = opmux(*words, *(() if "--model" in words else ("--model", saved_model)))
    assert (done.code, done.out) == (2, "")
    assert message in done.err


def test_a_prompt_longer_than_the_context(opmux: Opmux, saved_model: Path) -> None:
    done = opmux("run", "x" * tiny_model.CONTEXT, "--model", saved_model, *FEW)
    assert done.code == 2
    assert f"has a context of {tiny_model.CONTEXT}" in done.err


def test_a_gguf_file_in_a_cache_that_cannot_be_written(
    opmux: Opmux, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tiny_model.save_gguf(tmp_path / "tiny.gguf", tiny_model.model())
    (tmp_path / "blocked").write_text("")
    monkeypatch.setenv("OPMUX_CACHE", str(tmp_path / "blocked" / "cache"))
    done = opmux("run", "hello", "--model", file, "--json", *FEW)
    assert done.code == 0
    assert done.json["model"] == "tiny"
    assert "warning:" in done.err
    assert "OPMUX_CACHE" in done.err


def test_a_gguf_file_cut_short(opmux: Opmux, tmp_path: Path) -> None:
    file = tiny_model.save_gguf(tmp_path / "tiny.gguf", tiny_model.model())
    file.write_bytes(file.read_bytes()[:-100])
    done = opmux("run", "hello", "--model", file)
    assert done.code == 2
    assert "cut short" in done.err

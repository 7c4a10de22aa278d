"""Reading GGUF files: checks, and the one-time conversion into a safetensors folder that transformers loads at once."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..core.errors import ModelError
from . import cache
from .progress import Progress, silent

# Raise it when what a conversion writes changes, so that old cache entries are left alone.
_FORMAT = 1


def converted(path: Path, dtype: str, progress: Progress = silent) -> Path:
    """The safetensors folder of a GGUF file in the cache, converted into ``dtype`` storage if it is not there yet.

    Args:
        path: the ``.gguf`` file.
        dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``: how the unpacked weights are stored.

    Raises:
        ModelError: the file is cut short, is no GGUF file, or holds an architecture that transformers does not know.
        CacheError: there is no space for the result.
    """
    stat = path.stat()
    identity = {
        "file": str(path.resolve()),
        "size_bytes": stat.st_size,
        "modified_ns": stat.st_mtime_ns,
        "dtype": dtype,
        "transformers": version("transformers"),
        "gguf": version("gguf"),
        "format": _FORMAT,
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    key = f"{path.stem}-{digest}"
    if (cache.folder() / "models" / key).is_dir():
        return cache.folder() / "models" / key
    progress(f"Reading {path.name}", None)
    reader = read(path)
    needs_bytes = sum(int(t.n_elements) for t in reader.tensors) * (4 if dtype == "float32" else 2) + 2**24

    def build(target: Path) -> None:
        _convert(path, dtype, reader, target, progress)
        (target / "opmux_source.json").write_text(json.dumps(identity, indent=2) + "\n", encoding="utf-8")

    return cache.entry(key, build, needs_bytes=needs_bytes)


def read(path: Path) -> Any:
    """A ``gguf.GGUFReader`` of the whole file, which checks that every tensor it announces is there.

    Raises:
        ModelError: it is not a GGUF file, or cut short.
    """
    gguf = _import_gguf()
    import numpy as np

    class FastReader(gguf.GGUFReader):  # type: ignore[misc,name-defined]
        """Reads each value by one call instead of six: a vocabulary is some 300,000 of them."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            if sys.byteorder != "little" or self.byte_order != "I":
                return super()._get(offset, dtype, count, override_order)
            return np.frombuffer(self.data, dtype, int(count), int(offset))

    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelError(
            f"{path} is not a GGUF file: it begins with {magic!r}, not b'GGUF'. Give a .gguf file, a folder with "
            "config.json and safetensors, or a hub name."
        )
    try:
        return FastReader(path)
    except Exception as error:  # a short file fails wherever the reader comes to its end
        raise ModelError(
            f"{path} is not a complete GGUF file ({path.stat().st_size:,} bytes): {error}. It was probably cut short; "
            "download or copy it again."
        ) from error


def _import_gguf() -> Any:
    try:
        import gguf
    except ImportError:
        raise ModelError(
            "Reading GGUF files needs the packages gguf and accelerate: `pip install 'opmux[transformers]'`."
        ) from None
    return gguf


def _convert(path: Path, dtype: str, reader: Any, target: Path, progress: Progress) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    place: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        with _read_once(reader, progress):
            model = AutoModelForCausalLM.from_pretrained(
                **place,
                dtype=getattr(torch, dtype),
                quantization_config=GgufConfig(dequantize=True),
                local_files_only=True,
            )
            progress("Reading the tokenizer", None)
            tokenizer = AutoTokenizer.from_pretrained(**place, local_files_only=True)
    except (ValueError, KeyError, NotImplementedError, RuntimeError, ImportError) as error:
        architecture = reader.get_field("general.architecture")
        named = architecture.contents() if architecture is not None else "none"
        raise ModelError(
            f"{path} (architecture {named!r}) cannot be converted by transformers {version('transformers')}: "
            f"{f'{error} is missing' if isinstance(error, KeyError) else error}"
        ) from error
    # transformers marks the model as quantised even when every weight was unpacked, and then refuses to save it.
    model.hf_quantizer = None  # type: ignore[assignment]
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    progress("Writing safetensors", None)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


@contextlib.contextmanager
def _read_once(reader: Any, progress: Progress) -> Iterator[None]:
    """Let transformers' loader reuse ``reader`` and each name map, and report to ``progress``.

    The loader parses the file anew for the configuration, the weights and the tokenizer, and builds the map of tensor
    names once per module: 11 s of the 17 s that a 135M model took. Only results are kept, so what is loaded is what
    transformers would load; if its internals move, this costs time and nothing else.
    """
    import gguf
    from transformers import modeling_gguf_pytorch_utils as loader

    def track(tensors: Iterable[Any], **_: Any) -> Iterator[Any]:
        total = len(reader.tensors)
        for done, tensor in enumerate(tensors):
            progress("Unpacking weights", done / total)
            yield tensor

    with (
        _replaced(gguf, "GGUFReader", lambda *_, **__: reader),
        _replaced(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
        _replaced(loader, "tqdm", track),
    ):
        yield


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    if not hasattr(module, name):
        yield
        return
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)

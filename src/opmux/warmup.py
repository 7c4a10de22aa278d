"""Warming a model up: everything that is built or tuned at a first call is built and tuned before traffic comes."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from .core.errors import UsageError


def warm_up(model: nn.Module, max_tokens: int) -> list[int]:
    """Run ``model`` on prompts of 1, 2, 4 ... ``max_tokens`` tokens, each followed by a decode step.

    Kernels are specialised by powers of two, so that afterwards no call of at most ``max_tokens`` tokens compiles or
    tunes one; a model that ``torch.compile`` serves is traced for its dynamic lengths on the way. Nothing of the model
    changes.

    Args:
        model: a transformers model that takes ``input_ids``, applied or not.
        max_tokens: the longest prompt to come.

    Returns: the prompt lengths that were run.
    Errors:  UsageError if ``max_tokens`` is below 1 or past the model's positions, or the model takes no ``input_ids``.
    """
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if max_tokens < 1 or (isinstance(limit, int) and max_tokens > limit):
        most = f"1 to {limit} (max_position_embeddings)" if isinstance(limit, int) else "at least 1"
        raise UsageError(f"warm_up was asked for {max_tokens} tokens; this model takes {most}.")
    if "input_ids" not in inspect.signature(type(model).forward).parameters:
        raise UsageError(
            f"warm_up runs models that take input_ids; {type(model).__name__} does not. Call it once per shape instead."
        )
    lengths = [2**i for i in range(max_tokens.bit_length()) if 2**i < max_tokens] + [max_tokens]
    device = next(model.parameters()).device
    with torch.inference_mode():
        for length in reversed(lengths):  # the longest first: what grows with the length grows once
            out = model(torch.zeros(1, length, dtype=torch.long, device=device), use_cache=True)
            cache = next((out[name] for name in ("cache", "past_key_values") if out.get(name) is not None), None)
            if cache is not None and (not isinstance(limit, int) or length < limit):
                name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
                model(torch.zeros(1, 1, dtype=torch.long, device=device), **{name: cache})
    return lengths

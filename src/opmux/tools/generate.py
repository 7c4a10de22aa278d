"""One greedy answer, streamed, with the times of its tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import TextStreamer

if TYPE_CHECKING:
    from .models import Loaded


@dataclass(frozen=True)
class Answer:
    """What the model said, and how fast. ``finished``: it ended by itself, not at the limit."""

    text: str
    prompt_tokens: int
    new_tokens: int
    finished: bool
    prefill_ms: float
    tokens_per_s: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


class _TimedStreamer(TextStreamer):
    """Passes text on as words are complete, and notes when each token came. The first ``put`` is the prompt."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None], device: torch.device) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.times: list[float] = []
        self._write = write
        self._device = device

    def put(self, value: Tensor) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        self.times.append(time.perf_counter())
        super().put(value)  # type: ignore[no-untyped-call]

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._write(text)


def generate(loaded: Loaded, ids: Tensor, max_new_tokens: int, write: Callable[[str], None]) -> Answer:
    """Answer the prompt ``ids`` [1, S] greedily; ``write`` gets the text as it comes.

    Ends at one of the model's end tokens, at ``max_new_tokens``, or where the model's context is full.
    """
    room = max_new_tokens
    if loaded.context_length is not None:
        room = min(room, loaded.context_length - ids.shape[1])
    streamer = _TimedStreamer(loaded.tokenizer, write, ids.device)
    with torch.inference_mode():
        out = loaded.model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=room, streamer=streamer
        )
    new = out[0, ids.shape[1] :]
    asked, first, *rest = streamer.times
    last = rest[-1] if rest else first
    return Answer(
        text=loaded.tokenizer.decode(new, skip_special_tokens=True),
        prompt_tokens=ids.shape[1],
        new_tokens=len(new),
        finished=len(new) < room or int(new[-1]) in _end_tokens(loaded.model),
        prefill_ms=1e3 * (first - asked),
        tokens_per_s=len(rest) / (last - first) if rest else 0.0,
    )


def _end_tokens(model: Any) -> set[int]:
    ends = model.generation_config.eos_token_id
    return set() if ends is None else set(ends) if isinstance(ends, list) else {ends}

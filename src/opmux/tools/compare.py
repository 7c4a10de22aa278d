"""The untouched model against the one with opmux's ops, in one process: speed, ratio, and how far the numbers moved.

Both models are loaded and warm before anything is timed, and they take turns, the order changing every round and, while
decoding, after every 16 tokens, so that a slow moment of the machine hits both. Each figure is a median.
"""

from __future__ import annotations

import gc
import inspect
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from .progress import Progress, silent

# Written for this purpose, so that no model was trained on it. About 280 tokens.
TEXT = """The harbour master kept two ledgers. In the first she wrote what the ships declared: the tons of salt, the
crates of tinned fish, the number of hands on board and the port from which they had sailed. In the second, a thin grey
book that she never showed to anybody, she wrote what she saw. A ship that declared forty tons might sit as low in the
water as one with sixty; a crew of nine might buy bread for fourteen. She did not think of this as spying. It was only
that numbers which disagree with each other were, to her, like a door left open in winter: she could not sit still until
somebody had got up and closed it. When the new inspector came from the capital and asked how she had known about the
copper, she brought out the grey book and laid it beside the other one. He read both for most of an afternoon. Then he
asked whether she had ever been wrong. "Twice," she said, and turned the pages until she found the two lines, each of
them crossed out with a ruler and initialled, with the correct figure and the date on which she had learned it written
in the margin. The inspector closed the books with care. "I have worked with accountants for thirty years," he said,
"and I have never before seen anyone keep a record of how far they can be trusted."
"""


_CHUNK = 16  # tokens that one model decodes before the other one's turn


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        rounds: how often each model takes its turn.
        limit_s: no further round begins after this time, on a machine that is slow or shared.
        prefill_tokens: length of the standard prompt, cut to what the model's context holds.
        decode_tokens: tokens decoded after the user's prompt.
        stepped_tokens: tokens of the fixed text that are also scored one at a time, through the cache.
    """

    rounds: int = 5
    limit_s: float = 180.0
    prefill_tokens: int = 512
    decode_tokens: int = 64
    stepped_tokens: int = 200


def compare(
    stock: Any, opmux: Any, tokenizer: Any, prompt: Tensor, plan: Plan = Plan(), progress: Progress = silent
) -> dict[str, Any]:
    """Measure both models; they must hold the same weights, on the same device.

    Args:
        stock: the untouched causal language model.
        opmux: the one that ``opmux.apply`` was called on.
        tokenizer: of both.
        prompt: the user's prompt, ``[1, S]`` token ids.

    Returns:
        ``decode_ratio``, ``prefill_ratio``, ``generate_ratio`` (above 1: opmux is faster), ``logprob_diff``, and the
        figures of each side under ``stock`` and ``opmux``, as plain data.
    """
    text = tokenizer(TEXT, return_tensors="pt")["input_ids"].to(prompt.device)
    longest = getattr(stock.config.get_text_config(), "max_position_embeddings", None) or 2**31
    standard = _repeated(text, min(plan.prefill_tokens, longest))
    text = text[:, :longest]
    decode_tokens = min(plan.decode_tokens, longest - prompt.shape[1])
    sides = {"stock": _Greedy(stock), "opmux": _Greedy(opmux)}
    once: dict[str, Callable[[_Greedy], float]] = {
        "prefill_ms": lambda loop: 1e3 * _prefill_s(loop, standard),
        "prompt_ms": lambda loop: 1e3 * _prefill_s(loop, prompt),
        "generate_tokens_per_s": lambda loop: decode_tokens / _generate_s(loop, prompt, decode_tokens),
    }
    samples: dict[str, dict[str, list[float]]] = {side: {} for side in sides}
    with torch.inference_mode():
        progress("Warming up", None)
        for loop in sides.values():
            _prefill_s(loop, standard)
            _generate_s(loop, prompt, min(4, decode_tokens))
        started = time.perf_counter()
        for turn in range(plan.rounds):
            if turn and time.perf_counter() - started > plan.limit_s:
                break
            order = list(sides) if turn % 2 == 0 else list(sides)[::-1]
            with undisturbed():
                for index, (task, measure) in enumerate(once.items()):
                    progress("Measuring", (turn + index / 4) / plan.rounds)
                    for side in order:
                        samples[side].setdefault(task, []).append(measure(sides[side]))
                progress("Measuring", (turn + 3 / 4) / plan.rounds)
                speeds = _decode_in_turns({side: sides[side] for side in order}, prompt, decode_tokens)
            for side in sides:
                samples[side].setdefault("decode_tokens_per_s", []).extend(speeds[side])
        progress("Comparing log-probabilities", None)
        scores = {name: _log_probs(loop, text) for name, loop in sides.items()}
        beginning = text[:, : plan.stepped_tokens + 1]
        stepped = {name: _log_probs_stepped(loop, beginning) for name, loop in sides.items()}
    medians = {side: {task: statistics.median(v) for task, v in of.items()} for side, of in samples.items()}
    whole = _apart(scores["stock"], scores["opmux"])
    one_by_one = _apart(stepped["stock"], stepped["opmux"])
    return {
        "decode_ratio": medians["opmux"]["decode_tokens_per_s"] / medians["stock"]["decode_tokens_per_s"],
        "prefill_ratio": medians["stock"]["prefill_ms"] / medians["opmux"]["prefill_ms"],
        "prompt_ratio": medians["stock"]["prompt_ms"] / medians["opmux"]["prompt_ms"],
        "generate_ratio": medians["opmux"]["generate_tokens_per_s"] / medians["stock"]["generate_tokens_per_s"],
        "logprob_diff": max(whole["mean"], one_by_one["mean"]),
        "logprob": {"text_at_once": whole, "one_token_at_a_time": one_by_one},
        **medians,
        "samples": samples,
        "measured": {
            "rounds": len(samples["stock"]["prefill_ms"]),
            "rounds_planned": plan.rounds,
            "prefill_tokens": standard.shape[1],
            "prompt_tokens": prompt.shape[1],
            "decode_tokens": decode_tokens,
            "text_tokens": text.shape[1],
            "stepped_tokens": beginning.shape[1] - 1,
        },
    }


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, threads, load, versions."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions(),
    }


def versions() -> dict[str, str | None]:
    """Versions of the packages that matter; None where one is not installed."""
    return {name: _version(name) for name in ("opmux", "torch", "transformers", "triton", "jax")}


@contextmanager
def undisturbed() -> Iterator[None]:
    """Garbage is collected before the clock runs, never while it does."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Greedy:
    """The loop that is timed: ``model.forward`` with the keywords that ``generate`` would pass."""

    def __init__(self, model: Any) -> None:
        # Looked up once: it would cost as much as an op if it were done at each token.
        takes = inspect.signature(type(model).forward).parameters
        self.model = model
        self._cache_name = "cache" if "cache" in takes else "past_key_values"  # renamed in transformers 5.24
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}

    def prefill(self, ids: Tensor) -> tuple[Tensor, Any]:
        """Logits [1, V] of the last position of ``ids`` [1, S], and the cache that the model made."""
        out = self.model(input_ids=ids, use_cache=True, **self._last_only)
        return out.logits[:, -1], out[self._cache_name]

    def step(self, token: Tensor, cache: Any) -> Tensor:
        """Logits [1, V] after one more ``token`` [1, 1]; ``cache`` grows."""
        logits: Tensor = self.model(input_ids=token, use_cache=True, **{self._cache_name: cache}).logits
        return logits[:, -1]


def _prefill_s(loop: _Greedy, ids: Tensor) -> float:
    """Seconds of one forward over ``ids`` [1, S] into a fresh cache."""
    start = _now(ids.device)
    loop.prefill(ids)
    return _now(ids.device) - start


def _decode_in_turns(sides: dict[str, _Greedy], prompt: Tensor, count: int) -> dict[str, list[float]]:
    """Tokens/s of ``count`` greedy steps after the prompt, which is not timed itself, a chunk of steps at a time.

    The sides take turns after every chunk: what else runs on the machine changes within a second, and a whole decode
    takes several.
    """
    state = {side: loop.prefill(prompt) for side, loop in sides.items()}
    speeds: dict[str, list[float]] = {side: [] for side in sides}
    for begin in range(0, count, _CHUNK):
        steps = min(_CHUNK, count - begin)
        for side, loop in sides.items():
            logits, cache = state[side]
            start = _now(prompt.device)
            for _ in range(steps):
                logits = loop.step(logits.argmax(-1, keepdim=True), cache)
            speeds[side].append(steps / (_now(prompt.device) - start))
            state[side] = logits, cache
    return speeds


def _generate_s(loop: _Greedy, prompt: Tensor, count: int) -> float:
    """Seconds of ``model.generate`` of exactly ``count`` greedy tokens, prompt and generate's own overhead included."""
    mask = torch.ones_like(prompt)
    start = _now(prompt.device)
    loop.model.generate(prompt, attention_mask=mask, do_sample=False, min_new_tokens=count, max_new_tokens=count)
    return _now(prompt.device) - start


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _log_probs(loop: _Greedy, text: Tensor) -> Tensor:
    """Log-probability [S-1] that the model gives each token of ``text`` [1, S], all in one forward."""
    return _chosen(loop.model(input_ids=text, use_cache=False).logits[0, :-1], text[0, 1:])


def _log_probs_stepped(loop: _Greedy, text: Tensor) -> Tensor:
    """The same, one token at a time through the cache: the way of decoding."""
    first, cache = loop.prefill(text[:, :1])
    later = [loop.step(token, cache) for token in torch.split(text[:, 1:-1], 1, dim=1)]
    return _chosen(torch.cat([first, *later]), text[0, 1:])


def _chosen(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def _apart(stock: Tensor, opmux: Tensor) -> dict[str, float]:
    """``mean``: the two mean log-probabilities' distance; ``token_max``: the largest distance at one token."""
    return {
        "stock": stock.mean().item(),
        "opmux": opmux.mean().item(),
        "mean": (stock.mean() - opmux.mean()).abs().item(),
        "token_mean": (stock - opmux).abs().mean().item(),
        "token_max": (stock - opmux).abs().max().item(),
    }


def _repeated(ids: Tensor, length: int) -> Tensor:
    times = -(-length // ids.shape[1])
    return ids.repeat(1, times)[:, :length]


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            return next(line.partition(":")[2].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

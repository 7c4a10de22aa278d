"""The rope op that a transformers config asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...core.errors import did_you_mean
from . import scaling
from .dual_chunk_rotary_embedding import DualChunkRotaryEmbedding
from .mrotary_embedding import MRotaryEmbedding
from .rotary_embedding import RotaryEmbedding

__all__ = ["get_rope"]


def get_rope(
    head_size: int,
    max_position: int,
    is_neox_style: bool = True,
    rope_parameters: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    dual_chunk_attention_config: Mapping[str, Any] | None = None,
    mrope_positions_factor: int = 4,
) -> RotaryEmbedding:
    """Build the rope op for ``rope_parameters``, the dictionary of a transformers config.

    Args:
        head_size: D.
        max_position: the longest position that will be asked for, plus one.
        is_neox_style: the pairing.
        rope_parameters: ``rope_type`` (default, linear, ntk, dynamic, yarn, llama3, longrope, deepseek_yarn),
            ``rope_theta``,
            ``partial_rotary_factor`` or ``rope_dim``, what the kind needs, and ``mrope_section`` for positions of
            time, height and width.
        dtype: accepted for the order of the parameters; tables are fp32.
        dual_chunk_attention_config: ``chunk_size`` and ``local_size`` of Qwen2.5-1M's config; a rope of kind default.
        mrope_positions_factor: how much longer than ``max_position`` the table of a multimodal rope is.

    Errors: ValueError for an unknown kind, a missing key (naming it), a rotated share outside (0, 1] or odd, or dual chunks
        with a kind other than default or with ``mrope_section``: which of the two reaches far would not be defined.
    """
    given = dict(rope_parameters or {})
    kind = given.get("rope_type", "default")
    kind = _LEGACY.get(kind, kind)
    if kind not in _KINDS:
        raise ValueError(f"There is no rope_type {kind!r}. {did_you_mean(str(kind), _KINDS)}")
    rotary_dim = _rotary_dim(head_size, given)
    base = float(given.get("rope_theta", 10000.0))
    if dual_chunk_attention_config is not None:
        return _dual_chunk(head_size, rotary_dim, max_position, base, is_neox_style, kind, given, dual_chunk_attention_config)
    frequencies, rows, magnitude = _KINDS[kind](_Needed(kind, given), rotary_dim, base, max_position)
    section = given.get("mrope_section")
    if section is not None:
        if kind == "default":
            rows *= mrope_positions_factor
        op: RotaryEmbedding = MRotaryEmbedding(
            head_size, rotary_dim, rows, base, is_neox_style, dtype, init_cache=False,
            mrope_section=section, mrope_interleaved=bool(given.get("mrope_interleaved", False)),
        )  # fmt: skip
    else:
        op = RotaryEmbedding(head_size, rotary_dim, rows, base, is_neox_style, dtype, init_cache=False)
    op.set_table(frequencies, magnitude)
    return op


class _Needed(dict[str, Any]):
    """The parameters of a kind: reading one that is missing says which."""

    def __init__(self, kind: str, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self.kind = kind

    def __missing__(self, key: str) -> Any:
        raise ValueError(
            f"rope_type {self.kind!r} needs {key!r} in rope_parameters; there are {', '.join(sorted(self)) or 'none'}."
        )


Table = tuple[torch.Tensor, int, float]  # frequencies, rows, magnitude


def _dual_chunk(
    head_size: int, rotary_dim: int, max_position: int, base: float, is_neox_style: bool, kind: str,
    given: Mapping[str, Any], config: Mapping[str, Any],
) -> RotaryEmbedding:  # fmt: skip
    if kind != "default" or given.get("mrope_section") is not None:
        other = "mrope_section" if kind == "default" else f"rope_type {kind!r}"
        raise ValueError(f"dual_chunk_attention_config goes with rope_type 'default' only; it was given with {other}.")
    if not {"chunk_size", "local_size"} <= set(config):
        raise ValueError(
            f"dual_chunk_attention_config needs chunk_size and local_size; it has {', '.join(sorted(config)) or 'nothing'}."
        )
    return DualChunkRotaryEmbedding(
        head_size, rotary_dim, max_position, base, is_neox_style, None, int(config["chunk_size"]), int(config["local_size"])
    )


def _rotary_dim(head_size: int, given: Mapping[str, Any]) -> int:
    if given.get("rope_dim") is not None:
        rotary_dim = int(given["rope_dim"])
    else:
        share = float(given.get("partial_rotary_factor", 1.0))
        if not 0.0 < share <= 1.0:
            raise ValueError(f"partial_rotary_factor is {share}; it must lie in (0, 1].")
        rotary_dim = int(head_size * share)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_size:
        raise ValueError(
            f"{rotary_dim} of {head_size} features would turn; the number must be even and at most the head."
        )
    return rotary_dim


def _default(p: _Needed, rotary_dim: int, base: float, length: int) -> Table:
    return scaling.plain(rotary_dim, base), length, 1.0


def _linear(p: _Needed, rotary_dim: int, base: float, length: int) -> Table:
    factor = float(p["factor"])
    return scaling.plain(rotary_dim, base) / factor, int(length * factor), 1.0


def _ntk(p: _Needed, rotary_dim: int, base: float, length: int) -> Table:
    return scaling.ntk(rotary_dim, base, float(p["factor"]), p.get("mixed_b")), length, 1.0


def _dynamic(p: _Needed, rotary_dim: int, base: float, length: int) -> Table:
    if p.get("alpha") is not None:
        return scaling.plain(rotary_dim, base * float(p["alpha"]) ** (rotary_dim / (rotary_dim - 2))), length, 1.0
    trained = int(p.get("max_trained_positions") or length)
    stretched = scaling.dynamic_base(rotary_dim, base, float(p["factor"]), max(length, trained), trained)
    return scaling.plain(rotary_dim, stretched), length, 1.0


def _llama3(p: _Needed, rotary_dim: int, base: float, length: int) -> Table:
    frequencies = scaling.llama3(
        rotary_dim, base, float(p["factor"]), float(p["low_freq_factor"]), float(p["high_freq_factor"]),
        int(p["original_max_position_embeddings"]),
    )  # fmt: skip
    return frequencies, length, 1.0


def _yarn_frequencies(p: _Needed, rotary_dim: int, base: float, truncate: bool) -> torch.Tensor:
    return scaling.yarn(
        rotary_dim, base, float(p["factor"]), int(p["original_max_position_embeddings"]),
        float(p.get("beta_fast") or 32), float(p.get("beta_slow") or 1), truncate,
    )  # fmt: skip


def _yarn(p: _Needed, rotary_dim: int, base: float, length: int) -> Table:
    factor, mscale, all_dim = float(p["factor"]), p.get("mscale"), p.get("mscale_all_dim")
    if p.get("attention_factor") is not None:
        magnitude = float(p["attention_factor"])
    elif mscale and all_dim:
        magnitude = scaling.yarn_magnitude(factor, mscale) / scaling.yarn_magnitude(factor, all_dim)
    else:
        magnitude = scaling.yarn_magnitude(factor)
    rows = max(length, int(p["original_max_position_embeddings"] * factor))
    return _yarn_frequencies(p, rotary_dim, base, bool(p.get("truncate", True))), rows, magnitude


def _deepseek_yarn(p: _Needed, rotary_dim: int, base: float, length: int) -> Table:
    factor = float(p["factor"])
    magnitude = scaling.yarn_magnitude(factor, float(p.get("mscale", 1.0)))
    magnitude /= scaling.yarn_magnitude(factor, float(p.get("mscale_all_dim", 0.0)))
    rows = max(length, int(p["original_max_position_embeddings"] * factor))
    return _yarn_frequencies(p, rotary_dim, base, True), rows, magnitude


def _longrope(p: _Needed, rotary_dim: int, base: float, length: int) -> Table:
    # Long factors where the model will run past its original length; then for short sequences too, in one table.
    original = int(p["original_max_position_embeddings"])
    long = length > original
    stretched = int(p.get("max_position_embeddings") or length)
    magnitude = p.get("long_mscale" if long else "short_mscale") or p.get("attention_factor")
    if magnitude is None:
        magnitude = scaling.longrope_magnitude(stretched, original)
    return scaling.longrope(rotary_dim, base, p["long_factor" if long else "short_factor"]), length, float(magnitude)


_LEGACY = {"su": "longrope", "mrope": "default", "deepseek_llama_scaling": "deepseek_yarn"}

_KINDS: dict[str, Callable[[_Needed, int, float, int], Table]] = {
    "default": _default,
    "linear": _linear,
    "ntk": _ntk,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "deepseek_yarn": _deepseek_yarn,
    "longrope": _longrope,
}

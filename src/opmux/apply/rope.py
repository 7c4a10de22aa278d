"""Rotary embeddings as transformers passes them: ``(cos, sin)`` of full width, made once per forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.rope.apply_rotary_emb import ApplyRotaryEmb

# (name, NeoX pairing, cos and sin hold each value twice side by side rather than in two halves)
STYLES = (("neox", True, False), ("interleaved", False, False), ("interleaved, tables too", False, True))

# Kinds whose table depends on the position alone, so that a row may be kept.
_FIXED_KINDS = ("default", "linear", "llama3", "yarn", "proportional")
_FIRST_ROWS = 512


class Rope:
    """Rotates heads by ``apply_rotary_emb``; features past the tables' width pass through."""

    def __init__(self, neox: bool, side_by_side: bool, enforce_enable: bool = False) -> None:
        self.op = ApplyRotaryEmb(enforce_enable, is_neox_style=neox)
        self.side_by_side = side_by_side

    def half(self, table: Tensor) -> Tensor:
        """[B, S, R] with every value twice -> [B, S, R/2]; [S, R/2] where the whole batch has one table."""
        if table.shape[0] == 1 and table.dim() == 3:
            table = table[0]
        return table[..., ::2] if self.side_by_side else table[..., : table.shape[-1] // 2]

    def __call__(self, x: Tensor, cos: Any, sin: Any) -> Any:
        """x [B, S, N, D]; cos, sin [S, R/2] or [B, S, R/2] -> [B, S, N, D]."""
        width = 2 * cos.shape[-1]
        if width == x.shape[-1]:
            return self.op(x, cos, sin)
        return torch.cat((self.op(x[..., :width], cos, sin), x[..., width:]), dim=-1)


class RopeTable:
    """Rows of a rotary module's output, kept: ten small operations a step become one lookup.

    The rows come from the module itself, in the dtype that it would return. Modules whose frequencies change with the
    length (dynamic, longrope) or that hooks watch are called instead.
    """

    def __init__(self, module: Any, rope: Rope) -> None:
        self.module = module
        self.rope = rope
        self.fixed = getattr(module, "rope_type", None) in _FIXED_KINDS
        self.rows: Tensor | None = None
        self.made_of: tuple[Any, ...] = ()

    def __call__(self, hidden: Tensor, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [B, S, R/2] or [S, R/2].

        Args:
            hidden: gives device and dtype.
            positions: [B or 1, S].
            end: one past the largest position that is expected; larger ones are found out by themselves.
        """
        if (
            not self.fixed
            or hidden.device.type != "cpu"
            or self.module._forward_hooks
            or self.module._forward_pre_hooks
        ):
            cos, sin = self.module(hidden, position_ids=positions)
            return self.rope.half(cos), self.rope.half(sin)
        rows = self._table(hidden, end)
        flat = positions.view(-1) if positions.shape[0] == 1 else positions.reshape(-1)
        try:
            found = rows.index_select(0, flat)
        except IndexError:
            found = self._table(hidden, int(positions.max()) + 1).index_select(0, flat)
        if positions.shape[0] > 1:
            found = found.view(*positions.shape, -1)
        half = found.shape[-1] // 2
        # Dense once, rather than in every layer; one row is dense as it is.
        return found[..., :half].contiguous(), found[..., half:].contiguous()

    def _table(self, hidden: Tensor, end: int) -> Tensor:
        frequencies = self.module._buffers.get("inv_freq")
        made_of = (id(frequencies), getattr(frequencies, "_version", 0), hidden.dtype)
        if self.rows is None or self.rows.shape[0] < end or self.made_of != made_of:
            count = _FIRST_ROWS
            while count < end:
                count *= 2
            cos, sin = self.module(hidden, position_ids=torch.arange(count, device=hidden.device).unsqueeze(0))
            self.rows = torch.cat((self.rope.half(cos), self.rope.half(sin)), dim=-1)
            self.made_of = made_of
        return self.rows


def find_rotaries(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that make rotary tables, by the path of what holds them."""
    return {
        path.rpartition(".")[0]: module
        for path, module in model.named_modules()
        if "rotary" in type(module).__name__.lower() and "inv_freq" in str(list(module._buffers))
    }


def nearest(rotaries: dict[str, nn.Module], path: str) -> nn.Module | None:
    """The rotary module of the smallest part of the model that holds ``path``; the first one where none does."""
    parts = path.split(".")
    for end in range(len(parts), -1, -1):
        found = rotaries.get(".".join(parts[:end]))
        if found is not None:
            return found
    return next(iter(rotaries.values()), None)


def find_rotary(model: nn.Module) -> nn.Module | None:
    """The first module of the model that makes rotary tables, if there is one."""
    return nearest(find_rotaries(model), "")


def sample_tables(rotary: nn.Module, like: Tensor, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The (cos, sin) that a rotary module makes, for each kind of layer that it knows."""
    kinds: list[dict[str, Any]] = [{}]
    names = [name.removesuffix("_inv_freq") for name in rotary._buffers if name.endswith("_inv_freq")]
    kinds += [{"layer_type": name} for name in names if not name.endswith("original")]
    for more in kinds:
        # Some ask for a row of positions each for time, height and width; for text the three are the same.
        for given in (positions, positions.expand(3, *positions.shape)):
            try:
                tables = rotary(like, given, **more)
            except Exception:  # this kind of call is not for this module; the next may be
                continue
            if isinstance(tables, tuple) and len(tables) == 2 and all(_per_token(t, positions) for t in tables):
                yield tables
                break


def _per_token(table: Any, positions: Tensor) -> bool:
    return isinstance(table, Tensor) and table.dim() == 3 and table.shape[:2] == positions.shape

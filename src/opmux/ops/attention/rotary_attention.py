"""Rotary embedding, the write to the cache and causal attention in one op."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from ...core.cases import FLOATS, Case
from ...core.custom_op import CustomOp
from ...core.requires import requires
from ...native import DTYPE_CODE, kernels
from ...native.layout import new_like
from ..rope.rotate import rotate
from .attention import Attention

__all__ = ["RotaryAttention"]


@CustomOp.register("rotary_attention")
class RotaryAttention(CustomOp):
    """What stands between the q/k/v product and the output projection of a decoder layer with a cache.

    ``q, k, v = qkv``; q and k are rotated; k and v are written behind the ``start`` tokens of the cache; the result is
    causal attention of q over the cache. It equals ``apply_rotary_emb``, two copies and ``attention``, without the
    views between them, which at one token cost more than the arithmetic.

    Shapes:  qkv [B, S, (N + 2 K) D], heads of q, then k, then v; cos, sin [S, R/2] or [B, S, R/2], R <= D; keys and
             values [B, L, K, D], L >= start + S -> [B, S, N D]. Features of a head past R are not rotated. Where q and
             k were normed, they come by themselves, q [B, S, N, D] and k [B, S, K, D], and qkv gives v alone.
    Dtypes:  fp32, fp16, bf16, one for all but cos and sin, which are rounded to it; rounding as of the two ops.
    Mutates: ``keys[:, start : start + S]`` and ``values[:, start : start + S]``.      Grad: native only.
    Errors:  ValueError for a width that does not fit the heads, or a cache without room.
    Source:  as of ``apply_rotary_emb`` and ``attention``.

    Args:
        num_heads, head_size, scale, num_kv_heads, soft_cap: as of ``Attention``.
        is_neox_style: as of ``ApplyRotaryEmb``.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float | None = None,
        num_kv_heads: int | None = None,
        *,
        is_neox_style: bool = True,
        soft_cap: float | None = None,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        self.attention = Attention(num_heads, head_size, scale, num_kv_heads, soft_cap=soft_cap)
        self.heads, self.kv_heads, self.head_size = num_heads, self.attention.num_kv_heads, head_size
        self.scale, self.soft_cap = float(self.attention.scale), float(soft_cap or 0.0)
        self.is_neox_style = is_neox_style

    def forward_native(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, start: int,
        query: Tensor | None = None, key: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        self._check(qkv, cos, keys, values, start, query, key)
        end, width = start + qkv.shape[1], 2 * cos.shape[-1]
        cos, sin = cos.to(qkv.dtype).unsqueeze(-2), sin.to(qkv.dtype).unsqueeze(-2)
        heads = qkv.unflatten(-1, (-1, self.head_size))
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        q, k = q if query is None else query, k if key is None else key
        q, k = (
            torch.cat((rotate(x[..., :width], cos, sin, self.is_neox_style), x[..., width:]), dim=-1) for x in (q, k)
        )
        keys[:, start:end] = k
        values[:, start:end] = v
        return self.attention.forward_native(q, keys[:, :end], values[:, :end]).flatten(2)

    def _refuses(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, start: int,
        query: Tensor | None = None, key: Tensor | None = None,
    ) -> str | None:  # fmt: skip
        if torch.compiler.is_compiling():
            return "writes to the cache, which traced code may do by torch's own operations only"
        if not (keys.dtype is values.dtype is qkv.dtype) or cos.dtype is not sin.dtype or cos.dtype not in DTYPE_CODE:
            return "takes qkv, keys and values of one dtype, and cos and sin of one"
        dense = qkv.stride(-1) == keys.stride(-1) == values.stride(-1) == cos.stride(-1) == 1
        for normed in (query, key):
            dense = dense and (normed is None or (normed.dtype is qkv.dtype and normed.stride(-1) == 1))
        if dense and cos.stride() == sin.stride():
            return None
        return "reads dense last dimensions of one dtype, and one layout of cos and sin"

    @requires(dtypes=FLOATS, native_library=True, when=_refuses)
    def forward_cpu(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, start: int,
        query: Tensor | None = None, key: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        self._check(qkv, cos, keys, values, start, query, key)
        n, k, d = self.heads, self.kv_heads, self.head_size
        batches, tokens, _ = qkv.shape
        batch, token, _ = qkv.stride()
        key_batch, key_token, key_head, _ = keys.stride()
        value_batch, value_token, value_head, _ = values.stride()
        table_batch, table_token = cos.stride()[:2] if cos.dim() == 3 else (0, cos.stride(0))
        code, size = DTYPE_CODE[qkv.dtype], qkv.itemsize
        q, out = new_like(qkv, n * d), new_like(qkv, n * d)
        source, key_at, value_at, q_at = qkv.data_ptr(), keys.data_ptr(), values.data_ptr(), q.data_ptr()
        cos_at, table = cos.data_ptr(), DTYPE_CODE[cos.dtype]
        q_from, q_strides = source, (batch, token, d)
        if query is not None:
            q_from, q_strides = query.data_ptr(), _outer_strides(query)
        k_from, k_strides = source + n * d * size, (batch, token, d)
        if key is not None:
            k_from, k_strides = key.data_ptr(), _outer_strides(key)
        kernels.rotary_cos_sin(
            code, 2 * cos.shape[-1], d, table, not self.is_neox_style, True, False, batches, tokens,
            cos_at, sin.data_ptr(), table_batch, table_token, 0,
            q_from, *q_strides, q_at, tokens * n * d, n * d, d, n,
            k_from, *k_strides,
            key_at + start * key_token * size, key_batch, key_token, key_head, k,
        )  # fmt: skip
        kernels.rotary_cos_sin(  # rotates nothing: copies the values
            code, 0, d, table, False, False, False, batches, tokens, cos_at, cos_at, 0, 0, 0,
            source + (n + k) * d * size, batch, token, d,
            value_at + start * value_token * size, value_batch, value_token, value_head, k,
            None, 0, 0, 0, None, 0, 0, 0, 0,
        )  # fmt: skip
        kernels.attention(
            out.data_ptr(), q_at, key_at, value_at, None, None, batches, tokens, start + tokens, n, k, d, d,
            tokens * n * d, n * d, d, 1, key_batch, key_token, key_head, 1, value_batch, value_token, value_head, 1,
            0, 0, 0, 0, self.scale, self.soft_cap, True, 0, 0, code,
        )  # fmt: skip
        return out

    def _check(
        self, qkv: Tensor, cos: Tensor, keys: Tensor, values: Tensor, start: int, query: Tensor | None,
        key: Tensor | None,
    ) -> None:  # fmt: skip
        batches, tokens, width = qkv.shape
        for name, normed, heads in (("query", query, self.heads), ("key", key, self.kv_heads)):
            if normed is not None and normed.shape != (batches, tokens, heads, self.head_size):
                raise ValueError(
                    f"rotary_attention takes a {name} of shape {(batches, tokens, heads, self.head_size)}; it got "
                    f"{tuple(normed.shape)}."
                )
        sizes = (self.heads, self.kv_heads, self.head_size)
        if not _fit(sizes, batches, tokens, width, cos.shape, keys.shape, values.shape) or not (
            0 <= start <= keys.shape[1] - tokens
        ):
            raise ValueError(
                f"rotary_attention was built for {self.heads} query and {self.kv_heads} key heads of size "
                f"{self.head_size}; it got qkv {tuple(qkv.shape)} and tables {tuple(cos.shape)}, to be written from "
                f"token {start} into keys {tuple(keys.shape)} and values {tuple(values.shape)}."
            )

    def extra_repr(self) -> str:
        return f"{self.heads} heads, {self.kv_heads} kv heads, size {self.head_size}, neox={self.is_neox_style}"

    @classmethod
    def cases(cls) -> Iterator[Case]:
        """None: it mutates what it is given; ``apply_rotary_emb`` and ``attention`` have the cases of its parts."""
        return iter(())


def _outer_strides(heads: Tensor) -> tuple[int, int, int]:
    batch, token, head, _ = heads.stride()
    return batch, token, head


@lru_cache(maxsize=4096)
def _fit(
    sizes: tuple[int, int, int], batches: int, tokens: int, width: int,
    table: torch.Size, keys: torch.Size, values: torch.Size,
) -> bool:  # fmt: skip
    heads, kv_heads, size = sizes
    return (
        width == (heads + 2 * kv_heads) * size
        and keys == values == (batches, keys[1], kv_heads, size)
        and 2 * table[-1] <= size
        and tuple(table[:-1]) in ((tokens,), (batches, tokens))
    )

"""A dynamic cache layer that grows in place instead of copying the whole cache at every step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

_STEP = 256  # room is made for so many more tokens, or for a quarter as many again


class GrowingLayer(DynamicLayer):
    """A ``DynamicLayer`` whose keys and values are the front of larger buffers.

    To its users it is a ``DynamicLayer``: ``keys`` and ``values`` are [B, K, L, D] and may be assigned. Where a
    gradient is needed it concatenates as its parent does: a buffer that is written again cannot be differentiated.
    """

    def __init__(self, **kwargs: Any) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._length = 0
        super().__init__(**kwargs)

    @property
    def keys(self) -> Tensor | None:
        """[B, K, L, D], a view of the buffer."""
        return self._front(self._keys)

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:
        self._keys = keys
        self._length = 0 if keys is None or keys.numel() == 0 else keys.shape[-2]
        self._owned = False

    @property
    def values(self) -> Tensor | None:
        """[B, K, L, D], a view of the buffer."""
        return self._front(self._values)

    @values.setter
    def values(self, values: Tensor | None) -> None:
        self._values = values
        self._owned = False

    def get_seq_length(self) -> int:
        return self._length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            return super().update(key_states, value_states, *args, **kwargs)
        keys, values = self.append(key_states.transpose(1, 2), value_states.transpose(1, 2))
        return keys.transpose(1, 2), values.transpose(1, 2)

    @property
    def address(self) -> tuple[int, int]:
        """Where the buffers are."""
        if self._keys is None or self._values is None:
            return 0, 0
        return self._keys.data_ptr(), self._values.data_ptr()

    def has_room(self, batch: int, count: int) -> bool:
        """Whether the buffers take ``count`` more tokens as they are."""
        keys, owned = self._keys, self._owned
        return (
            owned
            and keys is not None
            and self._length + count <= keys.shape[2]
            and batch == keys.shape[0]
            and (not keys.is_inference() or torch.is_inference_mode_enabled())
        )

    def take(self, count: int) -> tuple[Tensor, Tensor, int]:
        """Add ``count`` tokens, for which there is room and which the caller writes.

        Returns: keys and values [B, room, K, D], tokens before heads; the place of the first new token.
        """
        start = self._length
        self._length = start + count
        return *self._by_token, start

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """``update`` with tokens before heads, as attention reads them, and without gradients.

        Args:
            key, value: [B, S, K, D] of the new tokens.

        Returns: [B, L, K, D] of all tokens, views of the buffers.
        """
        count = key.shape[1]
        if not self.has_room(key.shape[0], count):
            self.make_room(key.transpose(1, 2), value.transpose(1, 2))
        keys, values, start = self.take(count)
        keys.narrow(1, start, count).copy_(key)
        values.narrow(1, start, count).copy_(value)
        end = start + count
        return keys.narrow(1, 0, end), values.narrow(1, 0, end)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove < 0 and self.is_initialized:
            self._length = max(0, self._length + tokens_to_remove)
        else:
            super().crop(tokens_to_remove)

    def _front(self, buffer: Tensor | None) -> Tensor | None:
        return buffer if buffer is None or buffer.dim() < 2 else buffer.narrow(-2, 0, self._length)

    def make_room(self, key_states: Tensor, value_states: Tensor) -> None:
        """Larger buffers for the tokens so far and these new ones [B, K, S, D], which are not written."""
        end = self._length + key_states.shape[2]
        room = max(end + end // 4, -(-(end + 1) // _STEP) * _STEP)
        old = self.keys, self.values
        length = self._length
        fresh = []
        for states, kept in zip((key_states, value_states), old, strict=True):
            buffer = states.new_empty((*states.shape[:2], room, states.shape[-1]))
            if length:
                assert kept is not None
                buffer.narrow(2, 0, length).copy_(kept)
            fresh.append(buffer)
        self.device = key_states.device
        self._keys, self._values = fresh
        self._by_token = fresh[0].transpose(1, 2), fresh[1].transpose(1, 2)
        self._length, self._owned, self.is_initialized = length, True, True


def grow_in_place(cache: Cache, count: int) -> bool:
    """Make every layer of a ``DynamicCache`` a ``GrowingLayer``, contents kept. False for other caches and layers.

    Args:
        count: layers that the model has; a cache that makes its layers as it goes gets them now.
    """
    if type(cache) is not DynamicCache or cache.offloading:
        return False
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layers.extend(DynamicLayer() for _ in range(count - len(cache.layers)))
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[index] = _grown(layer)
        elif type(layer) is not GrowingLayer:
            return False
    return len(cache.layers) >= count


def _grown(layer: DynamicLayer) -> GrowingLayer:
    grown = GrowingLayer()
    if layer.is_initialized:
        grown.device, grown.keys, grown.values, grown.is_initialized = layer.device, layer.keys, layer.values, True
    return grown

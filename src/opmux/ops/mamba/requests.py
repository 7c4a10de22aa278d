"""The requests of one call: where their tokens lie, and where their states are kept."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class MambaState(NamedTuple):
    """What a mixer keeps between calls, one slot for each request; ``mixer.new_state(slots)`` makes it.

    A call reads and writes the slots that ``state_indices`` names, and no others. A freed slot needs no clearing: the
    next request that gets it says ``has_initial_state=False``, and then the slot is written but not read.

    Attributes:
        conv_state: [slots, K - 1 + speculative tokens, channels], the last inputs of the convolution, oldest first.
        ssm_state: the recurrent state, [slots, I, n] or [slots, heads, head size, n]; a short convolution has none.
    """

    conv_state: Tensor
    ssm_state: Tensor | None = None


class Request(NamedTuple):
    """One request of a call: rows ``start`` to ``end`` of the packed tokens.

    ``slots`` are those of the state, several where the state after each token is kept apart. ``accepted`` is how many
    tokens of the step before were right, 0 where nothing was guessed.
    """

    start: int
    end: int
    slots: list[int]
    fresh: bool
    accepted: int


class Requests:
    """The arguments that say so, checked.

    Without ``cu_seqlens`` the tokens [S, ...] are one request and [B, S, ...] are B of them; with it [T, ...] holds
    requests one after the other, request r in rows ``cu_seqlens[r]`` to ``cu_seqlens[r + 1]``.

    Raises:
        ValueError: shapes that do not fit, with what was expected.
    """

    def __init__(
        self, op: str, tokens: torch.Size, cu_seqlens: Tensor | None, state: Tensor | None,
        state_indices: Tensor | None, has_initial_state: Tensor | None, num_accepted_tokens: Tensor | None,
    ) -> None:  # fmt: skip
        if cu_seqlens is None:
            if len(tokens) not in (1, 2):
                raise ValueError(f"{op} takes tokens [S, ...] or [B, S, ...]; the leading sizes are {tuple(tokens)}.")
            self.count = 1 if len(tokens) == 1 else tokens[0]
            self.length = tokens[-1]
        else:
            if len(tokens) != 1 or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
                raise ValueError(
                    f"{op}: with cu_seqlens [requests + 1] the tokens are packed, [T, ...]; the leading sizes are "
                    f"{tuple(tokens)}, cu_seqlens {tuple(cu_seqlens.shape)}."
                )
            self.count = cu_seqlens.shape[0] - 1
            self.length = -1
        self.tokens = tokens.numel()
        if state is None and not (state_indices is None and has_initial_state is None and num_accepted_tokens is None):
            raise ValueError(f"{op} got arguments about a state (slots, initial states), and no state.")
        if state is not None and state_indices is None and state.shape[0] < self.count:
            raise ValueError(
                f"{op}: the state has {state.shape[0]} slots for {self.count} requests. Give state_indices, or a state "
                "with a slot for each request."
            )
        for name, given, dims in (
            ("state_indices", state_indices, (1, 2)),
            ("has_initial_state", has_initial_state, (1,)),
            ("num_accepted_tokens", num_accepted_tokens, (1,)),
        ):
            if given is not None and (given.dim() not in dims or given.shape[0] != self.count):
                raise ValueError(
                    f"{op}: {name} has shape {tuple(given.shape)}; there are {self.count} requests, one entry for each."
                )
        self.cu_seqlens = cu_seqlens
        self.state_indices = state_indices
        self.has_initial_state = has_initial_state
        self.num_accepted_tokens = num_accepted_tokens
        self.slots = 0 if state is None else state.shape[0]

    def __iter__(self):  # type: ignore[no-untyped-def]
        """Every request that is no padding (its slot lies outside the state); reads the arguments' values."""
        n = self.count
        bounds = [i * self.length for i in range(n + 1)] if self.cu_seqlens is None else self.cu_seqlens.tolist()
        slots = [[r] for r in range(n)]
        if self.state_indices is not None:
            slots = self.state_indices.view(n, -1).tolist()
        fresh = [True] * n if self.has_initial_state is None else [not old for old in self.has_initial_state.tolist()]
        accepted = [0] * n if self.num_accepted_tokens is None else self.num_accepted_tokens.tolist()
        for r in range(n):
            if not self.slots or 0 <= slots[r][0] < self.slots:
                yield Request(bounds[r], bounds[r + 1], slots[r], fresh[r], accepted[r])

    def loop_arguments(self, device: torch.device) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """cu_seqlens, state_indices, has_initial_state and num_accepted_tokens as the kernels read them: dense int32."""
        given = (self.cu_seqlens, self.state_indices, self.has_initial_state, self.num_accepted_tokens)
        dense = [None if t is None else t.to(device, torch.int32).contiguous() for t in given]
        return dense[0], dense[1], dense[2], dense[3]

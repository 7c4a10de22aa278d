"""The convolution and the scans of state-space mixers: requests, slots and windows, by native and by the CPU kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from opmux.native import library
from opmux.ops import CausalConv1d, Mixer2RMSNormGated, SelectiveScan, SSDScan

METHODS = [
    "forward_native",
    pytest.param(
        "forward_cpu",
        marks=pytest.mark.skipif(not library.available, reason=f"compiled CPU library: {library.reason}"),
    ),
]
both = pytest.mark.parametrize("method", METHODS)
SLOTS, WIDTH, HEADS, SIZE, GROUPS, STATES = 6, 5, 4, 3, 2, 4

Run = Callable[..., Tensor]  # (tokens of the packed inputs, state, and the arguments about requests)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


class Layer:
    """One of the three ops with fixed weights, as a function of a slice of one sequence of tokens."""

    def __init__(self, kind: str, method: str) -> None:
        self.kind = kind
        if kind == "conv":
            self.inputs = [randn(40, WIDTH)]
            self.weights, self.shape = [randn(WIDTH, 4), randn(WIDTH)], (3, WIDTH)
            self.call = getattr(CausalConv1d(), method)
        elif kind == "selective":
            t = (40,)
            self.inputs = [randn(*t, WIDTH), randn(*t, WIDTH, seed=1), randn(*t, STATES), randn(*t, STATES, seed=1)]
            self.weights, self.shape = [-randn(WIDTH, STATES).abs(), randn(WIDTH)], (WIDTH, STATES)
            self.call = getattr(SelectiveScan(), method)
        else:
            t = (40,)
            self.inputs = [randn(*t, HEADS, SIZE), randn(*t, HEADS), randn(*t, GROUPS, STATES)]
            self.inputs.append(randn(*t, GROUPS, STATES, seed=1))
            self.weights, self.shape = [-randn(HEADS).abs(), randn(HEADS)], (HEADS, SIZE, STATES)
            self.call = getattr(SSDScan(), method)

    def new_state(self, fill: float = float("nan"), slots: int = SLOTS, extra: int = 0) -> Tensor:
        rows = (self.shape[0] + extra, *self.shape[1:]) if self.kind == "conv" else self.shape
        return torch.full((slots, *rows), fill)

    def __call__(self, tokens: Any, state: Tensor | None = None, **requests: Any) -> Tensor:
        """Run on the tokens (a slice, or indices of any shape)."""
        parts = [t[tokens] for t in self.inputs]
        named: dict[str, Any] = {k: torch.tensor(v) for k, v in requests.items() if v is not None}
        with torch.no_grad():
            if self.kind == "conv":
                return self.call(*parts, *self.weights, conv_state=state, **named)
            a, d = self.weights
            x, dt, b, c = parts
            return self.call(x, dt, a, b, c, d, ssm_state=state, **named)


@pytest.fixture(params=["conv", "selective", "ssd"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def same(out: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(out, want, rtol=2e-5, atol=2e-5)


@both
@pytest.mark.parametrize("cuts", [[(0, 3), (3, 5)], [(0, 4), (4, 10), (10, 11)], [(0, 8)], [(0, 1)], [(0, 1), (1, 19)]])
def test_pieces_with_the_state_handed_on_are_the_whole(kind, method, cuts):
    layer, whole_state, state = Layer(kind, method), None, None
    end = cuts[-1][1]
    whole_state, state = layer.new_state(), layer.new_state()
    whole = layer(slice(0, end), whole_state, state_indices=[3])
    pieces = [
        layer(slice(a, b), state, state_indices=[3], has_initial_state=[number > 0])
        for number, (a, b) in enumerate(cuts)
    ]
    same(torch.cat(pieces), whole)
    same(state[3], whole_state[3])
    same(whole, Layer(kind, "forward_native")(slice(0, end)))


@both
def test_packed_prompts_and_steps_are_what_each_is_alone(kind, method):
    layer = Layer(kind, method)
    # Two steps, an empty request, two prompts of which one goes on, and a request of padding.
    lengths, slots, old = [1, 1, 0, 11, 7, 2], [5, 0, 4, 1, 2, -1], [True, True, True, False, True, True]
    cu = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    state = layer.new_state(0.0)
    state += randn(*state.shape)
    state[1] = float("nan")  # left by a request that is gone
    alone, before = state.clone(), state.clone()
    together = layer(slice(0, 25), state, cu_seqlens=cu, state_indices=slots, has_initial_state=old)
    for r, slot in enumerate(slots[:-1]):
        rows = slice(cu[r], cu[r + 1])
        same(together[rows], layer(rows, alone, state_indices=[slot], has_initial_state=[old[r]]))
    same(state[[0, 1, 2, 5]], alone[[0, 1, 2, 5]])
    assert torch.equal(state[4], before[4]), "an empty request keeps its state"
    assert torch.equal(state[3], before[3]), "nobody's slot"
    assert not together[cu[-2] :].any(), "padding, and rows behind the last request"


@both
def test_a_batch_is_requests_of_equal_length(kind, method):
    layer = Layer(kind, method)
    state, packed_state = layer.new_state(), layer.new_state()
    out = layer(torch.arange(24).view(3, 8), state)
    packed = layer(slice(0, 24), packed_state, cu_seqlens=[0, 8, 16, 24], state_indices=[0, 1, 2])
    same(out.flatten(0, 1), packed)
    same(state[:3], packed_state[:3])


@both
def test_empty_requests_leave_zeros_or_their_state(kind, method):
    layer = Layer(kind, method)
    for cu in ([0, 0, 2, 2, 5, 5], [0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 0]):
        state = layer.new_state()
        state[1] = state[3] = 0.25
        out = layer(slice(0, cu[-1]), state, cu_seqlens=cu, has_initial_state=[False, True, False, True, False])
        assert out.isfinite().all()
        lengths = torch.tensor(cu).diff()
        for r in range(5):
            expected = 0.25 if r in (1, 3) else 0.0
            assert lengths[r] > 0 or bool((state[r] == expected).all())
    assert layer(slice(0, 0), layer.new_state(), cu_seqlens=[0]).shape[0] == 0


@both
@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_guesses_of_which_some_are_dropped(kind, method, accepted):
    layer = Layer(kind, method)
    whole = layer(slice(0, 10 + accepted + 2))
    state = layer.new_state(extra=2)
    slots = [3] if kind == "conv" else [[3, 4, 5]]
    layer(slice(0, 10), state, state_indices=slots)  # the prompt
    step = {"state_indices": slots, "has_initial_state": [True]}
    guessed = torch.tensor([10, 11, 12])
    guessed[accepted:] = 30  # wrong ones
    first = layer(guessed, state, num_accepted_tokens=[1], **step)
    same(first[:accepted], whole[10 : 10 + accepted])
    second = layer(slice(10 + accepted, 12 + accepted), state, num_accepted_tokens=[accepted], **step)
    same(second, whole[10 + accepted : 12 + accepted])


@both
def test_a_slot_may_lie_channels_first_and_in_another_dtype(method):
    layer = Layer("conv", method)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        state = torch.full((SLOTS, WIDTH, 4), 7.0, dtype=dtype).transpose(1, 2)
        want = layer.new_state().to(dtype)
        for old, rows in ((False, slice(0, 6)), (True, slice(6, 7))):
            requests = {"state_indices": [2], "has_initial_state": [old]}
            assert torch.equal(layer(rows, state, **requests), layer(rows, want, **requests))
        assert torch.equal(state[2, :3], want[2])
        assert bool((state[2, 3] == 7.0).all()), "rows behind the window are nobody's"


@both
def test_dirty_slot_is_not_read(method):
    conv = getattr(CausalConv1d(activation=None), method)
    x, weight = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([[1.0, 10.0, 100.0]])
    for old in (torch.tensor([False, False]), None):
        state = torch.tensor([7.0, 8.0]).view(1, 2, 1).repeat(3, 1, 1)
        cu, slots = torch.tensor([0, 4, 4]), torch.tensor([1, -1])
        y = conv(x, weight, None, state, slots, old, cu)
        assert y.flatten().tolist() == [100.0, 210.0, 321.0, 432.0]
        assert state[1].flatten().tolist() == [3.0, 4.0]
        assert state[[0, 2]].flatten().tolist() == [7.0, 8.0] * 2
    y = conv(torch.tensor([[5.0]]), weight, None, state, torch.tensor([1]), torch.tensor([True]))
    assert y.item() == 3.0 + 40.0 + 500.0


@both
def test_states_of_a_decay_of_one_half(method):
    a, one = torch.tensor([[-1.0]]), torch.ones(4, 1)
    dt = torch.full((4, 1), 0.0)  # softplus(0) = ln 2, so that exp(-dt) is one half
    scale = 1 / dt.new_tensor(2.0).log()
    y = getattr(SelectiveScan(), method)(one * scale, dt, a, one, one)
    torch.testing.assert_close(y.flatten(), torch.tensor([1.0, 1.5, 1.75, 1.875]))
    y = getattr(SelectiveScan(), method)(one * scale, dt, a, one, one, cu_seqlens=torch.tensor([0, 2, 4]))
    torch.testing.assert_close(y.flatten(), torch.tensor([1.0, 1.5, 1.0, 1.5]))
    y = getattr(SSDScan(), method)(one[..., None] * scale, dt, a[0], one[..., None], one[..., None])
    torch.testing.assert_close(y.flatten(), torch.tensor([1.0, 1.5, 1.75, 1.875]))


@both
def test_a_large_dt_is_itself(method):
    dt = torch.tensor([[-80.0], [-20.0], [0.0], [19.0], [21.0], [300.0], [float("inf")]]).view(7, 1, 1)
    one = torch.ones(7, 1, 1)
    y = getattr(SelectiveScan(), method)(one, dt, torch.tensor([[-1.0]]), one, one).flatten()
    want = torch.nn.functional.softplus(dt.double()).flatten()
    torch.testing.assert_close(y[:-1].double(), want[:-1], rtol=1e-6, atol=0)
    assert y[-1].isinf()


@pytest.mark.parametrize(("groups", "want"), [(2, [1.0, 1.0, 1.0, 1.0]), (1, [0.1407, 0.1407, 1.4072, 1.4072])])
@both
def test_gated_norm_of_groups(method, groups, want):
    op = Mixer2RMSNormGated(4, groups, eps=0.0)
    gate = torch.full((1, 4), 1.2784645)  # silu is one
    y = getattr(op, method)(torch.tensor([[1.0, 1.0, 10.0, 10.0]]), gate)
    torch.testing.assert_close(y, torch.tensor([want]), rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused():
    conv, x, w = CausalConv1d(), torch.zeros(4, 3), torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"weight \[D, K\]"):
        conv(x, torch.zeros(4, 2))
    with pytest.raises(ValueError, match=r"state \[slots, at least 1, 3\]"):
        conv(x, w, None, torch.zeros(2, 0, 3))
    with pytest.raises(ValueError, match="2 slots for 3 requests"):
        conv(x.view(1, 4, 3).expand(3, 4, 3), w, None, torch.zeros(2, 1, 3))
    with pytest.raises(ValueError, match="and no state"):
        conv(x, w, has_initial_state=torch.tensor([True]))
    with pytest.raises(ValueError, match="there are 1 requests"):
        conv(x, w, None, torch.zeros(2, 1, 3), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="packed"):
        conv(x.view(2, 2, 3), w, cu_seqlens=torch.tensor([0, 2, 4]))
    with pytest.raises(ValueError, match="knows 'silu'"):
        CausalConv1d("relu")
    with pytest.raises(ValueError, match="N a multiple of G"):
        SSDScan()(torch.zeros(2, 3, 4), torch.zeros(2, 3), torch.zeros(3), *[torch.zeros(2, 2, 4)] * 2)
    with pytest.raises(ValueError, match="cannot split 12 features into 5 groups"):
        Mixer2RMSNormGated(12, 5)

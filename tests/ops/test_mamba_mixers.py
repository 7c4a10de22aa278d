"""The mixers against transformers' layers, and their states: slots, pieces, packed prompts and steps, guesses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from opmux.native import library
from opmux.ops import MambaMixer, MambaMixer2, ShortConv

METHODS = [
    "forward_native",
    pytest.param(
        "forward_cpu",
        marks=pytest.mark.skipif(not library.available, reason=f"compiled CPU library: {library.reason}"),
    ),
]
both = pytest.mark.parametrize("method", METHODS)
KINDS = ["mamba", "falcon_mamba", "jamba", "mamba2", "bamba", "lfm2"]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def theirs(kind: str) -> tuple[Any, Any]:
    """transformers' layer with random weights, and its config."""
    pytest.importorskip("transformers")
    from transformers.models.bamba import configuration_bamba, modeling_bamba
    from transformers.models.falcon_mamba import configuration_falcon_mamba, modeling_falcon_mamba
    from transformers.models.jamba import configuration_jamba, modeling_jamba
    from transformers.models.lfm2 import configuration_lfm2, modeling_lfm2
    from transformers.models.mamba import configuration_mamba, modeling_mamba
    from transformers.models.mamba2 import configuration_mamba2, modeling_mamba2

    first = {"hidden_size": 8, "intermediate_size": 16, "state_size": 4, "time_step_rank": 3, "num_hidden_layers": 1}
    if kind == "mamba":
        config, cls = configuration_mamba.MambaConfig(**first), modeling_mamba.MambaMixer
    elif kind == "falcon_mamba":
        config, cls = configuration_falcon_mamba.FalconMambaConfig(**first), modeling_falcon_mamba.FalconMambaMixer
    elif kind == "jamba":
        config = configuration_jamba.JambaConfig(hidden_size=8, mamba_d_state=4, mamba_dt_rank=3, mamba_proj_bias=True)
        cls = modeling_jamba.JambaMambaMixer
    elif kind == "mamba2":
        config = configuration_mamba2.Mamba2Config(
            hidden_size=8, state_size=4, num_heads=4, head_dim=4, n_groups=2, num_hidden_layers=1, chunk_size=4
        )
        cls = modeling_mamba2.Mamba2Mixer
    elif kind == "bamba":
        config = configuration_bamba.BambaConfig(
            hidden_size=8, mamba_d_state=4, mamba_n_heads=4, mamba_d_head=4, mamba_n_groups=1, mamba_chunk_size=4,
            num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, attn_layer_indices=[],
        )  # fmt: skip
        cls = modeling_bamba.BambaMixer
    else:
        config = configuration_lfm2.Lfm2Config(hidden_size=8, num_hidden_layers=1, conv_bias=True, layer_types=["conv"])
        cls = modeling_lfm2.Lfm2ShortConv
    unset = {"initialize_mixer_weights": False} if "mamba" in kind and kind != "jamba" else {}
    layer = cls(config, layer_idx=0, **unset).eval().requires_grad_(False)
    for number, (name, parameter) in enumerate(layer.named_parameters()):
        scale = 0.3 if parameter.dim() > 1 and "A_log" not in name else 0.5
        parameter.copy_(randn(*parameter.shape, seed=number) * scale + (1.0 if "norm" in name else 0.0))
    return layer, config


def ours(kind: str) -> Any:
    layer, config = theirs(kind)
    if kind == "lfm2":
        op: Any = ShortConv(config, 8)
    elif kind in ("mamba2", "bamba"):
        op = MambaMixer2(8, 4, 4, 16, True, layer.use_bias, layer.n_groups, 4, 4, layer.norm.variance_epsilon)
    else:
        op = MambaMixer(
            8, 4, 4, 16, 3, True, layer.in_proj.bias is not None, kind != "mamba", kind == "jamba",
            1e-6 if kind == "mamba" else layer.b_layernorm.variance_epsilon,
        )  # fmt: skip
    op.load_weights(dict(layer.named_parameters()))
    return op


def run(op: Any, method: str, x: Tensor, state: Any = None, **requests: Any) -> Tensor:
    named = {k: torch.tensor(v) for k, v in requests.items()}
    states = {k: v for k, v in state._asdict().items() if v is not None} if state is not None else {}
    with torch.no_grad():
        return getattr(op, method)(x, **states, **named)


def same(out: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(out, want, rtol=2e-5, atol=2e-5)


@both
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_layer_on_a_prompt_and_steps(kind, method):
    from transformers.cache_utils import DynamicCache

    (layer, config), op, x = theirs(kind), ours(kind), randn(2, 9, 8)
    cache, state = DynamicCache(config=config), op.new_state(2)
    same(run(op, method, x[:, :6], state), layer(x[:, :6], cache=cache))
    for t in range(6, 9):
        step = x[:, t : t + 1]
        same(run(op, method, step, state, has_initial_state=[True, True]), layer(step, cache=cache))
    same(run(op, method, x), layer(x))


@both
@pytest.mark.parametrize("kind", ["jamba", "mamba2", "lfm2"])
def test_packed_prompts_and_steps_are_what_each_is_alone(kind, method):
    op, x = ours(kind), randn(24, 8)
    lengths, slots, old = [1, 1, 0, 11, 7, 2], [5, 0, 4, 1, 2, -1], [True, True, True, False, True, True]
    cu = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    state, alone = op.new_state(6), op.new_state(6)
    for t in (t for t in state if t is not None):
        t += randn(*t.shape)
        t[1] = float("nan")  # left by a request that is gone
    for to, source in zip(alone, state, strict=True):
        if to is not None:
            to.copy_(source)
    before = [None if t is None else t.clone() for t in state]
    out = run(op, method, x, state, cu_seqlens=cu, state_indices=slots, has_initial_state=old)
    for r, slot in enumerate(slots[:-1]):
        rows = slice(cu[r], cu[r + 1])
        want = run(op, method, x[rows], alone, state_indices=[slot], has_initial_state=[old[r]])
        same(out[rows], want)
    for t, a, b in zip(state, alone, before, strict=True):
        if t is not None:
            same(t[[0, 1, 2, 5]], a[[0, 1, 2, 5]])
            assert torch.equal(t[[3, 4]], b[[3, 4]]), "nobody's slot, and an empty request's"


@both
@pytest.mark.parametrize("kind", ["falcon_mamba", "bamba", "lfm2"])
@pytest.mark.parametrize("accepted", [1, 3])
def test_guesses_of_which_some_are_dropped(kind, method, accepted):
    op, x = ours(kind), randn(16, 8)
    whole = run(op, method, x)
    state = op.new_state(6, speculative_tokens=2)
    slots = [3] if kind == "lfm2" else [[3, 4, 5]]
    run(op, method, x[:10], state, state_indices=slots)
    guessed = torch.cat([x[10 : 10 + accepted], randn(3 - accepted, 8, seed=5)])
    step = {"state_indices": slots, "has_initial_state": [True]}
    first = run(op, method, guessed, state, num_accepted_tokens=[1], **step)
    same(first[:accepted], whole[10 : 10 + accepted])
    second = run(op, method, x[10 + accepted : 12 + accepted], state, num_accepted_tokens=[accepted], **step)
    same(second, whole[10 + accepted : 12 + accepted])


@both
def test_mup_vector_scales_the_projection(method):
    op, x, mup = ours("mamba2"), randn(5, 8), torch.rand(16 * 2 + 2 * 8 + 4) + 0.5
    out = run(op, method, x, mup_vector=mup.tolist())
    op.in_proj.weight.mul_(mup[:, None])
    if op.in_proj.bias is not None:
        op.in_proj.bias.mul_(mup)
    same(out, run(op, method, x))


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_decay_stays_fp32_whatever_the_mixer_is_cast_to(kind):
    op = ours(kind)
    before = op.A.clone()
    op.half().to(torch.bfloat16)
    assert op.in_proj.weight.dtype == torch.bfloat16
    assert torch.equal(op.A, before)
    assert op.new_state(1).conv_state.dtype == torch.bfloat16
    assert op.new_state(1).ssm_state.dtype == torch.float32
    assert op.double().A.dtype == torch.float64


def test_what_does_not_fit_is_refused():
    op, x = ours("mamba"), torch.zeros(2, 3, 8)
    state = op.new_state(2)
    with pytest.raises(ValueError, match="or neither"):
        op(x, conv_state=state.conv_state)
    with pytest.raises(ValueError, match=r"unknown: D2"):
        op.load_weights({"D2": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"num_heads \* head_dim"):
        MambaMixer2(8, 4, 4, 17, True, False, 1, 4, 4)
    with pytest.raises(ValueError, match="must divide num_heads"):
        MambaMixer2(8, 4, 4, 16, True, False, 3, 4, 4)
    weights = {"in_proj.weight": torch.zeros(24, 8), "conv.weight": torch.zeros(8, 1, 2)}
    with pytest.raises(ValueError, match=r"conv\.weight of the checkpoint is \(8, 1, 2\)"):
        ShortConv(SimpleNamespace(conv_L_cache=3, conv_bias=False), 8).load_weights(
            {**weights, "out_proj.weight": torch.zeros(8, 8)}
        )

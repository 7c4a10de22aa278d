"""The MoE layer and its methods: what is computed where, once; steps that are replaced; weights that are loaded."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opmux import CompilationConfig, use_config
from opmux.core.cases import Inputs
from opmux.native import library
from opmux.ops import (
    FusedMoE,
    FusedMoEModularMethod,
    GroupedTopk,
    ModularKernel,
    Prepared,
    TransformersFusedMoE,
    UnquantizedFusedMoEMethod,
)
from opmux.ops.moe.experts import FusedMoEConfig, random_weights
from opmux.ops.moe.unquantized_fused_moe import sample_layer

H, I, E = 24, 16, 6
INF, NAN = math.inf, math.nan


@pytest.fixture(params=["none", "all"], autouse=True)
def directives(request: pytest.FixtureRequest) -> Any:
    """The definitions, and the kernels."""
    if request.param == "all" and not library.available:
        pytest.skip(f"compiled CPU library: {library.reason}")
    with use_config(CompilationConfig(custom_ops=[request.param])), torch.inference_mode():
        yield request.param


def layer(**settings: Any) -> Any:
    built = FusedMoE(**{"num_experts": E, "top_k": 2, "hidden_size": H, "intermediate_size": I, **settings})
    random_weights(built, Inputs(torch.float32))
    return built


def expected(layer: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """A loop over tokens, by the layer's SwiGLU weights."""
    out = torch.zeros_like(x)
    for t, j in itertools.product(range(ids.shape[0]), range(ids.shape[1])):
        gate, up = (layer.w13_weight[ids[t, j]] @ x[t]).chunk(2)
        out[t] += weights[t, j] * (layer.w2_weight[ids[t, j]] @ (F.silu(gate) * up))
    return out


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("on_output", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
def test_the_routed_factor_is_applied_once_and_not_to_shared_experts(renormalize: bool, on_output: bool) -> None:
    raw = torch.tensor([[0.1, 0.2, 0.6, 0.05, 0.01, 0.02]])
    shared = nn.Linear(H, H, bias=False)
    moe = layer(scoring_func="sigmoid", renormalize=renormalize, routed_scaling_factor=2.5,
                apply_routed_scale_to_output=on_output, shared_experts=shared)  # fmt: skip
    x = torch.randn(1, H)
    weights = torch.tensor([[1.875, 0.625]] if renormalize else [[1.5, 0.5]])
    close(moe(x, raw.logit()), expected(moe, x, weights, torch.tensor([[2, 1]])) + shared(x))


def test_one_expert_per_token_and_a_factor() -> None:
    moe = layer(top_k=1, renormalize=False, routed_scaling_factor=3.0, scoring_func="sigmoid")
    x, logits = torch.randn(4, H), torch.randn(4, E)
    best = logits.sigmoid().max(-1, keepdim=True)
    close(moe(x, logits), expected(moe, x, best.values * 3.0, best.indices))


def test_its_own_gate_makes_the_logits_and_a_shared_gate_weighs() -> None:
    gate, shared, shared_gate = nn.Linear(H, E), nn.Linear(H, H), nn.Linear(H, 1)
    moe = layer(gate=gate, shared_experts=shared, shared_expert_gate=shared_gate)
    x = torch.randn(5, H)
    weights, ids = GroupedTopk(2, True)(x, gate(x))
    wanted = expected(moe, x, weights, ids) + shared_gate(x).sigmoid() * shared(x)
    close(moe(x), wanted)
    close(moe(x, torch.randn(5, E)), wanted)  # its own gate has the say
    with pytest.raises(ValueError, match="without a gate of its own"):
        layer()(x)


def test_a_custom_routing_function_takes_the_place_of_the_router() -> None:
    def first_and_last(x: Tensor, logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        assert (top_k, renormalize) == (2, False)
        ids = torch.tensor([[0, E - 1]]).expand(len(x), 2)
        return torch.full((len(x), 2), 0.5, dtype=torch.float64), ids

    moe = layer(custom_routing_function=first_and_last, renormalize=False)
    x = torch.randn(3, H)
    close(moe(x, torch.randn(3, E)), expected(moe, x, torch.full((3, 2), 0.5), torch.tensor([[0, E - 1]] * 3)))


def test_router_rows_without_a_number_still_give_numbers() -> None:
    moe = layer(use_grouped_topk=True, num_expert_group=3, topk_group=2)
    logits = torch.tensor([[NAN] * E, [-INF] * E, [INF] * E, [NAN, -INF] * 3])
    assert moe(torch.randn(4, H), logits).isfinite().all()
    assert moe(torch.empty(0, H), torch.empty(0, E)).shape == (0, H)


def test_weight_on_input_gives_the_weight_to_the_input() -> None:
    moe = layer(top_k=1, apply_router_weight_on_input=True, scoring_func="sigmoid", renormalize=False)
    x, logits = torch.randn(4, H), torch.randn(4, E)
    best = logits.sigmoid().max(-1, keepdim=True)
    close(moe(x, logits), expected(moe, x * best.values, torch.ones(4, 1), best.indices))


@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2_no_mul"])
def test_a_checkpoint_by_parts_and_as_a_whole(activation: str) -> None:
    gated = not activation.endswith("_no_mul")
    one, other = (layer(activation=activation, has_bias=True) for _ in range(2))
    gate, up, down = torch.randn(E, I, H), torch.randn(E, I, H), torch.randn(E, H, I)
    gate_bias, up_bias, down_bias = torch.randn(E, I), torch.randn(E, I), torch.randn(E, H)
    for e in range(E):
        assert one.load_expert(e, "w1", gate[e], gate_bias[e])
        assert one.load_expert(e, "w2", down[e], down_bias[e])
        if gated:
            assert one.load_expert(e, "w3", up[e], up_bias[e])
    if activation == "swigluoai":
        both, both_bias = torch.stack((gate, up), 2).flatten(1, 2), torch.stack((gate_bias, up_bias), 2).flatten(1)
    elif gated:
        both, both_bias = torch.cat((gate, up), 1), torch.cat((gate_bias, up_bias), 1)
    else:
        both, both_bias = gate, gate_bias
    other.load_fused(both, down, both_bias, down_bias)
    for name in ("w13_weight", "w2_weight", "w13_bias", "w2_bias"):
        assert torch.equal(getattr(one, name), getattr(other, name))
    assert torch.equal(one.w13_weight, both)
    with pytest.raises(ValueError, match="no shard 'w4'"):
        one.load_expert(0, "w4", down[0])
    with pytest.raises(ValueError, match=f"no expert {E}"):
        one.load_expert(E, "w2", down[0])
    with pytest.raises(ValueError, match="w2 of expert 0 of the checkpoint is"):
        one.load_expert(0, "w2", down[0][1:])


def test_each_step_of_the_modular_method_can_be_replaced() -> None:
    config = FusedMoEConfig(E, 2, H, I)
    weights_layer, method = sample_layer(config, Inputs(torch.float32)), UnquantizedFusedMoEMethod(config)
    x, weights, ids = torch.randn(3, H), torch.rand(3, 2), torch.tensor([[0, 5], [-1, 2], [E, 1]])
    wanted = method(weights_layer, x, weights, ids)
    close(FusedMoEModularMethod(method)(weights_layer, x, weights, ids), wanted)

    def backwards(x: Tensor, weights: Tensor, ids: Tensor) -> Prepared:
        return Prepared(x.flip(0), weights.flip(0), ids.flip(0), state="turned")

    def forwards(outputs: Tensor, weights: Tensor, prepared: Prepared, weigh: Any) -> Tensor:
        assert prepared.state == "turned"
        assert (outputs.shape, weights[0, 0]) == ((3, 2, H), 0)  # no expert has the id E
        return weigh(outputs, weights).flip(0)

    turned = FusedMoEModularMethod(method, ModularKernel(prepare=backwards, combine=forwards))
    close(turned(weights_layer, x, weights, ids), wanted)
    sums = FusedMoEModularMethod(method, ModularKernel(experts=lambda layer, x, w, ids: x.unsqueeze(1).repeat(1, 2, 1)))
    close(sums(weights_layer, x, weights, ids), x * torch.where((ids >= 0) & (ids < E), weights, 0).sum(-1, keepdim=True))
    with pytest.raises(NotImplementedError, match="weights that exist"):
        turned.create_weights(weights_layer, E, H, I)


@pytest.mark.parametrize("transposed", [False, True])
def test_transformers_experts_take_what_models_give(transposed: bool) -> None:
    config = FusedMoEConfig(E, 2, H, I)
    weights_layer = sample_layer(config, Inputs(torch.float32))
    op = TransformersFusedMoE(config, is_transposed=transposed)
    first, second = weights_layer.w13_weight, weights_layer.w2_weight
    op.gate_up_proj.copy_(first.transpose(1, 2) if transposed else first)
    op.down_proj.copy_(second.transpose(1, 2) if transposed else second)
    x, weights, ids = torch.randn(3, H), torch.rand(3, 2), torch.tensor([[0, 5], [3, 2], [4, 1]])
    wanted = expected(weights_layer, x, weights, ids)
    close(op(x, ids, weights), wanted)
    close(op(x, ids.int(), weights.double(), use_cache=False), wanted)
    ids[1], weights[1] = -1, NAN
    assert (op(x, ids, weights)[1] == 0).all()
    assert op(x[:0], ids[:0], weights[:0]).shape == (0, H)


def test_names_of_vllm_and_of_modules_walk_alike() -> None:
    config = FusedMoEConfig(E, 2, H, I)
    method, weights_layer = UnquantizedFusedMoEMethod(config), sample_layer(config, Inputs(torch.float32))
    call = torch.randn(2, H), torch.rand(2, 2), torch.tensor([[0, 1], [2, 3]])
    assert torch.equal(method.apply(weights_layer, *call), method(weights_layer, *call))
    seen: list[str] = []
    layer().apply(lambda m: seen.append(type(m).__name__))  # as nn.Module.apply
    assert "UnquantizedFusedMoEMethod" in seen

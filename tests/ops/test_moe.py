"""MoE: routing rules on the rows that broke others, and experts against a loop over tokens in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opmux import CompilationConfig, use_config
from opmux.core.cases import Inputs
from opmux.native import library
from opmux.native.loader import Kernels, NativeLibrary
from opmux.ops import GroupedTopk, UnquantizedFusedMoEMethod
from opmux.ops.moe import kernels_cpu
from opmux.ops.moe.experts import FusedMoEConfig
from opmux.ops.moe.routing import SCORES
from opmux.ops.moe.unquantized_fused_moe import sample_layer

NATIVE = CompilationConfig(custom_ops=["none"])
KERNEL = CompilationConfig(custom_ops=["all"])
INF, NAN = math.inf, math.nan


@pytest.fixture(params=["native", *(library.supported() if library.available else [])])
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The definition, and the kernels of every variant that this processor runs."""
    if request.param != "native":
        monkeypatch.setattr(kernels_cpu, "kernels", Kernels(NativeLibrary(variant=request.param)))
    with use_config(NATIVE if request.param == "native" else KERNEL), torch.inference_mode():
        yield request.param


def choose(logits: Any, bias: Any = None, **rules: Any) -> tuple[Tensor, Tensor]:
    op = GroupedTopk(**{"topk": 2, "renormalize": True, **rules})
    logits = torch.as_tensor(logits)
    logits = logits if logits.is_floating_point() else logits.float()
    return op(torch.empty(len(logits), 3), logits, None if bias is None else torch.tensor(bias, dtype=torch.float32))


# -- routing -----------------------------------------------------------------------------------------------------------


def test_groups_left_out_never_win_over_negative_scores(method: str) -> None:
    weights, ids = choose(
        [[1, 2, -3, -4]], [-3, -3, -5, -5], num_expert_group=2, topk_group=1, scoring_func="sigmoid"
    )
    assert ids.tolist() == [[1, 0]]
    torch.testing.assert_close(weights, torch.tensor([[0.5464, 0.4536]]), atol=5e-5, rtol=0)


@pytest.mark.parametrize(
    ("renormalize", "factor", "expected"),
    [(True, 2.5, [1.875, 0.625]), (False, 2.5, [1.5, 0.5]), (True, 1.0, [0.75, 0.25]), (False, 1.0, [0.6, 0.2])],
)
def test_the_factor_is_applied_once(method: str, renormalize: bool, factor: float, expected: list[float]) -> None:
    logits = torch.tensor([[0.2, 0.6]]).logit()
    weights, ids = choose(logits, renormalize=renormalize, routed_scaling_factor=factor, scoring_func="sigmoid")
    assert ids.tolist() == [[1, 0]]
    torch.testing.assert_close(weights, torch.tensor([expected]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 1000])
def test_ties_go_to_the_lowest_id(method: str, rows: int, dtype: torch.dtype) -> None:
    equal = torch.full((rows, 8), 0.5, dtype=dtype)
    for bias, score in itertools.product((None, [0.25] * 8), SCORES):
        assert choose(equal, bias, topk=3, scoring_func=score)[1].tolist() == [[0, 1, 2]] * rows
        grouped = choose(equal, bias, topk=3, num_expert_group=4, topk_group=2, scoring_func=score)
        assert grouped[1].tolist() == [[0, 1, 2]] * rows
    # Scores that collide once they are rounded to bf16, not before: the decision is fp32's.
    close = torch.tensor([[1.0, 1.0 + 2**-12, 1.0 + 2**-11]] * rows)
    assert choose(close, topk=3)[1].tolist() == [[2, 1, 0]] * rows
    one_group = torch.full((rows, 8), -INF, dtype=dtype)
    one_group[:, 4:6] = 1.0
    ids = choose(one_group, topk=2, num_expert_group=4, topk_group=1)[1]
    assert ids.tolist() == [[4, 5]] * rows


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("groups", [1, 3])
def test_rows_without_a_number_have_distinct_valid_ids_and_finite_weights(
    method: str, score: str, groups: int
) -> None:
    n = 6
    rows = torch.tensor([
        [NAN] * n, [-INF] * n, [INF] * n, [NAN, -INF] * 3, [INF, -INF, NAN, 0.0, 1.0, INF],
        [3e38] * n, [-3e38] * n, [0.0, NAN, 0.0, NAN, 0.0, NAN],
    ])  # fmt: skip
    for bias in (None, [0.0] * n, [NAN] * n, [INF, -INF, NAN, 0.0, 0.0, 0.0]):
        for k in (1, 4):
            weights, ids = choose(rows, bias, topk=k, scoring_func=score, num_expert_group=groups,
                                  topk_group=min(groups, 2))  # fmt: skip
            assert ids.min() >= 0
            assert ids.max() < n
            assert all(len(set(row)) == k for row in ids.tolist())
            assert weights.isfinite().all()
    assert choose(rows[:2], topk=3, scoring_func=score)[1].tolist() == [[0, 1, 2]] * 2
    assert choose(rows[7:], topk=4, scoring_func=score)[1].tolist() == [[0, 2, 4, 1]]


def test_no_tokens_every_expert_and_one_expert(method: str) -> None:
    weights, ids = choose(torch.empty(0, 12), topk=3)
    assert (weights.shape, ids.shape) == ((0, 3), (0, 3))
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    logits = torch.randn(4, 7)
    weights, ids = choose(logits, topk=7)
    assert torch.equal(ids.long(), logits.argsort(dim=-1, descending=True, stable=True))
    torch.testing.assert_close(weights.sum(-1), torch.ones(4))
    assert choose(torch.randn(2, 1), topk=1)[1].tolist() == [[0], [0]]


@pytest.mark.parametrize(
    ("experts", "rules", "message"),
    [
        (10, {"num_expert_group": 4, "topk_group": 2}, "10 experts do not divide into 4 groups"),
        (4, {"topk": 5}, r"top_k is 5; it must lie in 1\.\.4"),
        (8, {"topk": 3, "num_expert_group": 4, "topk_group": 1}, r"top_k is 3; it must lie in 1\.\.2"),
        (8, {"num_expert_group": 2, "topk_group": 3}, r"topk_group is 3; it must lie in 1\.\.2"),
        (8, {"scoring_func": "relu"}, "there are 'softmax', 'sigmoid', 'sqrtsoftplus'"),
    ],
)
def test_what_has_no_answer_is_refused(method: str, experts: int, rules: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(torch.randn(2, experts), **rules)


# -- experts -----------------------------------------------------------------------------------------------------------


def exact(layer: Any, config: FusedMoEConfig, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """A loop over tokens in float64, by itself: nothing of the op's own."""
    w13, w2 = layer.w13_weight.double(), layer.w2_weight.double()
    out = torch.zeros_like(x, dtype=torch.float64)
    local = getattr(layer, "expert_map", None)
    for t, j in itertools.product(range(ids.shape[0]), range(ids.shape[1])):
        e = int(ids[t, j])
        if not 0 <= e < (len(w13) if local is None else len(local)):
            continue
        e = e if local is None else int(local[e])
        if e < 0:
            continue
        scale = float(weights[t, j])
        v = x[t].double() * (scale if config.apply_router_weight_on_input else 1.0)
        h = w13[e] @ v
        if config.has_bias:
            h = h + layer.w13_bias[e].double()
        if config.activation == "swigluoai":
            gate, up = h[::2].clamp(max=7.0), h[1::2].clamp(-7.0, 7.0)
            h = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        elif config.activation == "relu2_no_mul":
            h = F.relu(h) ** 2
        else:
            gate, up = h.chunk(2)
            h = F.silu(gate) * up
        y = w2[e] @ h
        if config.has_bias:
            y = y + layer.w2_bias[e].double()
        out[t] += y * (1.0 if config.apply_router_weight_on_input else scale)
    return out


def check(config: FusedMoEConfig, tokens: int, dtype: torch.dtype, ids: Tensor | None = None,
          expert_map: list[int] | None = None, seed: int = 0) -> None:  # fmt: skip
    inputs = Inputs(dtype, seed=seed)
    layer = sample_layer(config, inputs)
    if expert_map is not None:
        layer.expert_map = torch.tensor(expert_map, dtype=torch.int32)
    k = config.experts_per_token
    if ids is None:
        ids = torch.stack([torch.randperm(config.num_experts)[:k] for _ in range(tokens)])
    weights = torch.rand(tokens, k) + 0.1
    x = inputs.randn(tokens, config.hidden_dim)
    out = UnquantizedFusedMoEMethod(config)(layer, x, weights, ids)
    assert out.dtype == dtype
    wanted = exact(layer, config, x, weights, ids)
    scale = wanted.abs().max() if tokens else 0.0
    assert out.shape == wanted.shape
    assert ((out.double() - wanted).abs() <= 4 * torch.finfo(dtype).eps * scale).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2_no_mul"])
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_experts_are_the_loop(method: str, activation: str, dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(tokens)
    for experts, hidden, inner, k in ((3, 65, 34, 3), (6, 64, 33, 2)):  # k = E; no powers of two; odd widths
        check(FusedMoEConfig(experts, k, hidden, inner, activation=activation, has_bias=activation == "swigluoai"),
              tokens, dtype)  # fmt: skip


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_ids_without_an_expert_here_contribute_nothing(method: str, ids_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = FusedMoEConfig(5, 3, 32, 16)
    ids = torch.tensor([[0, -1, 4], [-1, -1, -1], [5, 1, 2], [3, 1000, -7], [2, 0, 1]], dtype=ids_dtype)
    check(config, 5, torch.float32, ids)
    # Experts 1 and 4 of five are here, in the other order.
    check(FusedMoEConfig(5, 3, 32, 16, num_local_experts=2), 5, torch.float32, ids, [-1, 1, -1, -1, 0])
    layer = sample_layer(config, Inputs(torch.float32))
    weights = torch.full((5, 3), NAN).masked_fill((ids >= 0) & (ids < 5), 1.0)
    out = UnquantizedFusedMoEMethod(config)(layer, torch.randn(5, 32), weights, ids)
    assert out.isfinite().all()
    assert (out[1] == 0).all()


def test_no_tokens_and_experts_without_tokens(method: str) -> None:
    config = FusedMoEConfig(9, 2, 24, 40)
    check(config, 0, torch.float32, torch.empty(0, 2, dtype=torch.int64))
    for dtype in (torch.float32, torch.bfloat16):
        check(config, 33, dtype, torch.tensor([[8, 3]] * 33))


def test_weight_on_input(method: str) -> None:
    torch.manual_seed(1)
    check(FusedMoEConfig(4, 1, 32, 16, apply_router_weight_on_input=True), 6, torch.float32)
    with pytest.raises(ValueError, match="needs one expert per token"):
        FusedMoEConfig(4, 2, 32, 16, apply_router_weight_on_input=True)


def test_rows_are_independent_of_the_batch(method: str) -> None:
    """A token gives the same numbers alone and among others, within rounding."""
    torch.manual_seed(2)
    config = FusedMoEConfig(6, 2, 64, 48)
    layer, op = sample_layer(config, Inputs(torch.float32)), UnquantizedFusedMoEMethod(config)
    x, weights = torch.randn(40, 64), torch.rand(40, 2)
    ids = torch.stack([torch.randperm(6)[:2] for _ in range(40)])
    alone = torch.cat([op(layer, x[t : t + 1], weights[t : t + 1], ids[t : t + 1]) for t in range(40)])
    torch.testing.assert_close(op(layer, x, weights, ids), alone, atol=1e-5, rtol=1e-5)


def test_transposed_weights_and_views_give_the_same(method: str) -> None:
    config = FusedMoEConfig(3, 2, 20, 12)
    layer, op = sample_layer(config, Inputs(torch.float32)), UnquantizedFusedMoEMethod(config)
    x, weights, ids = torch.randn(4, 20), torch.rand(4, 2), torch.tensor([[0, 1], [2, 0], [1, 2], [2, 1]])
    wanted = op(layer, x, weights, ids)
    for name in ("w13_weight", "w2_weight"):
        w = getattr(layer, name)
        setattr(layer, name, nn.Parameter(w.transpose(1, 2).contiguous().transpose(1, 2), requires_grad=False))
    wide = torch.full((4, 27), NAN)
    wide[:, 3:23] = x
    out = op(layer, wide[:, 3:23], weights.double(), ids.t().contiguous().t())
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.randn(2, 9)}, ValueError, r"take \[T, 8\]"),
        ({"ids": torch.zeros(3, 2, dtype=torch.int32)}, ValueError, r"must be \[T, k\] with T = 2"),
        ({"ids": torch.zeros(2, 2)}, TypeError, "must be int32 or int64"),
        ({"x": torch.randn(2, 8).bfloat16()}, TypeError, "cast one of them"),
        ({"w2_weight": torch.randn(3, 8, 5)}, ValueError, r"must be \[E, 2 I, H\] and \[E, H, I\]"),
    ],
)
def test_what_does_not_belong_together_is_refused(
    method: str, change: dict[str, Tensor], error: type[Exception], message: str
) -> None:
    config = FusedMoEConfig(3, 2, 8, 4)
    layer = sample_layer(config, Inputs(torch.float32))
    if "w2_weight" in change:
        layer.w2_weight = nn.Parameter(change["w2_weight"], requires_grad=False)
    given = {"x": torch.randn(2, 8), "w": torch.rand(2, 2), "ids": torch.zeros(2, 2, dtype=torch.int32)} | change
    with pytest.raises(error, match=message):
        UnquantizedFusedMoEMethod(config)(layer, given["x"], given["w"], given["ids"])


def test_an_unknown_activation_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="'silu'"):
        FusedMoEConfig(4, 2, 8, 8, activation="sillu")

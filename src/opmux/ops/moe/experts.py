"""Running experts: the definition that every MoE op shares, its settings, and what its weights look like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.cases import Case, Cost, Inputs
from ...core.errors import did_you_mean
from ...core.numerics import wide
from ...core.parameters import frozen


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_SAME = {"gelu_pytorch_tanh": "gelu_tanh"}
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": _gelu_tanh, "relu2": _relu2,
}  # fmt: skip
ACTIVATIONS = (*_FUNCTIONS, *_SAME, "swigluoai", "swigluoai_uninterleave", *(f"{name}_no_mul" for name in _FUNCTIONS))


@dataclass(frozen=True)
class Activation:
    """What stands between the two products of an expert.

    Attributes:
        kind: silu, gelu, gelu_tanh, relu2 or swigluoai.
        gated: the first product makes a gate and an up half; else the activation alone follows it.
        interleaved: gate and up rows alternate, gates at even rows; else all gates come before all ups.
        alpha, limit: of swigluoai.
    """

    kind: str
    gated: bool = True
    interleaved: bool = False
    alpha: float = 1.702
    limit: float = 7.0

    @classmethod
    def named(cls, name: str, alpha: float | None = None, limit: float | None = None) -> Activation:
        """The activation by vLLM's name; ValueError for another one."""
        if name not in ACTIVATIONS:
            raise ValueError(f"There is no MoE activation {name!r}. {did_you_mean(name, ACTIVATIONS)}")
        name = _SAME.get(name, name)
        if name.startswith("swigluoai"):
            found = cls("swigluoai", interleaved=name == "swigluoai")
            return replace(
                found, alpha=found.alpha if alpha is None else alpha, limit=found.limit if limit is None else limit
            )
        return cls(name.removesuffix("_no_mul"), gated=not name.endswith("_no_mul"))

    @property
    def halves(self) -> int:
        """Rows of the first weight for each feature between the products."""
        return 2 if self.gated else 1

    def rules(self) -> tuple[str, bool, bool, float, float]:
        """The settings as kernels take them."""
        return self.kind, self.gated, self.interleaved, self.alpha, self.limit

    def __call__(self, h: Tensor) -> Tensor:
        """h [..., halves * I] -> [..., I]: in fp32, rounded once."""
        x = wide(h)
        if not self.gated:
            return _FUNCTIONS[self.kind](x).to(h.dtype)
        gate, up = (x[..., ::2], x[..., 1::2]) if self.interleaved else x.chunk(2, -1)
        if self.kind == "swigluoai":
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
            return ((up + 1) * gate * torch.sigmoid(self.alpha * gate)).to(h.dtype)
        return (_FUNCTIONS[self.kind](gate) * up).to(h.dtype)


@dataclass(frozen=True)
class FusedMoEConfig:
    """The settings of an MoE layer's experts.

    Attributes:
        num_experts: E, of the whole layer.
        experts_per_token: k.
        hidden_dim: H.
        intermediate_size_per_partition: I, on this rank.
        num_local_experts: experts whose weights are here; None means all.
        activation: one of ``ACTIVATIONS``.
        has_bias: both products have biases.
        apply_router_weight_on_input: multiply the expert's input by its weight, not its output; needs k = 1.
        swiglu_alpha, swiglu_limit: of swigluoai; None means 1.702 and 7.
    """

    num_experts: int
    experts_per_token: int
    hidden_dim: int
    intermediate_size_per_partition: int
    num_local_experts: int | None = None
    activation: str = "silu"
    has_bias: bool = False
    apply_router_weight_on_input: bool = False
    swiglu_alpha: float | None = None
    swiglu_limit: float | None = None

    def __post_init__(self) -> None:
        self.function()
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(f"experts_per_token is {self.experts_per_token}; it must lie in 1..{self.num_experts}.")
        if self.apply_router_weight_on_input and self.experts_per_token != 1:
            raise ValueError(
                "apply_router_weight_on_input needs one expert per token, for one input has one weight; "
                f"experts_per_token is {self.experts_per_token}."
            )

    def function(self) -> Activation:
        return Activation.named(self.activation, self.swiglu_alpha, self.swiglu_limit)

    @property
    def local_experts(self) -> int:
        return self.num_experts if self.num_local_experts is None else self.num_local_experts


@dataclass(frozen=True)
class Weights:
    """The weights of a layer's experts, as a call reads them.

    Attributes:
        w13: [E, 2 I, H] (or [E, I, H] without a gate), any strides.
        w2: [E, H, I], any strides.
        b13, b2: [E, 2 I] and [E, H], or None.
        expert_map: int32 [experts of the whole layer] -> the expert here or -1, or None where all are here.
    """

    w13: Tensor
    w2: Tensor
    b13: Tensor | None = None
    b2: Tensor | None = None
    expert_map: Tensor | None = None

    @classmethod
    def of(cls, layer: Any) -> Weights:
        """The weights of a layer that names them as vLLM does."""
        found = (getattr(layer, name, None) for name in ("w13_bias", "w2_bias", "expert_map"))
        return cls(layer.w13_weight, layer.w2_weight, *found)

    def check(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, activation: Activation) -> None:
        """ValueError where shapes or dtypes do not belong together: a kernel would read beyond them."""
        experts, rows, hidden = self.w13.shape
        inner = rows // activation.halves
        wanted = (experts, hidden, inner)
        if rows % activation.halves or tuple(self.w2.shape) != wanted:
            raise ValueError(
                f"The experts' weights are {tuple(self.w13.shape)} and {tuple(self.w2.shape)}; with this activation they "
                f"must be [E, {activation.halves} I, H] and [E, H, I]."
            )
        for bias, size in ((self.b13, (experts, rows)), (self.b2, (experts, hidden))):
            if bias is not None and tuple(bias.shape) != size:
                raise ValueError(f"An expert bias has shape {tuple(bias.shape)}; it must be {size}.")
        if x.dim() != 2 or x.shape[1] != hidden:
            raise ValueError(f"These experts take [T, {hidden}]; x has shape {tuple(x.shape)}.")
        if topk_ids.dim() != 2 or topk_ids.shape[0] != x.shape[0] or topk_weights.shape != topk_ids.shape:
            raise ValueError(
                f"topk_weights and topk_ids must be [T, k] with T = {x.shape[0]}; they are "
                f"{tuple(topk_weights.shape)} and {tuple(topk_ids.shape)}."
            )
        if topk_ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"topk_ids are {topk_ids.dtype}; they must be int32 or int64.")
        if any(t is not None and t.dtype != x.dtype for t in (self.w13, self.w2, self.b13, self.b2)):
            raise TypeError(f"The experts' weights are {self.w13.dtype} and x is {x.dtype}; cast one of them.")

    def with_routing(
        self, topk_weights: Tensor, topk_ids: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Weights and routing in the order in which kernels take them, behind x."""
        return self.w13, self.w2, topk_weights, topk_ids, self.b13, self.b2, self.expert_map

    def local(self, ids: Tensor) -> Tensor:
        """Experts here by ids of the whole layer; -1 for every id that is none, or not here."""
        if self.expert_map is not None:
            known = (ids >= 0) & (ids < self.expert_map.shape[0])
            ids = torch.where(known, self.expert_map[torch.where(known, ids, 0).long()], -1)
        return torch.where((ids >= 0) & (ids < self.w13.shape[0]), ids, -1)


def outputs_native(x: Tensor, weights: Weights, topk_weights: Tensor, topk_ids: Tensor, activation: Activation,
                   weight_on_input: bool) -> Tensor:  # fmt: skip
    """What each chosen expert makes of its token: [T, k, H] in x's dtype, zeros where there is no expert."""
    local = weights.local(topk_ids)
    tokens, top_k = local.shape
    slots = x.unsqueeze(1).expand(tokens, top_k, x.shape[1])
    if weight_on_input:
        slots = (wide(slots) * wide(topk_weights).unsqueeze(-1)).to(x.dtype)
    slots, flat = slots.flatten(0, 1), local.flatten()
    if torch.compiler.is_compiling() or not _has_values(x):
        # A graph cannot depend on which experts were chosen: every expert takes every slot.
        y = torch.zeros_like(slots)
        for e in range(weights.w13.shape[0]):
            y = torch.where((flat == e).unsqueeze(-1), _expert(slots, weights, e, activation), y)
        return y.unflatten(0, (tokens, top_k))
    places, parts = [], []
    for e in range(weights.w13.shape[0]):
        mine = (flat == e).nonzero().squeeze(1)
        if mine.numel():
            places.append(mine)
            parts.append(_expert(slots[mine], weights, e, activation))
    y = torch.zeros(slots.shape, dtype=x.dtype, device=x.device)
    if parts:
        y = y.index_copy(0, torch.cat(places), torch.cat(parts))
    return y.unflatten(0, (tokens, top_k))


def _expert(x: Tensor, weights: Weights, e: int, activation: Activation) -> Tensor:
    """Expert e on x [N, H]; both products accumulate in fp32 and are rounded to x's dtype."""
    h = F.linear(x, weights.w13[e], None if weights.b13 is None else weights.b13[e])
    return F.linear(activation(h), weights.w2[e], None if weights.b2 is None else weights.b2[e])


def combine_native(outputs: Tensor, topk_weights: Tensor) -> Tensor:
    """``sum_j w_j y_j`` of outputs [T, k, H]: products and sum in fp32, in the order of j, rounded once."""
    total = torch.zeros(outputs[:, 0].shape, dtype=wide(outputs[:0]).dtype, device=outputs.device)
    for j in range(outputs.shape[1]):
        total = total + wide(outputs[:, j]) * wide(topk_weights[:, j]).to(total.dtype).unsqueeze(-1)
    return total.to(outputs.dtype)


def experts_native(x: Tensor, weights: Weights, topk_weights: Tensor, topk_ids: Tensor, activation: Activation,
                   weight_on_input: bool) -> Tensor:  # fmt: skip
    """Experts and their weighted sum: [T, H]."""
    y = outputs_native(x, weights, topk_weights, topk_ids, activation, weight_on_input)
    if weight_on_input:
        return combine_native(y, torch.ones_like(topk_weights))
    # A weight of NaN or infinity beside an id that is no expert contributes nothing, either.
    return combine_native(y, torch.where(weights.local(topk_ids) >= 0, topk_weights, 0.0))


def _has_values(x: Tensor) -> bool:
    return not x.is_meta and type(x).__torch_dispatch__ is Tensor.__torch_dispatch__


# -- cases -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """The sizes of one case, the activation, and what is odd about its ids."""

    tokens: int
    experts: int
    hidden: int
    inner: int
    top_k: int
    activation: str = "silu"
    bias: bool = False
    ids: str = "random"

    @property
    def name(self) -> str:
        odd = "" if self.ids == "random" else f", {self.ids}"
        return (
            f"T={self.tokens} E={self.experts} H={self.hidden} I={self.inner} k={self.top_k} {self.activation}"
            f"{'+bias' if self.bias else ''}{odd}"
        )

    def config(self, **more: Any) -> FusedMoEConfig:
        return FusedMoEConfig(
            self.experts, self.top_k, self.hidden, self.inner, activation=self.activation, has_bias=self.bias, **more
        )

    def routing(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """(weights fp32, ids int32), distinct ids in each row."""
        generator = torch.Generator().manual_seed(inputs.seed + self.tokens)
        order = torch.rand(self.tokens, self.experts, generator=generator).argsort(-1)
        ids = order[:, : self.top_k].to(torch.int32)
        if self.ids == "few experts":
            ids = ids % max(1, self.experts // 4)
        if self.ids == "ids without an expert":
            ids[::2, 0], ids[1::3, -1], ids[-1] = -1, self.experts + 3, -1
        weights = torch.rand(self.tokens, self.top_k, generator=generator) + 0.1
        return (weights / weights.sum(-1, keepdim=True)).to(inputs.device), ids.to(inputs.device)

    def dims(self) -> dict[str, int]:
        return {"T": self.tokens, "E": self.experts, "H": self.hidden, "I": self.inner, "k": self.top_k,
                "halves": Activation.named(self.activation).halves}  # fmt: skip


QWEN3_30B = (128, 2048, 768, 8)
MIXTRAL = (8, 4096, 14336, 2)


def shapes() -> Iterator[tuple[Shape, bool]]:
    """(shape, whether it is worth timing): real layers, then edges."""
    for tokens in (1, 16, 64, 1024, 4096):
        yield Shape(tokens, *QWEN3_30B), True
    for tokens in (1, 64, 4096):
        yield Shape(tokens, *MIXTRAL), True
    yield Shape(16, 32, 2880, 2880, 4, "swigluoai", True), True
    yield Shape(0, 4, 32, 16, 2), False
    yield Shape(1, 1, 1, 1, 1), False
    yield Shape(1, 8, 48, 24, 2), False
    yield Shape(5, 6, 33, 17, 6), False
    yield Shape(9, 5, 72, 40, 2, "gelu_tanh", True, "ids without an expert"), False
    yield Shape(3, 7, 40, 24, 3, "swigluoai", True), False
    yield Shape(3, 4, 32, 24, 2, "swigluoai_uninterleave", True), False
    yield Shape(4, 3, 24, 16, 1, "relu2_no_mul"), False
    yield Shape(4, 3, 24, 16, 2, "gelu_no_mul", True), False
    yield Shape(70, 12, 40, 24, 2, "gelu", False, "few experts"), False
    yield Shape(2, 4, 32, 16, 2, "relu2", False, "ids without an expert"), False
    yield Shape(65, 16, 128, 64, 4), False


def random_weights(layer: nn.Module, inputs: Inputs) -> None:
    """Weights of the size that keeps products near one, biases of a visible size."""
    for name, parameter in list(layer.named_parameters(recurse=False)):
        scale = 0.5 if parameter.dim() < 3 else parameter.shape[-1] ** -0.5
        setattr(layer, name, frozen(inputs.randn(*parameter.shape, scale=scale)))


def experts_cost(case: Case, dtype: torch.dtype) -> Cost:
    """Each expert that a random choice reaches read once, each token read and written once."""
    t, e, h, i, k, halves = (case.dims[n] for n in ("T", "E", "H", "I", "k", "halves"))
    reached = e * (1.0 - (1.0 - k / e) ** t)
    size = round(reached * (halves + 1) * h * i) + 2 * t * h
    return Cost(size_bytes=size * dtype.itemsize, flops=2 * (halves + 1) * t * k * h * i)

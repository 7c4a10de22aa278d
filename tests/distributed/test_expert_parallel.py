"""MoE layers over ranks against one process: inner features split, whole experts spread, tokens that travel."""

from __future__ import annotations

from typing import Any

import pytest
import several_ranks
import torch
from torch import Tensor

from opmux.distributed import TensorParallelError, init_tensor_parallel, tensor_parallel

EXPERTS, HIDDEN, INNER, TOP_K = 7, 16, 24, 3  # experts divide by no number of ranks
TOKENS = [5, 0, 9, 2]  # of each rank


def randn(*shape: int) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), device="cpu")
    return values.to(torch.get_default_device())


def layer(**settings: Any) -> Any:
    from opmux.ops import FusedMoE

    built = FusedMoE(EXPERTS, TOP_K, HIDDEN, INNER, activation="swigluoai", has_bias=True, **settings)
    built.load_fused(
        randn(EXPERTS, 2 * INNER, HIDDEN), randn(EXPERTS, HIDDEN, INNER), randn(EXPERTS, 2 * INNER), randn(EXPERTS, HIDDEN)
    )
    return built


def tokens_of(rank: int) -> tuple[Tensor, Tensor]:
    x, logits = randn(sum(TOKENS), HIDDEN), randn(sum(TOKENS), EXPERTS) * 3
    logits[3:6, :5] = -9.0  # these tokens choose among experts of the last ranks
    start = sum(TOKENS[:rank])
    return x[start : start + TOKENS[rank]], logits[start : start + TOKENS[rank]]


def same_tokens(mode: str | None) -> Tensor:
    return layer(expert_parallel=mode)(randn(6, HIDDEN), randn(6, EXPERTS))


def own_tokens(dtype: torch.dtype) -> Tensor:
    """Every rank's rows, one behind the other."""
    built = layer(expert_parallel="own_tokens").to(dtype)
    tp = built.tp
    x, logits = tokens_of(tp.rank)
    mine = built(x.to(dtype), logits)
    assert (mine.shape, mine.dtype) == (x.shape, dtype)
    return torch.cat(tp.gather_objects(mine)).float()


def nobody_has_tokens() -> tuple[int, ...]:
    built = layer(expert_parallel="own_tokens")
    return tuple(built(randn(0, HIDDEN), randn(0, EXPERTS)).shape)


def ids_of_nobody() -> Tensor:
    """Ids that are no expert's stay at home, whatever their weight."""

    def route(x: Tensor, logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        ids = torch.tensor([[-1, 6, EXPERTS], [0, -1, 100]])
        return torch.where((ids >= 0) & (ids < EXPERTS), 0.5, float("nan")), ids

    return layer(expert_parallel="own_tokens", custom_routing_function=route)(randn(2, HIDDEN), randn(2, EXPERTS))


def shared_once() -> Tensor:
    """Shared experts are complete on every rank, and are added behind the sum."""
    shared = torch.nn.Linear(HIDDEN, HIDDEN)
    shared.weight.data, shared.bias.data = randn(HIDDEN, HIDDEN), randn(HIDDEN)
    return layer(shared_experts=shared, routed_scaling_factor=2.0, apply_routed_scale_to_output=True)(
        randn(6, HIDDEN), randn(6, EXPERTS)
    )


def experts_here() -> list[int]:
    return tensor_parallel().gather_objects(layer(expert_parallel="same_tokens").placement.local_experts)


def on_each_rank(size: int, device: torch.device) -> dict[str, Any]:
    from opmux.ops import FusedMoE

    with torch.device(device), init_tensor_parallel(), torch.inference_mode():
        found = outputs()
        found["experts here"] = experts_here()
        found["nobody"] = nobody_has_tokens()
        with pytest.raises(TensorParallelError, match=f"intermediate_size is {size * 5 + 1}.* by {size} "):
            FusedMoE(EXPERTS, TOP_K, HIDDEN, size * 5 + 1)
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in found.items()}


def outputs() -> dict[str, Any]:
    return {
        "features split": same_tokens(None),
        "experts spread": same_tokens("same_tokens"),
        "ids of nobody": ids_of_nobody(),
        "shared once": shared_once(),
        "tokens travel": own_tokens(torch.float32),
        "tokens travel in bf16": own_tokens(torch.bfloat16),
    }


@several_ranks.STARTS
def test_ranks_give_what_one_process_gives(size: int, device: str) -> None:
    found = several_ranks.together(size, device)["test_expert_parallel"]
    with torch.inference_mode():
        alone = layer()
        for name, wanted in outputs().items():
            if name.startswith("tokens travel"):
                every = [tokens_of(rank) for rank in range(size)]
                x, logits = (torch.cat(parts) for parts in zip(*every, strict=True))
                wanted = alone(x, logits)
            tolerance = 2e-2 if "bf16" in name else 1e-5
            scale = wanted.abs().max()
            assert found[name].shape == wanted.shape
            assert ((found[name] - wanted).abs().max() / scale) <= tolerance, name
    assert found["nobody"] == (0, HIDDEN)
    assert sum(found["experts here"]) == EXPERTS
    assert max(found["experts here"]) - min(found["experts here"]) <= 1


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="there are None, 'same_tokens', 'own_tokens'"):
        layer(expert_parallel="tokens")

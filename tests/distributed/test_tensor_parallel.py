"""Sharded ops against one process, over gloo, for 1 to 4 ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import several_ranks
import torch
from torch import Tensor

from opmux import distributed
from opmux.distributed import TensorParallelError, init_tensor_parallel, tensor_parallel

IN, OUT, HEADS, SIZE = 24, 48, 12, 8


def randn(*shape: int) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), device="cpu")
    return values.to(torch.get_default_device())  # the same on every device


def column(gather: bool) -> Tensor:
    from opmux.ops import ColumnParallelLinear

    op = ColumnParallelLinear(IN, OUT, gather_output=gather, return_bias=False)
    op.load_weight(randn(OUT, IN), randn(OUT))
    y = op(randn(5, IN))
    return y if gather else op.tp.all_gather(y)


def row(split: bool) -> Tensor:
    from opmux.ops import RowParallelLinear

    op = RowParallelLinear(IN, OUT, input_is_parallel=split, return_bias=False)
    op.load_weight(randn(OUT, IN), randn(OUT))
    x = randn(5, IN)
    return op(x.chunk(op.tp.size, -1)[op.tp.rank] if split else x)


def merged() -> Tensor:
    from opmux.ops import MergedColumnParallelLinear

    op = MergedColumnParallelLinear(IN, [OUT, 2 * OUT], return_bias=False)
    weights, biases = [randn(OUT, IN), randn(2 * OUT, IN)], [randn(OUT), randn(2 * OUT)]
    op.load_shard(torch.cat(weights), None, torch.cat(biases))
    whole = op.weight.clone()
    op.weight.zero_()
    op.load_shard(weights[1], 1, biases[1])  # by itself, into its own place
    op.load_shard(weights[0], 0, biases[0])
    assert torch.equal(op.weight, whole)
    first, second = op(randn(5, IN)).split(op.local_sizes, -1)
    return torch.cat((op.tp.all_gather(first), op.tp.all_gather(second)), -1)


def qkv(kv_heads: int) -> Tensor:
    from opmux.ops import QKVParallelLinear

    op = QKVParallelLinear(IN, SIZE, HEADS, kv_heads, bias=False, return_bias=False)
    q, k, v = randn(HEADS * SIZE, IN), randn(kv_heads * SIZE, IN), randn(kv_heads * SIZE, IN) * 2
    op.load_shard(torch.cat((q, k, v)))
    parts = op(randn(5, IN)).split(op.local_sizes, -1)
    gathered = [op.tp.all_gather(p).unflatten(-1, (-1, SIZE)) for p in parts]
    copies = op.num_kv_head_replicas  # every rank of a group holds the same key head
    return torch.cat([gathered[0], gathered[1][:, ::copies], gathered[2][:, ::copies]], 1).flatten(1)


def embedding(added: int) -> Tensor:
    from opmux.ops import VocabParallelEmbedding

    op = VocabParallelEmbedding(50 + added, IN, None, 50, padding_size=16)
    op.load_weight(randn(50 + added, IN))
    return op(torch.tensor([[0, 7, 15, 16, 31, 32, 49], [-1, 50 + added, 10**6, 50 + added - 1, 48, 33, 50]]))


def logits(added: int) -> Tensor:
    from opmux.ops import LogitsProcessor, ParallelLMHead

    head = ParallelLMHead(50 + added, IN, org_num_embeddings=50, padding_size=16)
    head.load_weight(randn(50 + added, IN))
    head.weight[~_held(head)] = float("nan")  # padding must never leak
    return LogitsProcessor(50 + added, soft_cap=3.0, scale=0.5)(head, randn(5, IN))


def _held(head: Any) -> Tensor:
    rows, valid = head.vocabulary.rows(torch.arange(head.vocabulary.size))
    held = torch.zeros(head.weight.shape[0], dtype=torch.bool)
    held[rows[valid]] = True
    return held


def gated_norm(groups: int, before: bool) -> Tensor:
    from opmux.ops import RMSNormGated

    op = RMSNormGated(OUT, group_size=OUT // groups, norm_before_gate=before)
    op.load_weight(randn(OUT))
    rank, size = op.tp.rank, op.tp.size
    # Rows of different sizes: a mean over the wrong features shows.
    x = randn(5, OUT) * torch.logspace(-2, 2, OUT)
    mine = op(x.chunk(size, -1)[rank], randn(5, OUT).sin().chunk(size, -1)[rank])
    empty = op(x[:0].chunk(size, -1)[rank], x[:0].chunk(size, -1)[rank])
    assert empty.shape == (0, OUT // size)
    return op.tp.all_gather(mine)


def mixer_norm(groups: int) -> Tensor:
    from opmux.ops import Mixer2RMSNormGated

    op = Mixer2RMSNormGated(OUT, groups)
    op.load_weight(randn(OUT))
    rank, size = op.tp.rank, op.tp.size
    x = randn(5, OUT) * torch.logspace(-2, 2, OUT)
    return op.tp.all_gather(op(x.chunk(size, -1)[rank], randn(5, OUT).sin().chunk(size, -1)[rank]))


def fits(groups: int) -> bool:
    size = tensor_parallel().size
    return groups % size == 0 or size % groups == 0


def mixer(kind: str) -> Tensor:
    """A mixer on a prompt and then a step; every rank has the whole answer."""
    from types import SimpleNamespace

    from opmux.distributed import ALONE
    from opmux.ops import MambaMixer, MambaMixer2, ShortConv

    def build() -> Any:
        if kind == "one":
            return MambaMixer(IN, 4, 4, OUT, 3, True, True, True)
        if kind == "short":
            return ShortConv(SimpleNamespace(conv_L_cache=3, conv_bias=True), OUT)
        return MambaMixer2(IN, 5, 4, OUT, True, True, int(kind), HEADS, 4)

    with init_tensor_parallel(ALONE):
        shapes = {name: place.shape for name, (place, _) in build()._places()}
    op = build()
    op.load_weights({name: 0.3 * randn(*shape) for name, shape in shapes.items()})
    x = randn(2, 7, OUT if kind == "short" else IN)
    states = {name: t for name, t in op.new_state(2)._asdict().items() if t is not None}
    old = torch.tensor([True, True])
    return torch.cat([op(x[:, :6], **states), op(x[:, 6:], **states, has_initial_state=old)], 1)


CHECKS: dict[str, Callable[[], Tensor]] = {
    "column": lambda: column(False),
    "column gathered": lambda: column(True),
    "row split": lambda: row(True),
    "row whole": lambda: row(False),
    "merged": merged,
    "qkv 12": lambda: qkv(12),
    "qkv 4": lambda: qkv(4) if tensor_parallel().size != 3 else torch.zeros(0),
    "qkv 1": lambda: qkv(1),
    "embedding": lambda: embedding(0),
    "embedding with added tokens": lambda: embedding(5),
    **{
        f"gated norm, {groups} groups{', norm first' * before}": (
            lambda groups=groups, before=before: gated_norm(groups, before) if fits(groups) else torch.zeros(0)
        )
        for groups in (1, 2, 3, 4, 12, 24)
        for before in (False, True)
    },
    **{f"mixer's norm, {groups} groups": lambda groups=groups: mixer_norm(groups) for groups in (1, 2, 3, 4, 12)},
    **{
        f"mixer {kind}": lambda kind=kind: (
            mixer(kind) if kind in ("one", "short", "1") or int(kind) % tensor_parallel().size == 0 else torch.zeros(0)
        )
        for kind in ("one", "short", "1", "2", "4", "12")
    },
    "logits": lambda: logits(0),
    "logits with added tokens": lambda: logits(5),
}


def refusals(size: int) -> dict[str, str]:
    """What each wrong size or call says."""
    from opmux.ops import ColumnParallelLinear, RMSNormGated, RowParallelLinear

    groups = {2: 3, 3: 2, 4: 3}[size]
    calls: dict[str, Callable[[], object]] = {
        "linear": lambda: ColumnParallelLinear(IN, size * 7 + 1),
        "norm": lambda: RMSNormGated(size * 7 + 1),
        "groups": lambda: RMSNormGated(size * groups * 5, group_size=size * 5),
        "width": lambda: RMSNormGated(OUT)(randn(1, OUT)),
        "gradient": lambda: RowParallelLinear(IN, OUT).requires_grad_()(randn(1, IN // size)),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def on_each_rank(size: int, device: torch.device) -> Any:
    """The answers of all ranks together, and the refusals."""
    with torch.device(device), init_tensor_parallel():
        return {name: check().cpu().numpy() for name, check in CHECKS.items()}, refusals(size)


@several_ranks.STARTS
def test_ranks_together_give_one_process_s_answer(size: int, device: str) -> None:
    results, said = several_ranks.together(size, device)[__name__]
    for name, check in CHECKS.items():
        got = torch.from_numpy(results[name])
        if got.numel():
            torch.testing.assert_close(got, check(), rtol=1e-5, atol=1e-5)
    for name in ("linear", "norm"):
        assert said[name].startswith("TensorParallelError")
        assert f" {size} " in said[name]
        assert str(size * 7 + 1) in said[name]
    groups = {2: 3, 3: 2, 4: 3}[size]
    assert f"{groups} groups of {size * 5} features do not divide over {size} " in said["groups"]
    assert f"{OUT // size} on each of {size} ranks" in said["width"]
    assert "inference_mode" in said["gradient"]


def test_without_a_process_group_the_error_says_what_to_do() -> None:
    with pytest.raises(TensorParallelError, match="torchrun"):
        init_tensor_parallel()
    assert tensor_parallel() is distributed.ALONE


def test_a_bias_that_nobody_would_add_once_is_refused() -> None:
    from opmux.ops import RowParallelLinear

    with pytest.raises(ValueError, match="skip_bias_add"):
        RowParallelLinear(IN, OUT, reduce_results=False)


@pytest.mark.parametrize("shard_id", [2, -1, (0, 5), "q"])
def test_a_shard_that_is_not_there_is_refused(shard_id: Any) -> None:
    from opmux.ops import MergedColumnParallelLinear

    with pytest.raises(ValueError, match="shard_id"):
        MergedColumnParallelLinear(IN, [OUT, OUT]).load_shard(randn(OUT, IN), shard_id)

"""Whole models over 2 to 4 ranks against one process, in fp32: logits, generated tokens, what apply finds in them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch import nn

import opmux
from opmux.apply import shard
from opmux.core.errors import UsageError
from opmux.distributed import TensorParallelError, init_tensor_parallel
from opmux.ops import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

# (heads, key heads, inner features) that divide by the number of ranks; 4 ranks share 1 or 2 key heads.
FITTING = {2: [(4, 2, 56), (4, 1, 56)], 3: [(6, 3, 60), (3, 1, 60)], 4: [(4, 2, 56), (4, 1, 56)]}
# Biases; norms of heads; a scaled embedding; q, k and v in one layer; a norm over all heads; experts; an MLP without gate.
FAMILIES = {2: ("Qwen3", "Gemma2", "Phi3", "Olmo2", "Mixtral", "Phi"), 3: ("Qwen2",), 4: ("Phi3",)}
PROMPT = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 36]])


def model_of(kind: str, heads: int = 4, kv_heads: int = 2, inner: int = 56, tied: bool = False) -> Any:
    """A tiny model; its vocabulary of 37 needs padding."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=37, hidden_size=8 * heads, intermediate_size=inner, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=8, tie_word_embeddings=tied, pad_token_id=0, bos_token_id=1,
        eos_token_id=None,
    )  # fmt: skip
    config.num_local_experts = 4
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # norms and biases, too, which would hide a lot as ones and zeros
        nn.init.normal_(parameter, std=0.3)
    return model


def answers(model: Any) -> dict[str, Any]:
    """Logits of a prompt and of a padded one, and greedy tokens."""
    padding = torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])
    with torch.inference_mode():
        return {
            "logits": model(PROMPT).logits.numpy(),
            "padded": model(PROMPT, attention_mask=padding).logits[1, 2:].numpy(),
            "tokens": model.generate(PROMPT, max_new_tokens=8, do_sample=False).numpy(),
        }


def report_of(report: Any) -> list[tuple[str, str, str]]:
    return [(e["path"], e["class"], e["reason"]) for e in report.entries if e["status"] == "applied"]


def on_one_rank(kind: str, sizes: tuple[int, int, int], tied: bool) -> dict[str, Any]:
    model = model_of(kind, *sizes, tied=tied)
    count = sum(p.numel() for p in model.parameters())
    with init_tensor_parallel():
        done = shard(model)
    held = sum(p.numel() for p in model.parameters())
    before = answers(model)
    report = opmux.apply(model)
    after = answers(model)
    copied = answers(copy.deepcopy(model))
    assert report.counters()["row_parallel_linear"]["calls"]
    opmux.unapply(model)
    undone = answers(model)
    return {
        "sharded": before, "applied": after, "copied": copied, "undone": undone, "split": done.split,
        "whole": done.whole, "report": report_of(report), "share": held / count,
    }  # fmt: skip


def cases(size: int) -> list[tuple[str, tuple[int, int, int], bool]]:
    """What ``size`` ranks are tested on: kind, sizes, whether the head is tied to the embedding."""
    chosen = [("Llama", sizes, bool(tied)) for tied, sizes in enumerate(FITTING[size])]
    return chosen + [(kind, FITTING[size][0], False) for kind in FAMILIES.get(size, ())]


def said(call: Any) -> str:
    try:
        call()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def worker(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    results: list[Any] = [on_one_rank(*case) for case in cases(size)]
    errors = {}
    if size == 2:
        with init_tensor_parallel():
            odd = model_of("Llama", 9, 3, 72)
            names = list(odd.state_dict())
            errors["heads"] = said(lambda: shard(odd))
            errors["untouched"] = str(names == list(odd.state_dict()) and type(odd.lm_head) is nn.Linear)
            errors["inner"] = said(lambda: shard(model_of("Llama", 4, 2, 57)))
            errors["nothing"] = said(lambda: shard(nn.Sequential(nn.ReLU())))
            model = model_of("Llama")
            shard(model)
            errors["twice"] = said(lambda: shard(model))
            model = model_of("Llama")
            opmux.apply(model)  # ops on whole weights, though ranks are in force
            errors["whole"] = str(np.allclose(answers(model)["logits"], answers(model_of("Llama"))["logits"], atol=1e-4))
            errors["late"] = said(lambda: shard(model))
            errors["ranks differ"] = said(lambda: shard(model_of("Llama") if rank else model_of("Olmo2")))
    if rank == 0:
        (folder / "results").write_bytes(pickle.dumps((results, errors)))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_together_answer_as_one_process(size: int, tmp_path: Path) -> None:
    mp.spawn(worker, args=(size, tmp_path), nprocs=size)  # raises what a rank raised
    results, errors = pickle.loads((tmp_path / "results").read_bytes())
    for (kind, sizes, tied), got in zip(cases(size), results, strict=True):
        wanted = answers(model_of(kind, *sizes, tied=tied))
        what = f"{kind} {sizes}, tied {tied}, {size} ranks"
        for step in ("sharded", "applied", "copied", "undone"):
            for name in ("logits", "padded"):
                np.testing.assert_allclose(got[step][name], wanted[name], rtol=1e-3, atol=2e-3, err_msg=f"{what} {step}")
            np.testing.assert_array_equal(got[step]["tokens"], wanted["tokens"], err_msg=f"{what} {step}")
        check_what_was_split(kind, size, got)
    if size == 2:
        check_errors(errors)


def check_what_was_split(kind: str, size: int, got: dict[str, Any]) -> None:
    # Olmo2 normalises all heads at once; Gemma scales inside its embedding.
    attentions = {"model.layers.0.self_attn", "model.layers.1.self_attn"}
    experts = {f"model.layers.{i}.mlp.{part}" for i in range(2) for part in ("experts", "gate")}
    whole = {"Olmo2": attentions, "Gemma2": {"model.embed_tokens"}, "Mixtral": experts}.get(kind, set())
    assert set(got["whole"]) == whole, kind
    assert {"model.embed_tokens", "lm_head"} - whole <= set(got["split"]), kind
    classes = {path: (cls, reason) for path, cls, reason in got["report"]}
    if kind in ("Llama", "Qwen2", "Qwen3", "Granite"):
        qkv, reason = classes["model.layers.1.self_attn.{q_proj,k_proj,v_proj}"]
        assert qkv == "QKVParallelLinear"
        assert f"rank 0 of {size}: " in reason
        assert classes["model.layers.1.mlp.down_proj"][0] == "RowParallelLinear"
        # Key heads may be held by several ranks, and the vocabulary is padded; norms are whole.
        assert got["share"] < 0.8, kind


def check_errors(errors: dict[str, str]) -> None:
    assert errors["heads"].startswith("TensorParallelError")
    assert "9 heads and 3 key heads, which do not divide by 2 tensor-parallel ranks" in errors["heads"]
    assert "This model can be split over 1, 3 or 9 ranks" in errors["heads"]
    assert errors["untouched"] == "True"
    assert "57 inner features" in errors["inner"]
    assert "This model can be split over 1 rank" in errors["inner"]
    assert "Nothing in this Sequential can be split over 2 ranks" in errors["nothing"]
    assert "sharded already" in errors["twice"]
    assert errors["whole"] == "True"
    assert "opmux.apply was here already" in errors["late"]
    assert "would split other modules than rank 0" in errors["ranks differ"]


def test_one_rank_changes_nothing(tmp_path: Path) -> None:
    model = model_of("Llama")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with init_tensor_parallel():
            done = shard(model)
    finally:
        dist.destroy_process_group()
    assert (done.split, done.whole) == ([], {})
    assert type(model.model.layers[0].mlp.down_proj) is nn.Linear


def test_a_part_may_be_held_by_several_ranks() -> None:
    weight = torch.randn(12, 5)
    part = ColumnParallelLinear(5, 12, bias=False, return_bias=False, tp_rank=1, tp_size=3)
    part.load_weight(weight)
    assert torch.equal(part.weight, weight[4:8])
    for wrong in ({"tp_rank": 1}, {"tp_rank": 3, "tp_size": 3}, {"tp_rank": 0, "tp_size": 2, "gather_output": True}):
        with pytest.raises(ValueError, match="tp_rank"):
            ColumnParallelLinear(5, 12, **wrong)


def test_sharded_layers_carry_torch_s_names() -> None:
    assert (RowParallelLinear(6, 4).in_features, RowParallelLinear(6, 4).out_features) == (6, 4)
    assert VocabParallelEmbedding(37, 4).num_embeddings == 37
    assert issubclass(TensorParallelError, ValueError)
    assert issubclass(UsageError, ValueError)

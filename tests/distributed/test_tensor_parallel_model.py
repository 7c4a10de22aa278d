"""Whole models over 2 to 4 ranks against one process, in fp32: logits, generated tokens, what apply finds in them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import several_ranks
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import opmux
from opmux import CustomOp
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


class Squeezed(nn.Module):
    """Two linear layers of an MLP's sizes, and between them what needs all features at once."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(32, 5), nn.Linear(5, 32)

    def forward(self, x: torch.Tensor) -> Any:
        return self.up(self.down(x).softmax(-1))


def answers(model: Any) -> dict[str, Any]:
    """Logits of a prompt and of a padded one, and greedy tokens."""
    padding = torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])
    prompt, padding = PROMPT.to(model.device), padding.to(model.device)
    with torch.inference_mode():
        found = {
            "logits": model(prompt).logits,
            "padded": model(prompt, attention_mask=padding).logits[1, 2:],
            "tokens": model.generate(prompt, max_new_tokens=8, do_sample=False),
        }
    return {name: value.cpu().numpy() for name, value in found.items()}


def report_of(report: Any) -> list[tuple[str, str, str]]:
    return [(e["path"], e["class"], e["reason"]) for e in report.entries if e["status"] == "applied"]


def on_one_rank(device: torch.device, kind: str, sizes: tuple[int, int, int], tied: bool) -> dict[str, Any]:
    model = model_of(kind, *sizes, tied=tied)
    count = sum(p.numel() for p in model.parameters())
    with init_tensor_parallel():
        done = shard(model)
    for module in model.modules():  # copies of the part, not views that keep the whole alive
        for p in module._parameters.values() if isinstance(module, CustomOp) else ():
            assert p is None or p.untyped_storage().nbytes() == p.numel() * p.element_size()
    model.to(device)
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


def on_each_rank(size: int, device: torch.device) -> Any:
    """What each model of this many ranks answers and reports, and what is refused."""
    results = [on_one_rank(device, *case) for case in cases(size)]
    return results, refusals(device) if size == 2 else {}, pairs(device) if size == 4 else None


def refusals(device: torch.device) -> dict[str, str]:
    """What each wrong call says, on 2 ranks."""
    errors = {}
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
        model = model_of("Llama").to(device)
        opmux.apply(model)  # ops on whole weights, though ranks are in force
        errors["whole"] = str(np.allclose(answers(model)["logits"], answers(model_of("Llama"))["logits"], atol=1e-3))
        beside = model_of("Llama")
        beside.beside = Squeezed()  # its 5 features do not divide, but it is no MLP either
        errors["no MLP"] = str(shard(beside).whole)
        errors["late"] = said(lambda: shard(model))
        other = model_of("Llama" if dist.get_rank() else "Olmo2")
        errors["ranks differ"] = said(lambda: shard(other))
    return errors


def pairs(device: torch.device) -> dict[str, Any]:
    """4 ranks as 2 copies of a model, each over 2 ranks: one dimension of a mesh."""
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("copies", "tp"))
    model = model_of("Llama")
    with init_tensor_parallel(mesh["tp"]):
        shard(model)
    opmux.apply(model.to(device))
    return answers(model)


@several_ranks.STARTS
def test_ranks_together_answer_as_one_process(size: int, device: str) -> None:
    results, errors, of_pairs = several_ranks.together(size, device)[__name__]
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
    if of_pairs is not None:
        wanted = answers(model_of("Llama"))
        np.testing.assert_allclose(of_pairs["logits"], wanted["logits"], rtol=1e-3, atol=2e-3)
        np.testing.assert_array_equal(of_pairs["tokens"], wanted["tokens"])


def check_what_was_split(kind: str, size: int, got: dict[str, Any]) -> None:
    # Olmo2 normalises all heads at once.
    attentions = {"model.layers.0.self_attn", "model.layers.1.self_attn"}
    experts = {f"model.layers.{i}.mlp.{part}" for i in range(2) for part in ("experts", "gate")}
    whole = {"Olmo2": attentions, "Mixtral": experts}.get(kind, set())
    assert set(got["whole"]) == whole, kind
    assert {"model.embed_tokens", "lm_head"} <= set(got["split"]), kind
    assert ("model.embed_tokens", "VocabParallelEmbedding") in {(path, cls) for path, cls, _ in got["report"]}, kind
    classes = {path: (cls, reason) for path, cls, reason in got["report"]}
    if kind in ("Llama", "Qwen2", "Qwen3", "Granite"):
        qkv, reason = classes["model.layers.1.self_attn.{q_proj,k_proj,v_proj}"]
        assert qkv == "QKVParallelLinear"
        assert f"rank 0 of {size}: " in reason
        assert classes["model.layers.1.mlp.down_proj"][0] == "RowParallelLinear"
        gate_and_up = next(reason for path, (_, reason) in classes.items() if "layers.1.mlp.{gate_proj,up_proj}" in path)
        assert f"rank 0 of {size}: " in gate_and_up
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
    assert "'beside': 'the parts that the ranks would hold do not add up to it" in errors["no MLP"]
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

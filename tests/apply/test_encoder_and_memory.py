"""Vision towers, and what apply costs in memory."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import ids, tiny
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import opmux
from opmux.apply import linears


@pytest.fixture
def llava():
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8,
        projection_dim=32,
    )  # fmt: skip
    text = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=5)
    ).eval()


def run(model):
    tokens = torch.cat((torch.full((1, 4), 5), ids(1, 6, seed=3).clamp(min=6)), 1)
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(input_ids=tokens, pixel_values=pixels).logits


@pytest.mark.parametrize("mm_encoder", [None, ["all", "-attention"], ["none", "+attention"]])
def test_the_vision_tower_has_directives_of_its_own(llava, mm_encoder):
    stock = copy.deepcopy(llava)
    report = opmux.apply(llava, opmux.CompilationConfig(["none"], mm_encoder=mm_encoder))
    a, b = run(stock), run(llava)
    assert float((a - b).abs().max() / a.abs().max()) <= 1e-5
    tower = [e for e in report.entries if "vision_tower" in e["path"]]
    text = [e for e in report.entries if "language_model" in e["path"] and e["status"] == "applied"]
    assert text
    assert all(e["method"] == "forward_native" for e in text)
    attention = [e for e in tower if e["op"] == "attention"]
    assert attention
    for e in attention:
        if e["status"] == "applied":
            enforced = mm_encoder is None
            assert ("enforce_enable" in e["reason"]) == enforced
            assert ("disabled" in e["reason"]) == (mm_encoder == ["all", "-attention"])


def test_no_second_copy_of_the_weights(monkeypatch):
    model = tiny("llama", num_hidden_layers=6)
    total = sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values())
    opmux.apply(model)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) == total
    ops = [op for _, op in opmux.apply(model)._ops]
    assert {p.untyped_storage().data_ptr() for op in ops for p in op.parameters()} <= set(storages)


def test_weights_are_merged_one_group_at_a_time(monkeypatch):
    model = tiny("llama", num_hidden_layers=6)
    groups = []
    merge = linears._buffer_of
    monkeypatch.setattr(linears, "_buffer_of", lambda ps: groups.append(sum(p.nbytes for p in ps)) or merge(ps))
    opmux.apply(model)
    assert max(groups) <= 0.1 * sum(p.nbytes for p in model.parameters())

"""An applied model under torch.compile: one graph, no recompilation for new lengths, right numbers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo
from tiny_models import ids, tiny
from transformers import StaticCache

import opmux

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def close(a, b, tolerance=1e-5):
    return float((a - b).abs().max() / b.abs().max()) <= tolerance


@pytest.mark.parametrize("directives", [["all"], ["none"]])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_one_graph_and_no_recompilation_for_new_lengths(kind, directives):
    stock = tiny(kind)
    model = copy.deepcopy(stock)
    opmux.apply(model, opmux.CompilationConfig(directives))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    with torch.no_grad():
        compiled(ids(2, 5), use_cache=False)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for length in (6, 9, 17, 33):
                tokens = ids(2, length)
                assert close(compiled(tokens, use_cache=False).logits, stock(tokens, use_cache=False).logits)


def test_no_graph_break():
    model = tiny("llama")
    opmux.apply(model)
    with torch.no_grad():
        explained = torch._dynamo.explain(model)(ids(), use_cache=False)
    assert explained.graph_break_count == 0
    assert explained.graph_count == 1


def test_decoding_with_a_static_cache_does_not_recompile():
    stock = tiny("llama")
    model = copy.deepcopy(stock)
    opmux.apply(model)
    tokens = ids(1, 12)
    with torch.no_grad():
        caches = [StaticCache(config=m.config, max_cache_len=32) for m in (stock, model)]
        a, b = (m(tokens[:, :6], cache=c).logits for m, c in zip((stock, model), caches, strict=True))
        assert close(b, a)
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
        for i in range(6, 12):
            step = tokens[:, i : i + 1]
            with torch._dynamo.config.patch(error_on_recompile=i > 6):
                assert close(compiled(step, cache=caches[1]).logits, stock(step, cache=caches[0]).logits)


def test_inductor_and_opaque_ops():
    stock = tiny("llama", num_hidden_layers=1)
    model = copy.deepcopy(stock)
    report = opmux.apply(model, opmux.CompilationConfig(["none", "+rms_norm"], backend="inductor", mode=1))
    assert "inductor" in report.compile
    with torch.no_grad():
        assert close(model(ids(), use_cache=False).logits, stock(ids(), use_cache=False).logits)
    opmux.unapply(model)
    assert model._compiled_call_impl is None


def test_the_config_compiles_and_the_report_says_how():
    model = tiny("llama", num_hidden_layers=1)
    report = opmux.apply(model, opmux.CompilationConfig(backend="inductor", mode=3))
    assert "stock way" in report.compile
    assert {e["method"] for e in report.entries if e["status"] == "applied"} == {"forward_native"}
    assert model._compiled_call_impl is not None


def test_hooks_set_before_compiling_fire():
    model = tiny("llama")
    opmux.apply(model)
    seen = []
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda m, args, out: seen.append(1))
    with torch.no_grad():
        torch.compile(model, backend="eager", dynamic=True)(ids(), use_cache=False)
    assert seen == [1]


def test_gradients_under_compile():
    stock = tiny("llama")
    model = copy.deepcopy(stock)
    opmux.apply(model)
    torch.compile(model, backend="eager", dynamic=True)(ids(), labels=ids(), use_cache=False).loss.backward()
    stock(ids(), labels=ids(), use_cache=False).loss.backward()
    assert close(model.lm_head.weight.grad, stock.lm_head.weight.grad)

"""What apply promises beyond numbers: the model stays the user's, and the report tells the truth."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
from tiny_models import ids, tiny
from torch import nn
from transformers import DynamicCache, LlamaForCausalLM

import opmux
from opmux.apply import NotAppliedError, NothingAppliedWarning, apply, unapply
from opmux.apply.cache import GrowingLayer


def logits(model, tokens=None):
    with torch.no_grad():
        return model(ids() if tokens is None else tokens).logits


def close(a, b, tolerance=1e-5):
    return float((a - b).abs().max() / b.abs().max()) <= tolerance


@pytest.fixture
def stock():
    return tiny("llama")


@pytest.fixture
def model(stock):
    return copy.deepcopy(stock)


def bindings(model):
    return [m for m in model.modules() if "forward" in m.__dict__]


def test_package_and_function_share_the_name():
    code = (
        "import opmux, torch\n"
        "import opmux.apply.report\n"
        "from opmux.apply import apply, unapply\n"
        "assert callable(opmux.apply) and opmux.apply.report.Report and opmux.unapply is unapply\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_state_dict_names_and_modules_stay(stock, model):
    apply(model)
    assert list(model.state_dict()) == list(stock.state_dict())
    for a, b in zip(model.state_dict().values(), stock.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert [n for n, _ in model.named_modules()] == [n for n, _ in stock.named_modules()]
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in stock.named_parameters()]
    assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]


def test_a_second_model_of_the_class_is_untouched(stock, model):
    before = logits(stock)
    apply(model)
    assert not bindings(stock)
    assert torch.equal(logits(stock), before)
    assert stock.config._attn_implementation == "sdpa"


def test_models_that_share_a_config():
    config = tiny("gpt_neox").config
    a, b = type(tiny("gpt_neox"))(config).eval(), type(tiny("gpt_neox"))(config).eval()
    before = logits(b)
    apply(a)
    assert b.config._attn_implementation == "sdpa"
    assert torch.equal(logits(b), before)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "phi3"])
def test_unapply_restores_forwards_and_bits(kind):
    model = tiny(kind)
    before, config = logits(model), model.config
    apply(model)
    unapply(model)
    assert not bindings(model)
    assert not any("opmux" in name for m in model.modules() for name in m.__dict__)
    assert all(getattr(m, "config", config)._attn_implementation == "sdpa" for m in model.modules())
    assert torch.equal(logits(model), before)
    opmux.unapply(model)  # nothing to undo: nothing happens


def test_apply_twice_is_a_no_op_and_a_new_config_changes_it(model):
    report = apply(model)
    bound = [m.__dict__["forward"] for m in bindings(model)]
    assert apply(model) is report
    assert [m.__dict__["forward"] for m in bindings(model)] == bound
    other = apply(model, opmux.CompilationConfig(["all", "-rms_norm"]))
    assert other is not report
    assert {e["method"] for e in other.entries if e["op"] == "rms_norm"} == {"forward_native"}


def test_merged_weights_are_one_buffer_and_follow_updates(stock, model):
    apply(model)
    mlp, attention = model.model.layers[0].mlp, model.model.layers[0].self_attn
    for parts in ((mlp.gate_proj, mlp.up_proj), (attention.q_proj, attention.k_proj, attention.v_proj)):
        assert len({p.weight.untyped_storage().data_ptr() for p in parts}) == 1
        assert parts[0].weight.untyped_storage().nbytes() == sum(p.weight.nbytes for p in parts)
    for m in (stock, model):
        with torch.no_grad():
            m.model.layers[0].mlp.up_proj.weight.mul_(1.5)
            m.model.layers[1].self_attn.k_proj.weight.data = m.model.layers[1].self_attn.k_proj.weight * 0.5
    assert close(logits(model), logits(stock))
    other = tiny("llama", seed=5)
    for assign in (False, True):
        model.load_state_dict({k: v * (1.0 + assign) for k, v in other.state_dict().items()}, assign=assign)
        stock.load_state_dict({k: v * (1.0 + assign) for k, v in other.state_dict().items()}, assign=assign)
        assert close(logits(model), logits(stock))


def test_cast_after_apply(stock, model):
    apply(model)
    logits(model)
    assert close(logits(model.double()), logits(stock.double()))  # transformers' norms compute in fp32 even then
    assert close(logits(model.to(torch.bfloat16)).float(), logits(stock.to(torch.bfloat16)).float(), 0.05)
    assert close(logits(model.float()), logits(stock.float()))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_save_pretrained(kind, tmp_path):
    stock = tiny(kind)
    model = copy.deepcopy(stock)
    apply(model)
    model.save_pretrained(tmp_path / "applied")
    unapply(model)
    model.save_pretrained(tmp_path / "undone")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    for name in ("applied", "undone"):
        again = type(stock).from_pretrained(tmp_path / name, dtype=torch.float32).eval()
        assert torch.equal(logits(again), logits(stock))
    assert torch.load(tmp_path / "state.pt").keys() == stock.state_dict().keys()


def test_copies_have_bindings_of_their_own(stock, model):
    apply(model)
    twin = copy.deepcopy(model)
    revived = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for other in (twin, revived):
        assert len(bindings(other)) == len(bindings(model))
        assert close(logits(other), logits(stock))
        unapply(other)
        assert not bindings(other)
    assert bindings(model)


HOOKED = [
    "model", "model.embed_tokens", "model.layers.1", "model.layers.2.input_layernorm", "model.layers.1.self_attn",
    "model.layers.0.self_attn.k_proj", "model.layers.1.mlp.up_proj", "model.layers.0.mlp.act_fn", "model.norm", "lm_head",
]  # fmt: skip


@pytest.mark.parametrize("path", HOOKED)
def test_hooks_fire_wherever_they_are(stock, model, path):
    apply(model)
    seen = []
    handle = model.get_submodule(path).register_forward_hook(lambda m, args, out: seen.append(out))
    assert close(logits(model), logits(stock))
    assert len(seen) == 1
    handle.remove()
    logits(model)
    assert len(seen) == 1
    pre = model.get_submodule(path).register_forward_pre_hook(lambda m, args: seen.append(args))
    logits(model)
    assert len(seen) == 2
    pre.remove()


def test_a_hook_that_changes_an_inner_output_is_obeyed(stock, model):
    apply(model)
    for m in (stock, model):
        m.model.layers[1].mlp.gate_proj.register_forward_hook(lambda m, args, out: out * 0.5)
    assert close(logits(model), logits(stock))


def test_gradients_and_training(stock, model):
    apply(model)
    for m in (stock, model):
        m.train()
        torch.manual_seed(0)
        m(ids(), labels=ids()).loss.backward()
    for (name, a), (_, b) in zip(model.named_parameters(), stock.named_parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    for m in (stock, model):
        m.eval()
        m.zero_grad()
        m(ids(), labels=ids()).loss.backward()
        with torch.no_grad():
            for p in m.parameters():
                p -= 0.1 * p.grad
    assert close(logits(model), logits(stock))


def test_gradient_checkpointing(stock, model):
    apply(model)
    for m in (stock, model):
        m.train()
        m.gradient_checkpointing_enable()
        m(ids(), labels=ids()).loss.backward()
    assert torch.equal(model.lm_head.weight.grad, stock.lm_head.weight.grad)


def test_tied_weights_stay_tied():
    model = tiny("llama", tie_word_embeddings=True)
    stock = copy.deepcopy(model)
    apply(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert close(logits(model), logits(stock))
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(2.0)
        stock.model.embed_tokens.weight.mul_(2.0)
    assert close(logits(model), logits(stock))


def test_a_weight_tied_in_an_odd_way_is_not_merged(stock, model):
    for m in (stock, model):
        m.model.layers[1].mlp.up_proj.weight = m.model.layers[0].mlp.up_proj.weight
    report = apply(model)
    skipped = {e["path"]: e["reason"] for e in report.entries if e["status"] == "skipped"}
    assert "tied" in skipped["model.layers.0.mlp"]
    assert "tied" in skipped["model.layers.1.mlp"]
    assert model.model.layers[1].mlp.up_proj.weight is model.model.layers[0].mlp.up_proj.weight
    assert close(logits(model), logits(stock))


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, 4, bias=False)
        self.lora_B = nn.Linear(4, base.out_features, bias=False)
        self.in_features, self.out_features = base.in_features, base.out_features

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def wrap(model):
    for layer in model.model.layers:
        torch.manual_seed(3)
        layer.self_attn.q_proj = LoraLinear(layer.self_attn.q_proj)


def test_lora_wrapped_before_apply_is_skipped_by_name(stock, model):
    wrap(stock), wrap(model)
    report = apply(model)
    skipped = {e["path"]: e["reason"] for e in report.entries if e["status"] == "skipped"}
    assert "LoRA" in skipped["model.layers.0.self_attn.q_proj"]
    assert "q_proj" in skipped["model.layers.0.self_attn"]
    assert close(logits(model), logits(stock))


def test_lora_wrapped_after_apply_is_obeyed(stock, model):
    apply(model)
    wrap(stock), wrap(model)
    assert close(logits(model), logits(stock))


def test_quantised_and_offloaded_linears_are_skipped_by_name(model):
    class Int8Linear(nn.Linear):
        pass

    model.model.layers[0].mlp.down_proj.__class__ = Int8Linear
    model.model.layers[1].mlp.down_proj.weight = nn.Parameter(torch.empty(64, 96, device="meta"))
    model.model.layers[2].mlp.down_proj._hf_hook = object()
    report = apply(model)
    skipped = {e["path"]: e["reason"] for e in report.entries if e["status"] == "skipped"}
    assert "Int8Linear" in skipped["model.layers.0.mlp.down_proj"]
    assert "meta" in skipped["model.layers.1.mlp.down_proj"]
    assert "accelerate" in skipped["model.layers.2.mlp.down_proj"]


def test_a_forward_that_somebody_replaced_is_left_alone(model):
    norm = model.model.norm
    norm.forward = mine = lambda x: x
    report = apply(model)
    assert norm.forward is mine
    assert any(e["path"] == "model.norm" and "replaced already" in e["reason"] for e in report.entries)


@pytest.mark.parametrize(
    "directives",
    [["none"], ["all", "-rms_norm"], ["all", "-silu_and_mul"], ["none", "+attention"], ["all", "-replicated_linear"]],
)
def test_directives_reach_every_op(stock, model, directives):
    config = opmux.CompilationConfig(directives)
    report = apply(model, config)
    for entry in report.entries:
        if entry["status"] == "applied" and not config.is_custom_op_enabled(entry["op"]):
            assert entry["method"] == "forward_native"
            assert "disabled" in entry["reason"]
    if "-silu_and_mul" in directives or "-replicated_linear" in directives:
        assert "linear_silu_and_mul" not in report.counts()
    assert close(logits(model), logits(stock))
    ran = {op: set(c["calls"]) for op, c in report.counters().items()}
    assert ran
    assert all(ran[op] == {"forward_native"} for op in ran if not config.is_custom_op_enabled(op))


def test_a_directive_for_an_op_that_the_model_lacks_is_reported(model):
    report = apply(model, opmux.CompilationConfig(["all", "-gemma_rms_norm"]))
    assert len(report.unused) == 1
    assert "-gemma_rms_norm" in report.unused[0]
    assert "gemma_rms_norm" in str(report)


def test_the_report(model):
    report = apply(model)
    assert "model.layers.*.input_layernorm x3" in str(report)
    data = json.loads(report.to_json())
    assert set(data["entries"][0]) == {"path", "op", "class", "method", "status", "reason"}
    assert report.counts()["rms_norm"] == 7
    assert report.counters() == {}
    logits(model)
    calls = report.counters()["rms_norm"]["calls"]
    assert sum(calls.values()) == 7
    assert "not compiled" in report.compile
    assert report.whole == [*(f"model.layers.{i}" for i in range(3)), "model"]
    assert "run whole: model.layers.* x3, model" in str(report)


def test_nothing_applied_warns_and_strict_raises(model):
    plain = nn.Sequential(nn.Conv1d(3, 3, 1), nn.Flatten())
    with pytest.warns(NothingAppliedWarning, match="Sequential"):
        apply(plain)
    with pytest.raises(NotAppliedError):
        apply(plain, strict=True)
    apply(model, strict=True)
    with pytest.raises(NotAppliedError, match="sinks"):
        apply(tiny("gpt_oss"), strict=True)


def test_strict_leaves_the_model_as_it_was():
    model = tiny("gpt_oss")
    with pytest.raises(NotAppliedError):
        apply(model, strict=True)
    assert not bindings(model)


def test_without_fuse_modules_are_replaced_one_by_one(stock, model):
    report = apply(model, fuse=False)
    weights = model.model.layers[0].mlp
    assert weights.gate_proj.weight.untyped_storage().nbytes() == weights.gate_proj.weight.nbytes
    assert report.counts()["replicated_linear"] == 21
    assert close(logits(model), logits(stock))


def test_ids_outside_the_vocabulary_are_an_error_still(model):
    apply(model)
    for token in (128, -1):
        with pytest.raises(IndexError):
            logits(model, torch.tensor([[token]]))


def test_a_mask_of_ones_own_and_packed_sequences(stock, model):
    apply(model)
    mask = torch.rand(2, 1, 7, 7) > 0.3
    mask |= torch.eye(7, dtype=torch.bool)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    with torch.no_grad():
        assert close(model(ids(), attention_mask=mask).logits, stock(ids(), attention_mask=mask).logits)
        a, b = (m(ids(1), position_ids=positions, use_cache=False).logits for m in (stock, model))
    assert close(b, a)


def test_the_old_name_of_the_cache_argument(stock, model):
    apply(model)
    with torch.no_grad():
        caches = [m(ids(), use_cache=True).cache for m in (model, stock)]
        with pytest.warns(FutureWarning):
            a = model(ids(2, 1), past_key_values=caches[0]).logits
        b = stock(ids(2, 1), cache=caches[1]).logits
    assert close(a, b)


def test_the_growing_cache_behaves_as_the_dynamic_one(stock, model):
    apply(model)
    with torch.no_grad():
        a, b = (m(ids(4, 6), use_cache=True).cache for m in (stock, model))
        assert type(b) is DynamicCache
        assert all(type(layer) is GrowingLayer for layer in b.layers)
        copies = copy.deepcopy(b)
        for change in (
            lambda c: c.crop(-2),
            lambda c: c.reorder_cache(torch.tensor([3, 0, 1, 1])),
            lambda c: c.batch_select_indices(torch.tensor([0, 2])),
            lambda c: c.batch_repeat_interleave(2),
            lambda c: c.crop(-10),
            lambda c: c.reset(),
        ):
            change(a), change(b)
            assert a.get_seq_length() == b.get_seq_length()
            if a.get_seq_length():
                assert all(
                    close(y.keys, x.keys) and close(y.values, x.values) for x, y in zip(a.layers, b.layers, strict=True)
                )
                rows = a.layers[0].keys.shape[0]
                x, y = (m(ids(rows, 1), cache=c).logits for m, c in ((stock, a), (model, b)))
                assert close(y, x)
        assert copies.get_seq_length() == 6
        c = stock(ids(4, 6), use_cache=True).cache  # filled by another model
        x, y = stock(ids(4, 3), cache=copy.deepcopy(c)).logits, model(ids(4, 3), cache=c).logits
        assert close(y, x)


def test_a_long_text_grows_the_rope_table_and_the_cache():
    stock = tiny("llama", max_position_embeddings=2048, num_hidden_layers=1)
    model = copy.deepcopy(stock)
    apply(model)
    tokens = ids(1, 700)
    with torch.no_grad():
        a, b = (m(tokens[:, :600], use_cache=True) for m in (stock, model))
        assert close(b.logits, a.logits)
        positions = torch.tensor([[1500]])
        a, b = (
            m(tokens[:, 600:601], cache=c.cache, position_ids=positions).logits for m, c in ((stock, a), (model, b))
        )
    assert close(b, a)


def test_inference_mode_and_back(model):
    apply(model)
    with torch.inference_mode():
        cache = model(ids(), use_cache=True).cache
    with torch.no_grad():
        assert model(ids(2, 1), cache=cache).logits.isfinite().all()


def test_a_class_whose_numbers_differ_is_not_replaced(stock, model):
    class Odd(type(stock.model.norm)):
        def forward(self, x):
            return super().forward(x) * 1.01

    model.model.norm.__class__ = Odd
    report = apply(model)
    assert any(e["path"] == "model.norm" and e["status"] == "skipped" for e in report.entries)


def test_apply_to_the_inner_model_alone():
    stock = LlamaForCausalLM(tiny("llama").config).eval().model
    model = copy.deepcopy(stock)
    apply(model)
    with torch.no_grad():
        assert close(model(ids()).last_hidden_state, stock(ids()).last_hidden_state)

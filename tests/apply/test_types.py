"""Logits of every transformers type against the untouched model: prompt, decoding, padding, caches, generate."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import EVERYWHERE, TYPES, ids, tiny
from transformers import StaticCache

import opmux

# Ops that stand for several of the others where a kernel of theirs runs here.
PARTS = {"rotary_attention": set(), "linear_silu_and_mul": {"replicated_linear", "silu_and_mul"}}
LEFT = {"model", "vocab_parallel_embedding", "replicated_linear"}

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning")]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """fp32 within 1e-5 of the scale of the logits."""
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    worst = float((ours - theirs).abs().max() / theirs.abs().max())
    assert worst <= 1e-5, worst


@pytest.fixture(params=sorted(TYPES), scope="module")
def pair(request):
    stock = tiny(request.param)
    applied = copy.deepcopy(stock)
    opmux.apply(applied)
    return request.param, stock, applied


def test_prompt_and_decode_with_the_dynamic_cache(pair):
    _, stock, applied = pair
    tokens = ids(2, 14)
    with torch.no_grad():
        a, b = stock(tokens[:, :5], use_cache=True), applied(tokens[:, :5], use_cache=True)
        close(b.logits, a.logits)
        for start, end in ((5, 6), (6, 10), (10, 11), (11, 14)):  # steps of one token, and chunks behind a cache
            a = stock(tokens[:, start:end], cache=a.cache)
            b = applied(tokens[:, start:end], cache=b.cache)
            close(b.logits, a.logits)
        close(applied(tokens).logits, stock(tokens).logits)
        assert b.cache.get_seq_length() == a.cache.get_seq_length() == 14
        assert type(b) is type(a)


def test_left_and_right_padding(pair):
    _, stock, applied = pair
    tokens = ids(3, 9)
    for padding in ([0, 2, 5], [0, -3, -1]):
        mask = torch.ones_like(tokens)
        for row, n in enumerate(padding):
            mask[row, : max(n, 0)] = 0
            mask[row, 9 + min(n, 0) :] = 0
        with torch.no_grad():
            a, b = (m(tokens, attention_mask=mask, use_cache=True) for m in (stock, applied))
            keep = mask.bool()
            close(b.logits[keep], a.logits[keep])
            more = torch.cat((mask, torch.ones(3, 1, dtype=mask.dtype)), 1)
            a = stock(ids(3, 1), attention_mask=more, cache=a.cache)
            b = applied(ids(3, 1), attention_mask=more, cache=b.cache)
            close(b.logits, a.logits)


def test_static_cache(pair):
    _, stock, applied = pair
    tokens = ids(1, 9)
    with torch.no_grad():
        caches = [StaticCache(config=m.config, max_cache_len=16) for m in (stock, applied)]
        for start, end in ((0, 6), (6, 7), (7, 9)):
            a, b = (m(tokens[:, start:end], cache=c) for m, c in zip((stock, applied), caches, strict=True))
            close(b.logits, a.logits)


def test_embeddings_as_input(pair):
    _, stock, applied = pair
    embeds = stock.get_input_embeddings()(ids())
    with torch.no_grad():
        close(applied(inputs_embeds=embeds).logits, stock(inputs_embeds=embeds).logits)


def test_generate(pair):
    _, stock, applied = pair
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    for more in ({}, {"num_beams": 3}):
        a, b = (
            m.generate(ids(2, 6), attention_mask=mask, max_new_tokens=6, do_sample=False, **more)
            for m in (stock, applied)
        )
        assert torch.equal(a, b)


def test_hidden_states_and_attentions(pair):
    _, stock, applied = pair
    with torch.no_grad():
        a, b = (m(ids(), output_hidden_states=True) for m in (stock, applied))
        assert len(a.hidden_states) == len(b.hidden_states)
        for x, y in zip(a.hidden_states, b.hidden_states, strict=True):
            close(y, x)
        stock, applied = copy.deepcopy(stock), copy.deepcopy(applied)
        for m in (stock, applied):
            m.set_attn_implementation("eager")
        a, b = (m(ids(), output_attentions=True) for m in (stock, applied))
        close(b.attentions[-1], a.attentions[-1])
        close(b.logits, a.logits)
        close(applied(ids()).logits, stock(ids()).logits)


def test_bf16_by_log_probabilities(pair):
    kind, _, _ = pair
    stock = tiny(kind, torch.bfloat16)
    applied = copy.deepcopy(stock)
    opmux.apply(applied)
    exact = copy.deepcopy(stock).float()
    tokens = ids(2, 12)

    def score(model):
        with torch.no_grad():
            log_probs = model(tokens).logits.float().log_softmax(-1)
        return log_probs[:, :-1].gather(-1, tokens[:, 1:, None]).mean()

    truth = score(exact)
    assert abs(score(applied) - truth) <= 2 * abs(score(stock) - truth) + 0.02


def test_what_is_reached(pair):
    kind, _, applied = pair
    report = opmux.apply(applied)
    reached = set().union(*(PARTS.get(op, {op}) for op in report.counts()))
    want = EVERYWHERE - set(TYPES[kind].without.split()) | set(TYPES[kind].ops.split())
    assert reached == want, str(report)
    whole = {"model" if "layers" not in path and ".h." not in path else "layers" for path in report.whole}
    assert whole == {"model": {"model", "layers"}, "layers": {"layers"}, "": set()}[TYPES[kind].whole], str(report)
    assert {e["op"] for e in report.entries if e["status"] == "skipped"} <= {*LEFT, "attention"}
    assert bool(TYPES[kind].left) == any(e["status"] == "skipped" for e in report.entries), str(report)
    assert all(e["reason"] for e in report.entries)
    assert len({(e["path"], e["op"]) for e in report.entries if e["status"] == "skipped"}) == sum(
        e["status"] == "skipped" for e in report.entries
    )

"""The comparison measures both sides, in turns, and sees a model that says something else."""

from __future__ import annotations

import dataclasses
import gc
import json

import pytest
import torch

import tiny_model
from opmux.tools import compare
from opmux.tools.compare import Plan

PLAN = Plan(rounds=1, prefill_tokens=32, decode_tokens=20, stepped_tokens=8)
PROMPT = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture
def stock() -> torch.nn.Module:
    return tiny_model.model()


def test_the_same_model_twice_does_not_differ(stock: torch.nn.Module) -> None:
    result = compare.compare(stock, tiny_model.model(), tiny_model.tokenizer(), PROMPT, PLAN)
    assert result["logprob_diff"] == 0
    assert result["decode_ratio"] == pytest.approx(
        result["opmux"]["decode_tokens_per_s"] / result["stock"]["decode_tokens_per_s"]
    )
    assert result["prefill_ratio"] == pytest.approx(result["stock"]["prefill_ms"] / result["opmux"]["prefill_ms"])
    assert result["measured"] == {
        "rounds": 1, "rounds_planned": 1, "prefill_tokens": 32, "prompt_tokens": 4, "decode_tokens": 20,
        "text_tokens": tiny_model.CONTEXT, "stepped_tokens": 8,
    }  # fmt: skip
    assert len(result["samples"]["stock"]["decode_tokens_per_s"]) == 2  # 20 tokens are a chunk of 16 and one of 4
    json.dumps(result)


def test_another_model_is_seen_on_both_ways(stock: torch.nn.Module) -> None:
    other = tiny_model.model()
    with torch.no_grad():
        other.model.norm.weight.mul_(1.5)
    result = compare.compare(stock, other, tiny_model.tokenizer(), PROMPT, PLAN)
    for way in ("text_at_once", "one_token_at_a_time"):
        assert result["logprob"][way]["mean"] > 0.01
        assert result["logprob"][way]["token_max"] >= result["logprob"][way]["token_mean"] > 0.01


def test_a_fault_of_the_cache_alone_is_seen(stock: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tiny_model.model()
    forward = other.forward

    def forgets(*args: object, **kwargs: object) -> object:
        kwargs.pop("cache", None)
        return forward(*args, **kwargs)

    monkeypatch.setattr(other, "forward", forgets)
    result = compare.compare(stock, other, tiny_model.tokenizer(), PROMPT, PLAN)
    assert result["logprob"]["text_at_once"]["mean"] == 0
    assert result["logprob_diff"] == result["logprob"]["one_token_at_a_time"]["mean"] > 0.01


def test_both_ways_of_scoring_agree(stock: torch.nn.Module) -> None:
    loop = compare._Greedy(stock)
    text = torch.arange(1, 12)[None]
    with torch.inference_mode():
        torch.testing.assert_close(compare._log_probs(loop, text), compare._log_probs_stepped(loop, text))


def test_the_sides_take_turns_and_the_order_changes(stock: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tiny_model.model()
    seen: list[str] = []

    def record(loop: compare._Greedy, ids: torch.Tensor) -> float:
        seen.append("stock" if loop.model is stock else "ours")
        return 1.0

    monkeypatch.setattr(compare, "_prefill_s", record)
    compare.compare(stock, other, tiny_model.tokenizer(), PROMPT, dataclasses.replace(PLAN, rounds=2))
    warm_up, measured = seen[:2], seen[2:]
    assert warm_up == ["stock", "ours"]
    # the standard prompt and the user's, in each of two rounds
    assert measured == ["stock", "ours", "stock", "ours", "ours", "stock", "ours", "stock"]


def test_no_further_round_begins_after_the_limit(stock: torch.nn.Module) -> None:
    plan = dataclasses.replace(PLAN, rounds=50, limit_s=0.0)
    result = compare.compare(stock, stock, tiny_model.tokenizer(), PROMPT, plan)
    assert (result["measured"]["rounds"], result["measured"]["rounds_planned"]) == (1, 50)


def test_no_garbage_collection_while_the_clock_runs() -> None:
    assert gc.isenabled()
    with compare.undisturbed():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_fixed_text_is_long_enough_for_a_real_tokenizer() -> None:
    assert len(compare.TEXT.split()) >= 200


def test_the_machine_is_described() -> None:
    described = compare.machine()
    assert described["threads"] == torch.get_num_threads()
    assert described["versions"]["torch"].startswith(torch.__version__.partition("+")[0])
    json.dumps(described)

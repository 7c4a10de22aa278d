"""Decode steps that are replayed: the same bits as real steps, and real steps again where anything changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DynamicCache,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
)

import opmux
from opmux.apply.binding import bound
from opmux.native import library

pytestmark = pytest.mark.skipif(not library.available, reason="replays kernels of the compiled CPU library")


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, max_position_embeddings=1024,
    )  # fmt: skip
    made = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    report = opmux.apply(made)
    assert bound(made.model) is not None, str(report)
    return made


@torch.no_grad()
def decode(model: Any, steps: int, batch: int = 1, cache: Any = None) -> torch.Tensor:
    """Logits of ``steps`` one-token steps behind a prompt of five tokens."""
    ids = torch.arange(5 * batch).view(batch, 5) % 128
    cache = DynamicCache(config=model.config) if cache is None else cache
    model(ids, past_key_values=cache)
    return torch.cat([model((ids[:, :1] + t) % 128, past_key_values=cache).logits for t in range(steps)], 1)


def replay_of(model: Any) -> Any:
    return bound(model.model).replay


def without_replay(model: Any) -> Any:
    twin = copy.deepcopy(model)
    replay_of(twin).enabled = False
    return twin


@pytest.mark.parametrize("batch", [1, 3])
def test_replayed_steps_equal_real_ones(model: Any, batch: int) -> None:
    want = decode(without_replay(model), 12, batch)
    assert torch.equal(decode(model, 12, batch), want)
    assert replay_of(model)._proven
    assert torch.equal(decode(model, 12, batch), want), "another cache"


def test_growing_past_the_cache_s_memory(model: Any) -> None:
    assert torch.equal(decode(model, 300), decode(without_replay(model), 300))


def test_changed_weights_are_seen(model: Any) -> None:
    decode(model, 6)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(2)
        model.model.layers[1].input_layernorm.weight = torch.nn.Parameter(torch.full((64,), 0.5, dtype=torch.bfloat16))
    twin = without_replay(model)
    assert torch.equal(decode(model, 8), decode(twin, 8))


def test_weights_that_move_between_two_steps_are_seen(model: Any) -> None:
    cache = DynamicCache(config=model.config)
    decode(model, 6, cache=cache)
    assert replay_of(model)._proven
    model.load_state_dict({name: weight * 2 for name, weight in model.state_dict().items()}, assign=True)
    twin, same = without_replay(model), copy.deepcopy(cache)
    with torch.no_grad():
        ours = model(torch.tensor([[3]]), past_key_values=cache).logits
        assert torch.equal(ours, twin(torch.tensor([[3]]), past_key_values=same).logits)


SMALL: Any = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip


def of_type(config: Any) -> Any:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    opmux.apply(made)
    return made


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(Qwen3Config(head_dim=16, **SMALL), id="q and k normed"),
        pytest.param(CohereConfig(pad_token_id=0, **SMALL), id="attention and MLP side by side, summed by torch"),
        pytest.param(GraniteConfig(residual_multiplier=0.5, **SMALL), id="scaled by torch"),
    ],
)
def test_replayed_steps_of_other_layers(config: Any) -> None:
    made = of_type(config)
    want = decode(without_replay(made), 12, 2)
    assert torch.equal(decode(made, 12, 2), want)
    assert replay_of(made)._proven


def test_what_torch_computes_by_other_means_is_a_real_step(model: Any) -> None:
    norm = bound(model.model.layers[0].input_layernorm).op
    norm.forward = lambda x, residual=None: x.neg()  # as a vendor's op written in torch would
    twin = without_replay(model)
    assert torch.equal(decode(model, 60), decode(twin, 60))
    assert not replay_of(model)._proven
    assert replay_of(model).failures > 1


def test_replays_again_once_the_reason_is_gone(model: Any) -> None:
    replay = replay_of(model)
    replay._judge(False)
    assert torch.equal(decode(model, 12), decode(without_replay(model), 12))
    assert not replay._proven
    decode(model, 12)
    assert replay._proven
    assert replay.failures == 0


def test_a_hook_inside_fires(model: Any) -> None:
    decode(model, 6)
    seen = []
    model.model.layers[0].mlp.register_forward_hook(lambda *a: seen.append(1))
    decode(model, 3)
    assert len(seen) == 4


def test_calls_are_counted(model: Any) -> None:
    report = opmux.apply(model)
    decode(model, 10)
    calls = sum(report.counters()["rms_norm"]["calls"].values())
    assert calls == 11 * 5


def test_results_are_the_caller_s_own(model: Any) -> None:
    first = decode(model, 8)
    kept = first.clone()
    decode(model, 8)
    assert torch.equal(first, kept)


def test_crop_and_continue(model: Any) -> None:
    def run(m: Any) -> torch.Tensor:
        cache = DynamicCache(config=m.config)
        decode(m, 8, cache=cache)
        cache.crop(-4)
        with torch.no_grad():
            return torch.cat([m(torch.tensor([[t]]), past_key_values=cache).logits for t in range(5)])

    assert torch.equal(run(model), run(without_replay(model)))


def test_inference_mode_and_no_grad_mix(model: Any) -> None:
    want = decode(without_replay(model), 8)
    with torch.inference_mode():
        assert torch.equal(decode(model, 8), want)
    assert torch.equal(decode(model, 8), want)


def test_autocast_is_left_to_the_model(model: Any) -> None:
    model = model.float()
    ids = torch.arange(9)[None]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got = model(ids).logits
        opmux.unapply(model)
        want = model(ids).logits
    assert got.dtype == want.dtype == torch.bfloat16
    assert torch.equal(got, want)

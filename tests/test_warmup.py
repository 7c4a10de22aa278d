"""opmux.warm_up runs the model over its lengths, and says what it cannot do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import opmux
from opmux.core.errors import UsageError


@pytest.fixture
def model():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=64, max_position_embeddings=64)
    return LlamaForCausalLM(config).eval()


def test_it_runs_every_power_of_two_and_the_end(model):
    report = opmux.apply(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert opmux.warm_up(model, 11) == [1, 2, 4, 8, 11]
    assert opmux.warm_up(model, 64)[-1] == 64
    assert opmux.warm_up(model, 1) == [1]
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    calls = [c["calls"] for name, c in report.counters().items() if name in ("attention", "rotary_attention")]
    # A prompt and a step each; no step behind the last position.
    assert sum(n for by_method in calls for n in by_method.values()) == 2 * 5 + (7 + 6) + 2


def test_what_it_refuses(model):
    for count in (0, 65):
        with pytest.raises(UsageError, match="1 to 64"):
            opmux.warm_up(model, count)
    with pytest.raises(UsageError, match="input_ids"):
        opmux.warm_up(nn.Linear(2, 2), 4)

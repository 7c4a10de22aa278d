"""The streamed answer: the text of `generate`, ending at the end token or the limit."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny_model
from opmux.tools import models
from opmux.tools.generate import generate


@pytest.fixture
def loaded(saved_model: Path) -> models.Loaded:
    return models.load(models.find(str(saved_model)), "float32")


def test_what_is_streamed_is_the_answer(loaded: models.Loaded) -> None:
    written: list[str] = []
    answer = generate(loaded, loaded.encode("hello"), 12, written.append)
    assert "".join(written) == answer.text
    assert answer.new_tokens <= 12
    assert answer.prefill_ms > 0
    assert answer.tokens_per_s > 0


def test_it_ends_at_the_end_token(loaded: models.Loaded) -> None:
    ids = loaded.encode("hello")
    greedy = loaded.model.generate(ids, do_sample=False, max_new_tokens=12)[0, ids.shape[1] :].tolist()
    end = greedy[-1]
    loaded.model.generation_config.eos_token_id = [end]
    answer = generate(loaded, ids, 12, lambda _: None)
    assert answer.new_tokens == greedy.index(end) + 1
    assert answer.finished


def test_it_ends_where_the_context_is_full(loaded: models.Loaded) -> None:
    loaded.model.generation_config.eos_token_id = None
    ids = loaded.encode("x" * (tiny_model.CONTEXT - 5), chat_template=False)
    answer = generate(loaded, ids, 100, lambda _: None)
    assert answer.new_tokens == 5
    assert not answer.finished


def test_one_token_has_no_speed(loaded: models.Loaded) -> None:
    answer = generate(loaded, loaded.encode("hello"), 1, lambda _: None)
    assert (answer.new_tokens, answer.tokens_per_s) == (1, 0.0)

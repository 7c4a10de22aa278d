"""A cache folder of its own for every test, a tiny model, and a way to call the command line in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tiny_model
from opmux.cli import main


@dataclass(frozen=True)
class Done:
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output, which must hold one JSON document and nothing else."""
        return json.loads(self.out)


Opmux = Callable[..., Done]


@pytest.fixture
def opmux(capsys: pytest.CaptureFixture[str]) -> Opmux:
    """Call ``opmux`` with these words."""

    def call(*words: str) -> Done:
        try:
            code = main([str(word) for word in words])
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return call


@pytest.fixture(autouse=True)
def cache_folder(clean_state: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("OPMUX_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by the tests that only read it."""
    return tiny_model.save_folder(tmp_path_factory.mktemp("models") / "tiny")

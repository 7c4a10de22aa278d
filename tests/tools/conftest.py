"""A cache folder and a tiny model of its own for every test."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny_model


@pytest.fixture(autouse=True)
def cache_folder(clean_state: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("OPMUX_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by the tests that only read it."""
    return tiny_model.save_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """For the tests that damage it."""
    return tiny_model.save_folder(tmp_path / "tiny")

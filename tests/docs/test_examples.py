"""Every fenced Python block of README.md and docs/*.md runs, in order, each page in a namespace of its own."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import opmux

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[int, str]]:
    """(line where it begins, code) for each Python block of a page."""
    text = page.read_text(encoding="utf-8")
    return [(text[: m.start(1)].count("\n"), m[1]) for m in BLOCK.finditer(text)]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """An importable module to run a page in: classes of a page have an origin, as those of a file have."""
    made = ModuleType("opmux_docs_example")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    with opmux.oot_scope(), torch.random.fork_rng(devices=[]):
        yield made


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_examples_run(page: Path, module: ModuleType) -> None:
    for line, code in blocks(page):
        # Empty lines in front, so that a traceback names the line of the page.
        exec(compile("\n" * line + code, str(page), "exec"), module.__dict__)

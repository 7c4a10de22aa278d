"""The pages of the ops, and README's table of them, say what the code says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"
STALE = "run `python docs/generate.py` and commit what it writes"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("opmux_docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_page_for_every_op_and_no_other(generate: ModuleType) -> None:
    assert {path.name for path in (DOCS / "ops").glob("*.md")} == set(generate.pages()), STALE


def test_pages_equal_the_code(generate: ModuleType) -> None:
    differ = [n for n, text in generate.pages().items() if (DOCS / "ops" / n).read_text(encoding="utf-8") != text]
    assert not differ, f"docs/ops/{', '.join(differ)}: {STALE}"


def test_readme_table_equals_the_code(generate: ModuleType) -> None:
    assert generate.README.read_text(encoding="utf-8") == generate.readme(), STALE


def test_links_lead_somewhere() -> None:
    root = DOCS.parent
    for page in [*root.glob("*.md"), *DOCS.rglob("*.md"), *(root / "benchmarks").glob("*.md")]:
        for target in links(page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(root)} links to {target}, which is not there"


def links(text: str) -> list[str]:
    """The relative paths that a page links to, without anchors."""
    found = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text) + re.findall(r'(?:src|srcset|href)="([^"#]+)"', text)
    return [target for target in found if "://" not in target]

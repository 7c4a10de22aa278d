"""Every op as ``opmux verify --quick`` checks it: each method that can run here, on small cases, eager and compiled."""

from __future__ import annotations

import pytest

from opmux.core import registry
from opmux.testing import Plan, verify

registry.load_catalogues()


@pytest.mark.parametrize("name", sorted(registry.op_registry))
def test_every_method_is_the_definition(name: str) -> None:
    report = verify(Plan(ops=[name], quick=True))
    cls = registry.op_registry[name]
    has_cases = bool(list(getattr(cls, "cases", list)()))
    assert report.checked or not has_cases or all(row.why_not for row in report.rows)
    assert not report.failures, "\n".join(f"{f.check}: {f.what}\n{f.element}\n{f.subject.replay()}" for f in report.failures)

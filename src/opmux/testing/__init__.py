"""The conformance suite behind ``opmux verify``, for tests of ops in and out of the tree::

    from opmux.testing import Plan, verify

    report = verify(Plan(ops=["rms_norm"], quick=True))
    assert not report.failures, report.failures

What is right is what ``forward_native`` gives in float64; how far a kernel may be from it stands in the op's file.
"""

from __future__ import annotations

from .guards import Guarded
from .subject import Failure, Subject
from .verify import Plan, Report, Row, verify

__all__ = ["Failure", "Guarded", "Plan", "Report", "Row", "Subject", "verify"]

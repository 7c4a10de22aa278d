"""Adding an op touches one file: from it follow its row in list, its checks, its timings and its page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

OP = '''
"""Twice."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from opmux import CustomOp
from opmux.core.cases import FLOATS, Case, Cost, Tolerance
from opmux.core.requires import requires
from opmux.core.torch_library import opaque


@opaque(fake=torch.empty_like)
def twice_cpu(x: Tensor) -> Tensor:
    return torch.add(x, x)


@CustomOp.register("twice")
class Twice(CustomOp):
    """``2 x``.

    Shapes:  x [T, H] -> [T, H].
    """

    tolerance = Tolerance(ulp=1.0, fp32=1.0)

    def forward_native(self, x: Tensor) -> Tensor:
        return 2 * x

    @requires(dtypes=FLOATS)
    def forward_cpu(self, x: Tensor) -> Tensor:
        return twice_cpu(x)

    @classmethod
    def cases(cls) -> Iterator[Case]:
        for tokens in (0, 3, 64):
            yield Case(f"T={tokens}", {}, lambda i, t=tokens: (i.randn(t, 5),), {"T": tokens}, bench=tokens == 64)

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        return Cost(10 * dtype.itemsize * case.dims["T"])
'''

CATALOGUE = '''
def load_all():
    from their_ops.family import twice
'''

SCRIPT = """
import importlib.util, io, json
from contextlib import redirect_stdout
from opmux.core import registry
registry.add_catalogue("their_ops")
from opmux.cli import main

def said(*words):
    out = io.StringIO()
    with redirect_stdout(out):
        code = main([*words, "--json"])
    return code, json.loads(out.getvalue())

spec = importlib.util.spec_from_file_location("generate", GENERATE)
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)
print(json.dumps({
    "list": said("list", "--platform", "cpu"),
    "verify": said("verify", "twice", "--platform", "cpu"),
    "bench": said("bench", "twice", "--against", "eager", "--min-time-s", "0.001"),
    "pages": generate.pages("their_ops"),
    "own pages": sorted(generate.pages()),
}))
"""


def test_an_op_from_a_package_of_its_own(tmp_path: Path, run_python: Callable[..., Any]) -> None:
    family = tmp_path / "their_ops" / "family"
    family.mkdir(parents=True)
    (tmp_path / "their_ops" / "__init__.py").write_text(CATALOGUE)
    (family / "__init__.py").write_text("")
    (family / "twice.py").write_text(OP)
    generate = Path(__file__).parents[2] / "docs" / "generate.py"
    found = json.loads(run_python(SCRIPT.replace("GENERATE", repr(str(generate)))).stdout)

    code, listed = found["list"]
    [op] = [op for op in listed["ops"] if op["name"] == "twice"]
    assert (code, op["runs"], op["implemented"]["cpu"]) == (0, "forward_cpu", ["forward_cpu"])

    code, verified = found["verify"]
    assert (code, verified["passed"]) == (0, True)
    assert [(row["method"], row["cases"]) for row in verified["rows"]] == 3 * [("forward_cpu", 3)]

    code, timed = found["bench"]
    [row] = timed["rows"]
    assert (code, row["op"], row["case"], row["method"]) == (0, "twice", "T=64", "forward_cpu")
    assert row["times"]["opmux"]["median_us"] > 0

    assert set(found["pages"]) == {"README.md", "twice.md"}
    assert "`2 x`" in found["pages"]["twice.md"]
    assert "T=64" in found["pages"]["twice.md"]
    assert "twice.md" not in found["own pages"]

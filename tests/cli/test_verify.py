"""`opmux verify`: its table, its JSON, its exit code, and that what is printed replays the failure."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import torch
from torch import Tensor

from opmux.core.requires import requires
from opmux.ops import SiluAndMul

Opmux = Any


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """silu_and_mul's CPU kernel, wrong in its last element where it has seven rows."""
    good: Any = SiluAndMul.forward_cpu

    def forward_cpu(self: SiluAndMul, x: Tensor) -> Tensor:
        out = good(self, x).clone()
        if x.shape[0] == 7 and out.numel():
            out.view(-1)[-1] = 1e3
        return out

    monkeypatch.setattr(SiluAndMul, "forward_cpu", requires(native_library=True)(forward_cpu))


def test_a_right_op(opmux: Opmux) -> None:
    done = opmux("verify", "silu_and_mul", "--quick", "--dtype", "float32", "bfloat16")
    assert done.code == 0
    assert "forward_cpu" in done.out
    assert "left out by --quick" in done.out
    assert "all right" in done.out


def test_json(opmux: Opmux) -> None:
    done = opmux("verify", "SiluAndMul", "--cases", "d=65", "--seed", "5", "--json")
    assert done.code == 0
    assert done.json["passed"]
    assert done.json["seed"] == 5
    assert done.json["machine"]["versions"]["torch"] == torch.__version__
    assert {row["dtype"] for row in done.json["rows"]} == {"float32", "float16", "bfloat16"}
    assert all(row["cases"] and row["worst_ulp"] <= row["tolerance_ulp"] for row in done.json["rows"])


def test_a_failure_and_its_replay(opmux: Opmux, broken: None) -> None:
    done = opmux("verify", "silu_and_mul", "--quick", "--dtype", "float32")
    assert done.code == 1
    assert "is 1000, should be" in done.out
    command = next(line for line in done.out.splitlines() if "again:" in line).split("again:")[1]
    again = opmux(*shlex.split(command)[1:], "--json")
    assert again.code == 1
    [row] = again.json["rows"]
    assert row["cases"] == 1
    assert row["failures"][0]["element"]["got"] == 1000.0


def test_wrong_calls(opmux: Opmux) -> None:
    done = opmux("verify", "silu_and_mull")
    assert (done.code, done.out) == (2, "")
    assert "Did you mean 'silu_and_mul'" in done.err
    assert opmux("verify", "silu_and_mul", "--cases", "no such case").code == 2
    assert opmux("verify", "silu_and_mul", "--method", "forward_gpu").code == 2
    assert opmux("verify", "--platform", "cudda").code == 2


def test_gpu_methods_without_a_gpu_say_so(opmux: Opmux) -> None:
    done = opmux("verify", "silu_and_mul", "--platform", "cuda")
    assert done.code == 0
    assert "this process has no cuda hardware" in " ".join(done.out.split())

"""`opmux bench`: its tables, its JSON, its page and its exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opmux.core.requires import requires
from opmux.ops import SiluAndMul
from opmux.tools import bench
from opmux.tools.bench_ceilings import Ceilings

Opmux = Any
SHORT = ("bench", "silu_and_mul", "--cases", "T=1 d=1536", "--against", "eager", "--min-time-s", "0.001")


@pytest.fixture(autouse=True)
def known_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    ceilings = Ceilings(read={1: 9.0, 2: 10.0}, copy_gb_s=8.0, matrix_gflop_s={"bfloat16": 100.0})
    monkeypatch.setattr(bench, "measure", lambda device, dtypes: ceilings)


def test_tables(opmux: Opmux) -> None:
    done = opmux(*SHORT)
    assert done.code == 0
    for text in ("read 9.0 GB/s on 1 thread, 10.0 GB/s on 2 threads", "T=1 d=1536", "eager, µs", "in cache", "Medians"):
        assert text in " ".join(done.out.split())


def test_json_and_page(opmux: Opmux, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.html"
    done = opmux(*SHORT, "--html", page, "--json")
    assert done.code == 0
    [row] = done.json["rows"]
    assert (row["op"], row["case"], row["pays"]) == ("silu_and_mul", "T=1 d=1536", row["pays"])
    assert done.json["machine"]["threads"]
    assert done.json["host"][0]["opmux_us"] > 0
    assert "<svg" in page.read_text(encoding="utf-8")


def test_a_wrong_op_has_no_time_and_the_command_fails(opmux: Opmux, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SiluAndMul, "forward_cpu", requires()(lambda self, x: x[..., : x.shape[-1] // 2].clone()))
    done = opmux(*SHORT)
    assert done.code == 1
    assert "opmux has no time" in done.out


@pytest.mark.parametrize(
    "words",
    [("--min-time-s", "0"), ("--against", "eagle"), ("--threads", "0"), ("--cases", "no such case")],
)
def test_wrong_calls(opmux: Opmux, words: tuple[str, ...]) -> None:
    done = opmux(*SHORT, *words)
    assert (done.code, done.out) == (2, "")

"""What bench times, what it refuses to time, and the figures that it draws from the times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from opmux.core.cases import Cost
from opmux.core.errors import UsageError
from opmux.core.requires import requires
from opmux.ops import RMSNorm, SiluAndMul
from opmux.tools import bench, bench_ceilings, bench_html, bench_peers, bench_timing
from opmux.tools.bench import AGAIN, OPMUX, Plan, Row
from opmux.tools.bench_ceilings import Ceilings
from opmux.tools.bench_timing import Timing

CASE = "T=1 d=1536"


@pytest.fixture(autouse=True)
def known_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 GB/s and 100 GFLOP/s, in no time."""
    ceilings = Ceilings(read={1: 9.0, 2: 10.0}, copy_gb_s=8.0, matrix_gflop_s={"bfloat16": 100.0})
    monkeypatch.setattr(bench, "measure", lambda device, dtypes: ceilings)


def timed(**options: Any) -> Row:
    [row] = bench.bench(Plan(["silu_and_mul"], **{"cases": CASE, "min_time_s": 1e-3, "against": ["eager"], **options})).rows
    return row


def test_everyone_is_timed_and_compared() -> None:
    row = timed()
    assert set(row.times) == {OPMUX, AGAIN, "eager"}
    assert row.method == "forward_cpu"
    assert row.size_bytes == 3 * 1536 * 2
    assert row.floor_s == pytest.approx(row.size_bytes / 10e9)
    assert not row.in_memory
    assert row.share is None
    assert row.gain == row.times["eager"].median_s / row.times[OPMUX].median_s


def test_the_compiler_is_timed_on_this_shape() -> None:
    assert "compile" in timed(against=["compile"]).times


@pytest.mark.parametrize("against", [["eager"], []])
def test_a_wrong_kernel_gets_no_time(monkeypatch: pytest.MonkeyPatch, against: list[str]) -> None:
    monkeypatch.setattr(SiluAndMul, "forward_cpu", requires()(lambda self, x: x[..., : x.shape[-1] // 2] * 1.01))
    row = timed(against=against)
    assert "wrong on T=" in row.refused[OPMUX]
    assert set(row.times) == set(against)
    assert row.pays == "unknown"


def test_a_peer_that_fails_is_refused_and_the_others_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(op: Any, *args: Any) -> Any:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(bench_peers, "eager", fails)
    row = timed()
    assert "no such instruction" in row.refused["eager"]
    assert OPMUX in row.times


def test_what_does_not_exist_is_an_error() -> None:
    with pytest.raises(UsageError, match="there are eager, compile, vllm"):
        timed(against=["eagle"])
    with pytest.raises(UsageError, match="no such case"):
        timed(cases="no such case")


def row_of(opmux_us: float, again_us: float, **peers_us: float) -> Row:
    row = Row("op", "case", "forward_cpu", 1000, 0, 1e-6, in_memory=True)
    for name, value in {OPMUX: opmux_us, AGAIN: again_us, **peers_us}.items():
        row.times[name] = Timing(value * 1e-6, 0.0, 7)
    return row


@pytest.mark.parametrize(
    ("row", "pays"),
    [
        (row_of(10, 10, eager=20, compile=15), "yes"),
        (row_of(10, 10, eager=20, compile=9), "no"),
        (row_of(10, 10.1, eager=10.2), "same"),
        (row_of(10, 14, eager=13), "same"),  # two timings of one thing lie further apart
        (row_of(10, 10, vllm=5), "unknown"),  # what runs where the op is off has no time
    ],
)
def test_whether_it_pays(row: Row, pays: str) -> None:
    assert row.pays == pays


def test_share_and_summary() -> None:
    row = row_of(2, 2, eager=4)
    assert row.share == 0.5
    report = bench.Report("cpu", "cpu", torch.bfloat16, 1 << 20, Ceilings({1: 1.0}), [row, row_of(2, 2, eager=16)])
    assert report.summary() == {
        "op": {"gain": pytest.approx(4.0), "cases": 2, "yes": 2, "same": 0, "no": 0, "unknown": 0}
    }


def test_floor_is_the_longer_of_memory_and_arithmetic() -> None:
    ceilings = Ceilings({1: 4.0, 2: 8.0}, 10.0, {"float32": 100.0})
    assert ceilings.floor_s(Cost(10_000, 0), torch.float32) == pytest.approx(1e-6)
    assert ceilings.floor_s(Cost(10_000, 1_000_000), torch.float32) == pytest.approx(1e-5)
    assert ceilings.floor_s(Cost(10_000, 1_000_000), torch.bfloat16) == pytest.approx(1e-6)  # not measured


def test_turns_go_round_over_the_data_and_tell_fast_from_slow() -> None:
    seen: list[int] = []
    fast = [lambda n=n: seen.append(n) for n in range(3)]
    slow = [lambda: time.sleep(2e-3)]
    samplers = {name: bench_timing.sampler(calls, "cpu") for name, calls in (("fast", fast), ("slow", slow))}
    times = bench_timing.take_turns(samplers, 1e-3)
    assert set(seen) == {0, 1, 2}
    assert times["slow"].median_s > 10 * times["fast"].median_s
    assert times["slow"].rounds == times["fast"].rounds >= 7


def test_a_rate_is_bytes_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_ceilings, "_seconds", lambda work, device: 0.5)
    monkeypatch.setattr(bench_ceilings, "cache_bytes", lambda device: 1)
    monkeypatch.setattr(bench_ceilings, "_MATRIX", {"cpu": (2, 3, 4)})
    found = bench_ceilings.measure("cpu", [torch.float32])
    assert found.read[torch.get_num_threads()] == pytest.approx((256 << 20) / 0.5 / 1e9)
    assert found.copy_gb_s == pytest.approx(2 * (256 << 20) / 0.5 / 1e9)
    assert found.matrix_gflop_s == {"float32": pytest.approx(48 / 0.5 / 1e9)}


@pytest.mark.parametrize(("text", "size"), [("512K\n", 512 << 10), ("32M", 32 << 20)])
def test_cache_size_is_read(tmp_path: Path, text: str, size: int) -> None:
    (tmp_path / "size").write_text(text)
    assert bench_timing._size(tmp_path / "size") == size
    assert 1 << 15 <= bench_timing.cache_bytes("cpu") <= 4 << 30


@pytest.fixture
def vllm_kernels() -> Iterator[None]:
    """Stands for vLLM's compiled kernels, by their own signatures."""
    library = torch.library.Library("_C", "FRAGMENT")
    library.define("rms_norm(Tensor! result, Tensor input, Tensor weight, float epsilon) -> ()")
    library.define("silu_and_mul(Tensor! result, Tensor input) -> ()")
    library.impl("silu_and_mul", _silu_and_mul, "CPU")
    library.impl("rms_norm", _rms_norm, "CPU")
    yield
    library._destroy()


def _silu_and_mul(result: Tensor, x: Tensor) -> None:
    gate, up = x.float().chunk(2, -1)
    result.copy_(torch.nn.functional.silu(gate) * up)


def _rms_norm(result: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    wide = x.float()
    result.copy_((wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight)


def test_vllm_is_timed_where_it_is_there(vllm_kernels: None) -> None:
    assert "vllm" in timed(against=["vllm"]).times
    assert bench_peers.vllm(SiluAndMul(round_gate=True)) is None
    op, x = RMSNorm(8), torch.randn(3, 8)
    peer = bench_peers.vllm(op)
    assert peer is not None
    torch.testing.assert_close(peer(op, x), op.forward_native(x))


def test_vllm_is_left_out_where_it_is_not() -> None:
    assert bench_peers.vllm(SiluAndMul()) is None
    assert set(timed(against=["vllm"]).times) == {OPMUX, AGAIN}


def test_the_page_holds_everything_and_loads_nothing() -> None:
    pytest.importorskip("matplotlib")
    rows = [row_of(2, 2, eager=4), Row("product", "a<b", "forward_cpu", 1000, 5000, 1e-6, refused={"vllm": "it is & was wrong"})]
    rows[1].times = {OPMUX: Timing(1e-6, 0.0, 7)}
    report = bench.Report("cpu", "cpu", torch.bfloat16, 1 << 20, Ceilings({1: 1.0}, 1.0, {"bfloat16": 100.0}), rows)
    report.hosts = [bench.Host("op", "case", 3e-6, 5e-6)]
    page = bench_html.page(report, {"processor": "a < b", "versions": {"torch": "2.13"}})
    assert page.count("<svg") == 2
    for text in ("a &lt; b", "a&lt;b", "it is &amp; was wrong", "50 %", "2.00 ×", "2.13", "3.0"):
        assert text in page
    for loads in ("<script", "src=", '@import', 'href="http'):
        assert loads not in page


def test_a_page_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_html, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"opmux\[bench\]"):
        bench_html.require()

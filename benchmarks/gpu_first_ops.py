"""Times the Triton kernels of the first ops on one GPU; ``gpu_checks.py`` beside this one must be green first.

    python benchmarks/gpu_first_ops.py host                # host time of one eager call
    python benchmarks/gpu_first_ops.py tune quant          # every candidate tile: the kernels' rules come from here
    python benchmarks/gpu_first_ops.py attention linear    # beside the vendor's libraries
    python benchmarks/gpu_first_ops.py table peers.json    # a result of the peers harness as a table with the anchors

``extra`` is the adapter by which that harness (``--extra gpu_first_ops:extra``) times these kernels beside others.
With ``WARM=i/n`` in the environment, tune, attention and linear only compile the i-th of n shares of their candidates.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from gpu_checks import BF16, DEVICE, EPS, FP32, qkv, randn, table_of
from torch import Tensor

from opmux.ops.activation import kernels_triton as activation
from opmux.ops.attention import kernels_triton as attention
from opmux.ops.embedding import kernels_triton as embedding
from opmux.ops.linear import kernels_triton as linear
from opmux.ops.logits import kernels_triton as logits
from opmux.ops.norm import kernels_triton as norm
from opmux.ops.norm.rms_norm import RMSNorm
from opmux.ops.quant import kernels_triton as quant
from opmux.ops.rope import kernels_triton as rope

# Best peer's microseconds (H200, torch 2.11, Triton 3.6; vLLM, FlashInfer, Liger, FlagGems, quack and torch.compile).
ANCHORS = {
    "rms_norm T=1 H=4096": 1.6, "rms_norm T=64 H=4096": 2.4,
    "rms_norm T=1024 H=4096": 6.7, "rms_norm T=16384 H=4096": 66.1,
    "rms_norm T=1 H=8192": 1.9, "rms_norm T=64 H=8192": 2.9,
    "rms_norm T=1024 H=8192": 11.4, "rms_norm T=16384 H=8192": 128,
    "fused_add_rms_norm T=1 H=4096": 1.7, "fused_add_rms_norm T=64 H=4096": 2.7,
    "fused_add_rms_norm T=1024 H=4096": 9.8, "fused_add_rms_norm T=16384 H=4096": 132,
    "fused_add_rms_norm T=1 H=8192": 2.2, "fused_add_rms_norm T=64 H=8192": 3.4,
    "fused_add_rms_norm T=1024 H=8192": 18.6, "fused_add_rms_norm T=16384 H=8192": 263,
    "gemma_rms_norm T=16384 H=4096": 66.9,
    "silu_and_mul T=1 d=14336": 1.2, "silu_and_mul T=64 d=14336": 3.2,
    "silu_and_mul T=1024 d=14336": 22.3, "silu_and_mul T=16384 d=14336": 324,
    "gelu_tanh_and_mul T=16384 d=14336": 332, "relu2 [16384,14336]": 247,
    "swigluoai_and_mul [16384,2x14336]": 378, "fatrelu_and_mul [16384,2x14336]": 324,
    "rotary_embedding T=1 32+8 heads x128": 1.7, "rotary_embedding T=64 32+8 heads x128": 2.4,
    "rotary_embedding T=1024 32+8 heads x128": 8.4, "rotary_embedding T=16384 32+8 heads x128": 95.6,
    "vocab_embedding gather T=1 [128256,4096]": 1.3, "vocab_embedding gather T=64 [128256,4096]": 2.3,
    "vocab_embedding gather T=16384 [128256,4096]": 67.8,
    "logits softcap*scale [1,128256] bf16": 1.8, "logits softcap*scale [64,128256] bf16": 10.9,
    "logits softcap*scale ->fp32 [64,128256] bf16": 14.3,
    "qk_norm+rope T=64 32+8 heads x128": 2.6, "qk_norm+rope T=16384 32+8 heads x128": 138,
    "gated_rms_norm T=64 H=4096": 3.6, "gated_rms_norm T=1024 H=4096": 9.5, "gated_rms_norm T=16384 H=4096": 100,
    "quant_fp8 tensor static [64,4096]": 1.8, "quant_fp8 tensor dynamic [64,4096]": 5.3,
    "quant_fp8 token dynamic [64,4096]": 2.3, "quant_fp8 group128 [64,4096]": 2.2,
    "quant_fp8 tensor static [16384,4096]": 48.7, "quant_fp8 tensor dynamic [16384,4096]": 97.0,
    "quant_fp8 token dynamic [16384,4096]": 66.1, "quant_fp8 group128 [16384,4096]": 59.7,
    "quant_fp8 tensor static [16384,14336]": 166, "quant_fp8 tensor dynamic [16384,14336]": 288,
    "quant_fp8 token dynamic [16384,14336]": 204, "quant_fp8 group128 [16384,14336]": 202,
    "silu_and_mul+static quant T=64 d=14336": 3.5, "silu_and_mul+static quant T=16384 d=14336": 344,
    "silu_and_mul+token quant T=64 d=14336": 8.9, "silu_and_mul+token quant T=16384 d=14336": 556,
    "silu_and_mul+group128 quant T=64 d=14336": 4.0, "silu_and_mul+group128 quant T=16384 d=14336": 556,
    "rms_norm+static quant T=64 H=4096": 2.4, "rms_norm+static quant T=16384 H=4096": 75.1,
    "rms_norm+token quant T=64 H=4096": 3.0, "rms_norm+token quant T=16384 H=4096": 106,
    "rms_norm+group128 quant T=64 H=4096": 4.6, "rms_norm+group128 quant T=16384 H=4096": 106,
    "mm_encoder_attn 8x1024 tokens 16x80": 110, "mm_encoder_attn 64x64 tokens 16x80": 27.8,
}  # fmt: skip


# -- the adapter for the peers harness --------------------------------------------------------------------------------


def extra(case: Any) -> list[tuple[str, Callable[[dict[str, Tensor]], Any]]]:
    """Our implementation of a case of the peers harness."""

    def rms(s: dict[str, Tensor], offset: float = 0.0) -> Tensor:
        return norm.rms_norm_triton(s["x"], s["w"], EPS, s["x"].shape[-1], offset, False)

    def encoder(s: dict[str, Tensor]) -> Tensor:
        q, k, v = (s[name].view(s["sl"].numel(), -1, 16, 80) for name in "qkv")
        return attention.attention_triton(q, k, v, None, 80**-0.5, False, 0, 0.0).view(-1, 16, 80)

    def quantized(scale: bool, group: int, op: str = "") -> Callable[[dict[str, Tensor]], Any]:
        def call(s: dict[str, Tensor]) -> Any:
            last = (s["sc"] if scale else None, *([None] if not op else []), torch.float8_e4m3fn, group, False)
            if op == "silu":
                return quant.silu_and_mul_quant_triton(s["x"], False, *last)
            if op == "norm":
                return quant.rms_norm_quant_triton(s["x"], s["w"], EPS, s["x"].shape[-1], False, *last)
            return quant.quant_fp8_triton(s["x"], *last)

        return call

    def normed_rope(s: dict[str, Tensor]) -> Any:
        q, k, _ = s["qkv"].split([4096, 1024, 1024], -1)
        return rope.qk_norm_rope_triton(s["pos"], q, k, s["qw"], s["kw"], EPS, 128, s["cs32"], True)

    ours: dict[str, Callable[[dict[str, Tensor]], Any]] = {
        "rms_norm": rms,
        "gemma_rms_norm": lambda s: rms(s, 1.0),
        "fused_add_rms_norm": lambda s: norm.add_rms_norm_triton(
            s["x"], s["r"], s["w"], EPS, s["x"].shape[-1], 0.0, False, False
        ),
        "silu_and_mul": lambda s: activation.silu_and_mul_triton(s["x"], False),
        "gelu_tanh_and_mul": lambda s: activation.act_and_mul_triton(s["x"], "gelu_tanh", 0.0, False, False),
        "fatrelu_and_mul": lambda s: activation.act_and_mul_triton(s["x"], "fatrelu", 0.5, False, False),
        "swigluoai_and_mul": lambda s: activation.swigluoai_and_mul_triton(s["x"], 1.702, 7.0),
        "xielu": lambda s: activation.xielu_triton(s["x"], *_xielu_parameters()),
        "relu2": lambda s: activation.activation_triton(s["x"], "relu2", []),
        "rotary_embedding": lambda s: rope.rotary_embedding(s["pos"], s["q"], s["k"], 128, s["cs32"], True),
        "vocab_embedding gather": lambda s: embedding.embedding_triton(s["i"], s["w"]),
        "logits softcap*scale": lambda s: logits.softcap_scale_triton(s["x"], s["x"].shape[-1], 30.0, 0.5, False, None),
        "logits softcap*scale ->fp32": lambda s: logits.softcap_scale_triton(
            s["x"], s["x"].shape[-1], 30.0, 0.5, False, FP32
        ),
        "mm_encoder_attn": encoder,
        "qk_norm+rope": normed_rope,
        "gated_rms_norm": lambda s: norm.rms_norm_gated_triton(
            s["x"], s["z"], s["w"], EPS, s["x"].shape[-1], True, False
        ),
        **{
            f"{before}{kind}": quantized(scale, group, op)
            for op, before, kinds in (
                ("", "quant_fp8 ", ("tensor static", "tensor dynamic", "token dynamic", "group128")),
                ("silu", "silu_and_mul+", ("static quant", "", "token quant", "group128 quant")),
                ("norm", "rms_norm+", ("static quant", "", "token quant", "group128 quant")),
            )
            for kind, (scale, group) in zip(kinds, ((True, 0), (False, 0), (False, -1), (False, 128)), strict=True)
            if kind
        },
    }
    return [("opmux", ours[case.op])] if case.op in ours else []


@functools.cache
def _xielu_parameters() -> list[Tensor]:
    """Slopes of 0.8 (the negative one with beta in it), beta 0.5, eps -1e-6; slopes as inverse softplus."""
    raw = torch.tensor([0.8, 0.8 - 0.5], dtype=torch.float64).expm1().log()
    return [torch.tensor(v, device=DEVICE) for v in (*raw.tolist(), 0.5, -1e-6)]


def table(path: str) -> None:
    """Print the harness's JSON as one line a case, ours against the best peer of that run and against the anchor."""
    with open(path) as file:
        result = json.load(file)
    print("ceilings", {k: round(v, 2) for k, v in result["ceilings"].items() if k in ("copy_TBs", "matmul_TFLOPs")})
    print("host us", {k: round(v, 1) for k, v in result.get("launch_host", {}).items() if isinstance(v, float)})
    print(
        f"{'case':46} {'floor':>7} {'opmux':>7} {'anchor':>7} {'ratio':>6} {'best peer of this run':>32} {'ratio':>6} "
        f"{'host':>5}"
    )
    for record in result["cases"]:
        name = f"{record['op']} {record['shape']}"
        ours = record["peers"].get("opmux", {})
        if "us" not in ours:
            print(f"{name:46} opmux: {ours.get('error') or ours}")
            continue
        peers = [(p["us"], n) for n, p in record["peers"].items() if n != "opmux" and p.get("ok") and "us" in p]
        best, who = min(peers, default=(float("nan"), "none"))
        anchor = ANCHORS.get(name, float("nan"))
        print(
            f"{name:46} {record['floor_us']:7.1f} {ours['us']:7.1f} {anchor:7.1f} {ours['us'] / anchor:6.2f} "
            f"{who[:24]:>24} {best:7.1f} {ours['us'] / best:6.2f} {ours.get('host_us', float('nan')):5.1f}"
            f"{'' if ours['ok'] else ' WRONG'}"
        )


# -- timing -----------------------------------------------------------------------------------------------------------


def sets_of(make: Callable[[], Any], size_bytes: float) -> list[Any]:
    """Input sets of about 300 MB together, so that no call finds its inputs in the cache."""
    return [make() for _ in range(max(2, min(48, int(300e6 / max(size_bytes, 1)) + 1)))]


def graph_us(function: Callable[[Any], Any], sets: list[Any]) -> float:
    """Median microseconds a call, from replays of a CUDA graph over rotated inputs; without inputs, one call."""
    if not sets:
        function(None)
        return 0.0
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for inputs in sets[:2]:
            function(inputs)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph, calls, kept = torch.cuda.CUDAGraph(), max(len(sets), 8), []
    with torch.cuda.graph(graph):
        kept.extend(function(sets[i % len(sets)]) for i in range(calls))
    times = []
    for _ in range(23):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / calls)
    return statistics.median(times[3:])


def host_us(function: Callable[[], Any]) -> float:
    """Microseconds of host time a call, without waiting for the device; the least of 7."""
    best = float("inf")
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            function()
        best = min(best, (time.perf_counter() - start) * 1e4)
    return best


def _graph_us_or_none(what: str, function: Callable[[Any], Any], sets: list[Any]) -> float | None:
    try:
        return graph_us(function, sets)
    except Exception as error:  # a tile too large for the chip, a backend that refuses the shape
        print(f"  {what}: {type(error).__name__} {str(error)[:90]}".replace("\n", " "))
        torch.cuda.synchronize()
        return None


def compare(
    what: str, size_bytes: float, make: Callable[[], Any], candidates: dict[Any, Callable[[Any], Any]], first: Any
) -> None:
    """Time candidates on one shape; print them best first, with the one in use marked."""
    share, of = (int(part) for part in os.environ.get("WARM", "-1/1").split("/"))
    if share >= 0:  # only compile, and only this process's share
        inputs = make()
        for function in itertools.islice(candidates.values(), share, None, of):
            _graph_us_or_none(what, lambda _, function=function: function(inputs), [])
        return
    sets, times = sets_of(make, size_bytes), {}
    for name, function in candidates.items():
        taken = _graph_us_or_none(f"{what} {name}", function, sets)
        if taken is not None:
            times[name] = taken
    ranked = sorted(times.items(), key=lambda item: item[1])
    shown = " ".join(f"{'*' if name == first else ''}{str(name).replace(' ', '')}={us:.1f}" for name, us in ranked[:7])
    used = f" used={times[first]:.1f} ({times[first] / ranked[0][1]:.2f}x)" if first in times else ""
    print(f"{what}: {shown}{used}", flush=True)


def tune() -> None:
    """Every candidate tile of every memory-bound kernel."""
    Tile = norm.Tile
    for h in (4096, 8192):
        cuts = [(1, 4), (1, 8), (1, 16), (2, 8), (2, 16), (4, 16)] if h == 4096 else [(1, 8), (1, 16), (1, 32), (2, 16)]
        for t in (1, 1024, 16384):
            for add in (False, True):
                make = lambda t=t, h=h: (randn(t, h), randn(t, h), randn(h))  # noqa: E731
                compare(
                    f"{'add+' if add else ''}rms T={t} H={h}", t * h * (8 if add else 4), make,
                    {
                        c: lambda s, c=c, add=add, h=h: norm.launch(
                            s[0], s[1] if add else None, s[2], EPS, h, 0.0, False, False, c
                        )
                        for c in [Tile(r, h, w, store) for r, w in cuts for store in ("", ".cs")]
                    },
                    norm.tile(h, t, add),
                )  # fmt: skip
    compare(
        "gated T=16384 H=4096", 16384 * 4096 * 6, lambda: (randn(16384, 4096), randn(16384, 4096), randn(4096)),
        {
            c: lambda s, c=c: norm.launch_gated(*s, EPS, 4096, True, False, c)
            for c in [Tile(r, 4096, w) for r, w in ((1, 4), (1, 8), (1, 16), (2, 8), (2, 16))]
        },
        norm.tile(4096, 16384),
    )  # fmt: skip
    compare(
        "layer norm T=16384 H=4096", 16384 * 4096 * 4, lambda: (randn(16384, 4096), randn(4096), randn(4096)),
        {
            c: lambda s, c=c: norm.launch_layer_norm(*s, EPS, c)
            for c in [Tile(r, 4096, w) for r, w in ((1, 4), (1, 8), (1, 16), (2, 8), (2, 16))]
        },
        norm.layer_norm_tile(4096),
    )  # fmt: skip
    for t in (1, 64, 1024, 16384):
        sizes = [(512, 1), (512, 2), (512, 4), (1024, 2), (1024, 4), (2048, 4), (2048, 8)]
        compare(
            f"silu T={t}", t * 14336 * 6, lambda t=t: randn(t, 28672),
            {
                c: lambda x, c=c: activation.launch(x, "silu", 0.0, False, False, c)
                for c in sizes
            },
            activation.tile(14336, t),
        )  # fmt: skip
    cache = table_of(32768, 128)
    for t in (1, 64, 1024, 16384):

        def turn(s: tuple[Tensor, Tensor, Tensor], c: tuple[int, int]) -> Any:
            return rope.launch(s[0], s[1], s[2], 128, cache, True, config=c)

        tiles = [(1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2)]
        compare(
            f"rope T={t} (groups,warps)", t * 20480,
            lambda t=t: (torch.randint(0, 32768, (t,), device=DEVICE), randn(t, 4096), randn(t, 1024)),
            {c: lambda s, c=c: turn(s, c) for c in tiles}, rope.tile(t, 32, 8, 128),
        )  # fmt: skip
    for t in (64, 16384):

        def normed(s: tuple[Tensor, Tensor, Tensor], c: tuple[int, int]) -> Any:
            q, k, _ = s[1].split([4096, 1024, 1024], -1)
            return rope.launch(s[0], q, k, 128, cache, True, (s[2], s[2]), EPS, c)

        compare(
            f"qk norm rope T={t} (groups,warps)", t * 20480,
            lambda t=t: (torch.randint(0, 32768, (t,), device=DEVICE), randn(t, 6144), randn(128)),
            {c: lambda s, c=c: normed(s, c) for c in [(1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 1), (4, 4), (8, 1)]},
            rope.tile(t, 32, 8, 128, True),
        )  # fmt: skip
    weight = randn(128256, 4096)
    for t in (1, 64, 16384):
        tiles = [(4096, 4), (4096, 8), (4096, 16), (2048, 4), (2048, 8), (1024, 2), (1024, 4), (512, 2)]
        compare(
            f"embedding T={t} (block,warps)", t * 16384, lambda t=t: torch.randint(0, 128256, (t,), device=DEVICE),
            {c: lambda i, c=c: embedding.launch(i, weight, config=c) for c in tiles}, embedding.tile(4096),
        )  # fmt: skip
    for t in (1, 64):
        tiles = [(512, 4), (1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8)]
        compare(
            f"logits T={t} (block,warps)", t * 128256 * 4, lambda t=t: randn(t, 128256, scale=20.0),
            {c: lambda x, c=c: logits.launch(x, 128256, 30.0, 0.5, False, None, c) for c in tiles}, logits.tile(t * 128256),
        )  # fmt: skip


def tune_quant() -> None:
    """Tiles of the quantizing kernels, alone and behind a gate and a norm."""
    Tile, fp8, scale = norm.Tile, torch.float8_e4m3fn, torch.full((1,), 0.02, device=DEVICE)
    blocks = [(size, warps) for size in (2048, 4096, 8192) for warps in (4, 8)]
    for t, h in ((16384, 4096), (16384, 14336), (64, 4096)):
        block = 4096 if h == 4096 else 16384
        shapes = ((1, 4), (1, 8), (1, 16), (1, 32), (2, 8), (2, 16)) if h == 4096 else ((1, 8), (1, 16), (1, 32))
        rows = [Tile(r, block, w) for r, w in shapes]
        for gate in (False, True) if h != 4096 else (False,):
            make = lambda t=t, h=h, gate=gate: randn(t, 2 * h if gate else h)  # noqa: E731
            name, size = f"{'silu ' if gate else ''}quant T={t} H={h}", t * h * (5 if gate else 3)
            compare(
                f"{name} static", size, make,
                {c: lambda x, c=c, g=gate: quant.launch(x, scale, None, fp8, 0, False, (g, False), c) for c in blocks},
                quant.STATIC_TILE,
            )  # fmt: skip
            compare(
                f"{name} token", size, make,
                {c: lambda x, c=c, g=gate: quant.launch(x, None, None, fp8, -1, False, (g, False), c) for c in rows},
                quant.row_tile(h, gate),
            )  # fmt: skip
            compare(
                f"{name} group128", size, make,
                {c: lambda x, c=c, g=gate: quant.launch(x, None, None, fp8, 128, False, (g, False), c) for c in blocks},
                quant.group_tile(gate),
            )  # fmt: skip
    t, h = 16384, 4096
    rows = [Tile(r, h, w) for r, w in ((1, 4), (1, 8), (1, 16), (2, 8), (2, 16))]
    for add in (False, True):
        for name, given, group in (("static", True, 0), ("token", False, -1), ("group128", False, 128)):
            compare(
                f"{'add+' if add else ''}rms quant T={t} H={h} {name}", t * h * (7 if add else 3),
                lambda t=t, h=h: (randn(t, h), randn(t, h), randn(h)),
                {
                    c: lambda s, c=c, add=add, given=given, group=group: quant.launch_norm_quant(
                        s[0], s[1] if add else None, s[2], EPS, h, False, False, scale if given else None, fp8, group,
                        False, c,
                    )
                    for c in rows
                },
                quant.norm_row_tile(h, t, add),
            )  # fmt: skip


def _bare(prepared: Any, x: Tensor, w: Tensor, y: Tensor) -> None:
    """What no launch can do without: the same launch with its arguments at hand."""
    bare = _bare_calls.get("call")
    if bare is None:
        prepared(x, x, w, y, y)
        prepared(x, x, w, y, y)
        run, *grid, function, metadata, _ = next(iter(prepared._ready.values()))
        stream = torch._C._cuda_getCurrentRawStream(0)
        pointers = [t.data_ptr() for t in (x, x, w, y, y)]
        arguments = (*grid, stream, function, metadata, None, None, None, *pointers, *prepared._tail)
        bare = _bare_calls["call"] = functools.partial(run, *arguments)
    bare()


_bare_calls: dict[str, Callable[[], None]] = {}


def time_host() -> None:
    """Host microseconds of one eager call."""
    x, w, wide, ids = randn(1, 4096), randn(4096), randn(1, 28672), torch.zeros(1, device=DEVICE, dtype=torch.long)
    q, k, cache, table = randn(1, 4096), randn(1, 1024), table_of(4096, 128), randn(1000, 4096)
    q4, k4, head = randn(1, 1, 32, 128), randn(1, 4096, 8, 128), randn(128)
    norm_op = RMSNorm(4096).to(DEVICE, BF16)
    y = torch.empty_like(x)
    prepared = norm._rms_norm_plan(
        1, 4096, (4096, 4096), (BF16, None, BF16), EPS, 4096, 0.0, False, False, norm.tile(4096, 1)
    )
    calls = {
        "empty": lambda: torch.empty(x.shape, dtype=x.dtype, device=x.device),
        "empty_like": lambda: torch.empty_like(x),
        "prepared launch": lambda: prepared(x, x, w, y, y),
        "C launcher alone": lambda: _bare(prepared, x, w, y),
        "F.rms_norm": lambda: F.rms_norm(x, (4096,), w, EPS),
        "rms_norm": lambda: norm.rms_norm_triton(x, w, EPS, 4096, 0.0, False),
        "add_rms_norm": lambda: norm.add_rms_norm_triton(x, x, w, EPS, 4096, 0.0, False, False),
        "silu_and_mul": lambda: activation.silu_and_mul_triton(wide, False),
        "rotary": lambda: rope.rotary_embedding(ids, q, k, 128, cache, True),
        "qk norm rope": lambda: rope.qk_norm_rope_triton(ids, q, k, head, head, EPS, 128, cache, True),
        "quant token": lambda: quant.quant_fp8_triton(x, None, None, torch.float8_e4m3fn, -1, False),
        "linear one row": lambda: linear.linear_one_row_triton(x, table, None),
        "F.linear one row": lambda: F.linear(x, table),
        "RMSNorm op": lambda: norm_op(x),
        "embedding": lambda: embedding.embedding_triton(ids, table),
        "softcap": lambda: logits.softcap_scale_triton(x, 4096, 30.0, 1.0, False, None),
        "attention decode": lambda: attention.attention_triton(q4, k4, k4, None, 0.1, True, 0, 0.0),
    }
    for name, call in calls.items():
        call()
        print(f"host us {name:18} {host_us(call):6.1f}", flush=True)


def time_attention() -> None:
    """Prefill, chunked prefill and decode beside the backends of torch's SDPA."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    backends = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    shapes = [
        (1, 2048, 2048, 32, 8, 128, True), (1, 8192, 8192, 32, 8, 128, True), (4, 2048, 2048, 16, 16, 64, True),
        (8, 1024, 1024, 16, 16, 80, False), (1, 2048, 2048, 8, 4, 256, True), (1, 512, 4096, 32, 8, 128, True),
        (1, 1, 4096, 32, 8, 128, False), (32, 1, 4096, 32, 8, 128, False), (1, 1, 32768, 32, 8, 128, False),
        (8, 1, 1024, 9, 3, 64, False),
        (1, 128, 128, 32, 8, 128, True), (1, 256, 256, 32, 8, 128, True), (1, 512, 512, 9, 3, 64, True),
        (32, 128, 128, 32, 8, 128, True), (64, 64, 64, 16, 16, 80, False),
    ]  # fmt: skip
    for b, s, length, n, k, d, causal in shapes:
        make = functools.partial(qkv, b, s, length, n, k, d)
        q, key, value = make()
        rule = attention.tile(q, key, value, 0, False)
        Tile = attention.Tile
        if s == 1:
            half, twice = max(1, rule.splits // 2), min(128, rule.splits * 2)
            tiles = {
                rule,
                *(rule._replace(splits=n) for n in (half, twice)),
                rule._replace(block_n=32),
                rule._replace(warps=2),
            }
            tiles |= {rule._replace(block_n=128), rule._replace(stages=2), rule._replace(stages=4, block_n=32)}
        else:
            tiles = {
                rule,
                Tile(1, 128, 128, 1, 8, 2),
                Tile(1, 128, 64, 1, 8, 2),
                Tile(1, 128, 64, 1, 4, 2),
                Tile(1, 64, 64, 1, 4, 2),
            }
            tiles |= {Tile(1, 128, 128, 1, 8, 3), Tile(1, 128, 32, 1, 4, 3)}
        candidates: dict[Any, Callable[[Any], Any]] = {
            tuple(c): lambda x, c=c, causal=causal, d=d: attention.launch(*x, None, d**-0.5, causal, 0, 0.0, c)
            for c in tiles
        }

        def sdpa(
            x: Any, backend: Any, causal: bool = causal, s: int = s, length: int = length, n: int = n, k: int = k
        ) -> Tensor:
            q, key, value = (t.transpose(1, 2) for t in x)
            bias = causal_lower_right(s, length) if causal and s != length else None
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    q, key, value, attn_mask=bias, is_causal=causal and bias is None, enable_gqa=n != k
                ).transpose(1, 2)

        for name, backend in backends.items():
            candidates[name] = lambda x, backend=backend, sdpa=sdpa: sdpa(x, backend)
        size = 2 * b * d * (s * n + 2 * length * k)
        compare(
            f"attn B={b} S={s} L={length} {n}/{k}x{d}{' causal' if causal else ''}", size, make, candidates, tuple(rule)
        )


def time_linear() -> None:
    """One row beside the vendor's product."""
    for i, o in ((4096, 4096), (4096, 28672), (14336, 4096), (576, 1536)):
        tiles = [(2, 2048, 4), (4, 1024, 4), (4, 2048, 4), (8, 1024, 4), (8, 2048, 8), (1, 4096, 4)]
        candidates: dict[Any, Callable[[Any], Any]] = {
            c: lambda s, c=c: linear.launch(s[0], s[1], None, c) for c in tiles
        }
        candidates["F.linear"] = lambda s: F.linear(s[0], s[1])
        make = lambda i=i, o=o: (randn(1, i), randn(o, i, scale=i**-0.5))  # noqa: E731
        compare(f"linear {i}->{o} ({2 * i * o / 4.3e6:.1f} us floor)", 2 * i * o, make, candidates, linear.TILE)


def main(arguments: list[str]) -> int:
    """Run the parts that are named, in that order."""
    torch.set_grad_enabled(False)
    parts = {"host": time_host, "tune": tune, "quant": tune_quant, "attention": time_attention, "linear": time_linear}
    if arguments[:1] == ["table"]:
        table(*arguments[1:])
        return 0
    if not arguments or not set(arguments) <= set(parts):
        print(f"usage: gpu_first_ops.py {'|'.join(parts)} ... or table FILE; got {arguments}", file=sys.stderr)
        return 2
    for name in arguments:
        started = time.perf_counter()
        parts[name]()
        torch.cuda.empty_cache()
        print(f"-- {name}: {time.perf_counter() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The launcher's promises that need no GPU: kernels compile for GPUs here, wide loads where aligned, and clear
errors."""

from __future__ import annotations

import re

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from opmux.core.errors import HardwareMissingError  # noqa: E402
from opmux.native import triton_launch  # noqa: E402
from opmux.native.triton_launch import Launcher, kernel, next_power_of_2  # noqa: E402
from opmux.ops.activation import kernels_triton as activation  # noqa: E402
from opmux.ops.attention import kernels_triton as attention  # noqa: E402
from opmux.ops.embedding import kernels_triton as embedding  # noqa: E402
from opmux.ops.encoder import kernels_triton as encoder  # noqa: E402
from opmux.ops.linear import kernels_triton as linear  # noqa: E402
from opmux.ops.logits import kernels_triton as logits  # noqa: E402
from opmux.ops.norm import kernels_triton as norm  # noqa: E402
from opmux.ops.quant import kernels_triton as quant  # noqa: E402
from opmux.ops.rope import kernels_triton as rope  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted, not compiled, in this process", allow_module_level=True)

HOPPER, MI300 = GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)
KERNELS = {  # launcher, types of the pointers, constexprs, warps, stages
    "norm": (
        norm._rms_norm_kernel, ["*bf16"] * 5, (1, 4096, True, True, True, False, False, False, ""), 8, 2,
    ),
    "static quant": (
        quant._static_kernel, ["*bf16", "*u8", "*fp32", "*fp32"],
        (4096, True, True, False, False, 448.0, "hardware"), 8, 2,
    ),
    "silu and token quant": (
        quant._row_kernel, ["*bf16", "*u8", "*fp32", "*fp32"],
        (1, 4096, True, False, True, False, False, 448.0, "hardware"), 8, 2,
    ),
    "group quant": (
        quant._group_kernel, ["*bf16", "*u8", "*fp32"],
        (32, 128, True, False, False, True, 448.0, "fn"), 4, 2,
    ),
    "norm and group quant": (
        quant._norm_kernel, [*["*bf16"] * 3, "*u8", "*bf16", "*fp32", "*fp32"],
        (1, 4096, True, True, True, False, False, False, False, 128, False, 448.0, "hardware"), 8, 2,
    ),
    "tensor quant": (
        quant._tensor_kernel, ["*bf16", "*u8", "*i32", "*fp32"], (512, 8192, 448.0, "hardware"), 8, 2,
    ),
    "gated norm": (norm._gated_norm_kernel, ["*bf16"] * 4, (1, 4096, True, True, True, False), 8, 2),
    "layer norm": (norm._layer_norm_kernel, ["*bf16"] * 6, (1, 4096, True, True, True, True, False), 8, 2),
    "wide norm": (norm._rms_norm_wide_kernel, ["*bf16"] * 5, (8192, True, True, False, False), 16, 2),
    "silu_and_mul": (activation._gated_kernel, ["*bf16"] * 2, (1024, True, "silu", False, False), 4, 2),
    "gelu_and_mul": (activation._gated_kernel, ["*bf16"] * 2, (1024, True, "gelu", True, True), 4, 2),
    "relu2": (activation._elementwise_kernel, ["*bf16"] * 2, (1024, True, "relu2"), 4, 2),
    "xielu": (activation._xielu_kernel, ["*bf16"] * 6, (1024, True), 4, 2),
    "swigluoai": (activation._swigluoai_kernel, ["*bf16"] * 2, (1024,), 4, 2),
    "sparse gelu": (activation._sparse_kernel, ["*bf16"] * 2, (4096, "gelu_tanh"), 8, 2),
    "rotary": (
        rope._rotary_kernel, [*["*bf16"] * 4, *["*fp32"] * 4, "*i64"],
        (32, 8, 1, 32, 8, 128, 128, 64, 1, True, True, False, False, 0, 0), 4, 2,
    ),
    "normed rotary": (
        rope._rotary_kernel, [*["*bf16"] * 4, *["*fp32"] * 2, *["*bf16"] * 2, "*i64"],
        (32, 8, 1, 32, 8, 128, 128, 64, 1, True, True, False, True, 0, 0), 4, 2,
    ),
    "dual chunk rotary": (
        rope._rotary_kernel, [*["*bf16"] * 4, *["*fp32"] * 4, "*i64"],
        (28, 4, 1, 32, 4, 128, 128, 64, 1, True, True, False, False, 253952, 262144), 4, 2,
    ),
    "embedding": (embedding._embedding_kernel, ["*bf16", "*bf16", "*i64"], (4096, True), 8, 2),
    "logits": (logits._softcap_scale_kernel, ["*bf16"] * 2, (2048, True, True, False, False), 4, 2),
    "linear": (linear._one_row_kernel, ["*bf16"] * 4, (4, 2048, True, False), 4, 3),
    "decode": (
        attention._attention_kernel, [*["*bf16"] * 3, "*fp32", "*bf16", "*fp32"],
        (4, 16, 64, True, 128, 128, 128, 128, True, False, False, 0, "ieee", 8), 4, 3,
    ),
    "prefill": (
        attention._attention_kernel, [*["*bf16"] * 5, "*fp32"],
        (1, 128, 64, False, 128, 128, 128, 128, True, False, False, 0, "ieee", 8), 8, 2,
    ),
    "packed segments": (
        encoder._encoder_kernel, [*["*bf16"] * 4, "*i32", "*bf16", "*bf16"], (64, 64, 80, 128, True, False, "ieee", 8), 4, 2,
    ),
    "relative positions": (
        encoder._encoder_kernel, [*["*bf16"] * 4, "*bf16", "*fp32", "*fp32"], (128, 32, 64, 64, False, True, "ieee", 8), 4, 2,
    ),
    "merge": (attention._merge_kernel, ["*fp32", "*bf16", "*fp32"], (128, 16, 128), 4, 2),
}  # fmt: skip


def compiled(name: str, target: GPUTarget, aligned: bool = True):
    launcher, pointers, constants, warps, stages = KERNELS[name]
    jit = launcher.aligned if aligned else launcher.any_alignment
    types = iter(pointers)
    signature = {p.name: "constexpr" if p.is_constexpr else p.annotation_type or next(types) for p in jit.params}
    first = len(jit.params) - len(constants)
    constexprs = {(first + i,): value for i, value in enumerate(constants)}
    assumed = [i for i, p in enumerate(jit.params[:first]) if not p.do_not_specialize]
    attributes = {(i,): [["tt.divisibility", 16]] for i in assumed}
    assert bool(assumed) == aligned
    source = ASTSource(fn=jit, signature=signature, constexprs=constexprs, attrs=attributes)
    return triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("name", KERNELS)
def test_compiles_for_hopper_with_wide_loads(name):
    code = compiled(name, HOPPER).asm["ptx"]
    assert re.search(r"(ld\.global\S*\.v4\.b32|cp\.async\.cg)", code), "no 16-byte load"
    if name != "linear":
        assert re.search(r"st\.global\S*\.v[24]\.b32", code) or name == "merge", "no wide store"


@pytest.mark.parametrize("name", ["norm", "silu_and_mul", "rotary"])
def test_the_other_variant_assumes_no_alignment(name):
    assert not re.search(r"(ld|st)\.global\S*\.v[24]\.b32", compiled(name, HOPPER, aligned=False).asm["ptx"])


@pytest.mark.parametrize("name", [name for name in KERNELS if name != "prefill" and "hardware" not in KERNELS[name][2]])
def test_compiles_for_rocm(name):
    assert compiled(name, MI300).asm["amdgcn"]


def test_cpu_tensors_are_refused_by_name():
    with pytest.raises(HardwareMissingError, match=r"_rms_norm_kernel was called with CPU tensors.*TRITON_INTERPRET"):
        norm.rms_norm_triton(torch.ones(2, 3), None, 1e-6, 3, 0.0, False)


def test_parameters_out_of_order_are_refused():
    def _kernel(x_ptr, ids_ptr, y_ptr, n, BLOCK): ...

    with pytest.raises(TypeError, match="not in the order"):
        Launcher(_kernel, ["ids_ptr"], [])
    assert isinstance(kernel(loose=["y_ptr"], multiples=["n"])(_kernel), Launcher)


@pytest.mark.parametrize(("n", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (4096, 4096), (4097, 8192)])
def test_next_power_of_2(n, power):
    assert next_power_of_2(n) == power


class FakeTensor:
    """What a launch looks at."""

    def __init__(self, address: int, device: int = 0) -> None:
        self.address, self.device_index, self.dtype = address, device, torch.float32

    def get_device(self) -> int:
        return self.device_index

    def data_ptr(self) -> int:
        return self.address


def test_a_launch_goes_to_the_tensors_device_and_its_stream(monkeypatch):
    current, calls = [0], []

    class Guard:
        def __init__(self, device: int) -> None:
            self.device = device

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.device

        def __exit__(self, *_: object) -> None:
            current[0] = self.before

    monkeypatch.setattr(triton_launch, "_current_device", lambda: current[0], raising=False)
    monkeypatch.setattr(triton_launch, "_raw_stream", lambda device: 70 + device, raising=False)
    monkeypatch.setattr(torch.cuda, "device", Guard)

    def _kernel(x_ptr, ids_ptr, x_stride, n, BLOCK): ...

    launcher = kernel(loose=["ids_ptr"], multiples=["x_stride"])(_kernel)
    for device, aligned in ((0, True), (1, True), (1, False)):
        key = (device, aligned, (64,), 4, 2, torch.float32, torch.float32)
        launcher.compiled[key] = (lambda *a: calls.append(a), f"function {device}{aligned}", "metadata", None)
    launch = launcher.prepare((3, 1, 1), (16, 5), (64,))
    launch(FakeTensor(32), FakeTensor(40))
    assert calls == [(3, 1, 1, 70, "function 0True", "metadata", None, None, None, 32, 40, 16, 5, 64)]
    launch(FakeTensor(32), FakeTensor(40))
    assert calls[0] == calls.pop()  # the second call takes the short way
    launch(FakeTensor(32, 1), FakeTensor(40, 1))  # ids may lie anywhere
    assert calls.pop()[3:5] == (71, "function 1True")
    launcher.prepare((3, 1, 1), (17, 5), (64,))(FakeTensor(32, 1), FakeTensor(40, 1))
    assert calls.pop()[3:5] == (71, "function 1False")
    assert current == [0]

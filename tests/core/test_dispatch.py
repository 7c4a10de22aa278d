"""Contract section 2: dispatch (D1-D6), and the cases B17 and X1."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import opmux
from opmux import platforms
from opmux.core.custom_op import CustomOp
from opmux.core.decide import CHAINS, Facts, Lineage, Verdict, decide
from opmux.core.errors import DeviceMismatchError, KernelRefusedError, PlatformError, RegistrationError, UsageError
from opmux.core.registry import PLATFORM_METHODS
from opmux.core.requires import requires
from opmux.ops import RMSNorm, RotaryEmbedding, SiluAndMul

X = torch.ones(2, 4)
ON = Verdict(True, "test", "test")


def says(word: str) -> Any:
    return lambda self, x, *args, **kwargs: word


def op_class(*methods: str, class_name: str = "Probe", **body: Any) -> Any:
    return type(class_name, (CustomOp,), {"__module__": __name__, **{m: says(m) for m in methods}, **body})


def facts(kind: str, dtype: torch.dtype = torch.float32) -> Facts:
    return Facts(kind, kind, "cpu", dtype, None)


def on_cpu(cls: type) -> Lineage:
    return Lineage(cls, cls, False, "test")


EVERYTHING = ("forward_native", *PLATFORM_METHODS)


@pytest.mark.parametrize("kind", CHAINS)
def test_chain_order(kind: str) -> None:
    chain = CHAINS[kind]
    for start in range(len(chain)):
        cls = op_class(*chain[start:])
        made = decide(on_cpu(cls), facts(kind), ON)
        assert made.method == chain[start]
        assert [r.candidate for r in made.rejected] == [m for m in chain if m != chain[start]]
        for rejected in made.rejected[:start]:
            assert "defines no" in rejected.why
    assert chain[-1] == "forward_native"


@pytest.mark.parametrize("kind", [k for k in CHAINS if k not in ("meta", "wrapped")])
def test_b17_native_only_and_cuda_only(kind: str) -> None:
    assert decide(on_cpu(op_class("forward_native")), facts(kind), ON).method == "forward_native"
    made = decide(on_cpu(op_class("forward_cuda")), facts(kind), ON)
    assert made.method == ("forward_cuda" if kind in ("cuda", "rocm") else None)


def test_b17_cuda_only_op_on_the_cpu() -> None:
    op = op_class("forward_cuda", class_name="CudaOnly")()
    with pytest.raises(NotImplementedError, match=r"CudaOnly cannot run on cpu: .*defines no forward_cpu"):
        op(X)
    with (
        opmux.use_config(opmux.CompilationConfig(custom_ops="none")),
        pytest.raises(NotImplementedError, match="CudaOnly cannot run on cpu"),
    ):
        op_class("forward_cuda", class_name="CudaOnly")()(X)


def test_b17_never_falls_to_another_platforms_method() -> None:
    op = op_class("forward_native", "forward_cuda", "forward_hip", "forward_xpu", "forward_tpu", "forward_oot")()
    assert op(X) == "forward_native"


def test_disabled_runs_native_and_nothing_else() -> None:
    with opmux.use_config(opmux.CompilationConfig(custom_ops="none")):
        op = op_class(*EVERYTHING)()
    assert op(X) == "forward_native"
    assert "disabled" in op.decision(X).why
    assert "'none' is given" in op.decision(X).rejected[0].why


def test_d1_decide_is_pure_and_everything_reads_its_record() -> None:
    cls = op_class("forward_native", "forward_cpu")
    lineage = on_cpu(cls)
    assert decide(lineage, facts("cpu"), ON) == decide(lineage, facts("cpu"), ON)
    op = cls()
    op(X)
    (route,) = op.routes
    assert route.decision == op.decision() == op.decision(X) or route.decision.method == op.decision(X).method
    assert route.calls == 1
    text = str(route.decision)
    assert "forward_cpu" in text
    assert "why:" in text
    assert "not forward_native" in text
    json.dumps(route.decision.to_dict())


def test_d1_the_record_of_a_call_says_what_the_call_does() -> None:
    cls = op_class("forward_native")
    cls.forward_cpu = requires(
        dtypes=(torch.float32,), when=lambda self, x: "takes one row" if x.shape[0] != 1 else None
    )(says("forward_cpu"))
    op = cls()
    for x in (X, X[:1], X.double(), X[:1].clone().requires_grad_(True), X[:1].to("meta")):
        assert op(x) == op.decision(x).method, x


def test_d2_enforce_enable() -> None:
    class Probe(CustomOp):
        forward_native, forward_cpu = says("forward_native"), says("forward_cpu")

    with opmux.use_config(opmux.CompilationConfig(custom_ops="none")):
        forced, plain = Probe(enforce_enable=True), Probe()
    assert (forced(X), plain(X)) == ("forward_cpu", "forward_native")
    record = forced.decision(X)
    assert record.directive_source == "constructor"
    assert "enforce_enable=True" in record.directive
    forced.redispatch(opmux.CompilationConfig(custom_ops="none"))
    assert forced(X) == "forward_cpu"


@pytest.mark.parametrize("method", [*PLATFORM_METHODS[:1], "forward_native"])
def test_d3_overridden_methods(method: str) -> None:
    base = op_class("forward_native", "forward_cpu")
    derived = type("Derived", (base,), {method: says("derived"), "__module__": __name__})
    config = opmux.CompilationConfig(custom_ops="none" if method == "forward_native" else "all")
    with opmux.use_config(config):
        op = derived()
    assert op(X) == "derived"
    assert op.decision(X).defined_by == "Derived"


def test_d3_overridden_dispatch_forward() -> None:
    class Derived(op_class("forward_native", "forward_cpu")):  # type: ignore[misc]
        def dispatch_forward(self, decision: Any) -> Any:
            return lambda x: f"mine instead of {decision.method}"

    op = Derived()
    assert op(X) == "mine instead of forward_cpu"
    assert "overrides dispatch_forward()" in " ".join(op.decision(X).notes)
    assert op(X.to("meta")) == "mine instead of forward_native"


def test_d3_forward_replaced_on_class_and_object() -> None:
    class Own(op_class("forward_native")):  # type: ignore[misc]
        def forward(self, x: Tensor) -> str:
            return "own forward"

    assert Own()(X) == "own forward"
    op = op_class("forward_native")()
    assert op(X) == "forward_native"
    op.forward = lambda x: "patched"
    assert op(X) == "patched"
    del op.forward
    assert op(X) == "forward_native"


def test_hooks_run() -> None:
    op = op_class("forward_native")()
    seen: list[str] = []
    before = op.register_forward_pre_hook(lambda m, a: seen.append("pre"))
    after = op.register_forward_hook(lambda m, a, out: seen.append(out))
    everywhere = nn.modules.module.register_module_forward_hook(lambda m, a, out: seen.append("global"))
    try:
        op(X)
    finally:
        everywhere.remove()
    assert seen == ["pre", "global", "forward_native"]
    before.remove()
    after.remove()
    op(X)
    assert len(seen) == 3


# -- D4: the tensors decide ------------------------------------------------------------------------------------------


def test_d4_cpu_then_meta_then_cpu() -> None:
    op = op_class("forward_native", "forward_cpu", "forward_cuda")()
    assert [op(x) for x in (X, X.to("meta"), X)] == ["forward_cpu", "forward_native", "forward_cpu"]
    assert op.decision(X.to("meta")).platform == "meta"


def test_d4_meta_gives_the_shape() -> None:
    op = RMSNorm(4).to("meta")
    y, s = op(X.to("meta"), X.to("meta"))
    assert y.device.type == s.device.type == "meta"
    assert y.shape == s.shape == X.shape


def test_d4_two_devices_names_both() -> None:
    op = RMSNorm(4)
    for args, kwargs in (((X, X.to("meta")), {}), ((X.to("meta"), X), {}), ((X,), {"residual": X.to("meta")})):
        for _ in range(2):  # the second call finds a route
            with pytest.raises(DeviceMismatchError, match="two devices") as raised:
                op(*args, **kwargs)
            assert " on cpu" in str(raised.value)
            assert " on meta" in str(raised.value)
    assert op(X).shape == X.shape
    with pytest.raises(DeviceMismatchError, match=r"argument 0 on meta.*weight on cpu"):
        op(X.to("meta"))


def test_d4_tensors_inside_lists_and_modules() -> None:
    op = op_class("forward_native")()
    for other in ([X.to("meta")], (X, [X.to("meta")]), {"a": X.to("meta")}, nn.Linear(2, 2, device="meta")):
        with pytest.raises(DeviceMismatchError, match=r"argument 1 on meta|argument 1 on cpu, argument 1 on meta"):
            op(X, other)


def test_d4_a_weight_that_moved_is_seen() -> None:
    op = RMSNorm(4)
    op(X)
    op.weight = nn.Parameter(torch.ones(4, device="meta"))
    with pytest.raises(DeviceMismatchError, match="weight on meta"):
        op(X)
    op.weight = nn.Parameter(torch.ones(4))
    op(X)
    op.to("meta")
    assert op(X.to("meta")).device.type == "meta"
    assert op.to_empty(device="cpu")(X).device.type == "cpu"


@pytest.mark.parametrize("move", [copy.deepcopy, lambda op: op.to(torch.bfloat16), lambda op: op.half().float()])
def test_d4_deepcopy_and_to(move: Any) -> None:
    op = RMSNorm(4).requires_grad_(False)
    op(X)
    moved = move(op)
    x = X.to(moved.weight.dtype)
    assert moved(x).dtype == x.dtype
    assert {r.decision.dtype for r in moved.routes} == {str(x.dtype).removeprefix("torch.")}
    assert moved.decision(x).method == "forward_cpu"


def test_d4_lead_argument_by_name() -> None:
    rope = RotaryEmbedding(8, 8, 16, 10000.0, True, torch.float32)
    positions, query = torch.arange(3), torch.randn(3, 16)
    with torch.no_grad():
        rope(positions, query)
        rope(positions, query=query)
        rope(positions=positions, query=query)
    assert {(r.decision.dtype, r.decision.method) for r in rope.routes} == {("float32", "forward_cpu")}
    assert rope.decision(positions, query=query).dtype == "float32"


def test_d4_wrapped_tensors_run_native() -> None:
    op = RMSNorm(4).requires_grad_(False)
    op(X)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.empty(3, 4)
        assert op(fake).shape == (3, 4)
        assert "without memory" in op.decision(fake).why
    assert op.decision(X).method == "forward_cpu"


# -- D5: requirements ------------------------------------------------------------------------------------------------


def particular(**needs: Any) -> Any:
    cls = op_class("forward_native", class_name="Particular")
    cls.forward_cpu = requires(**needs)(says("forward_cpu"))
    return cls


REFUSALS = {
    "dtype": ({"dtypes": (torch.float32,)}, X.half(), "takes float32; the input is float16"),
    "instruction set": ({"isa": "sve2 | amx_fp4"}, X, "needs sve2 or amx_fp4; this processor has"),
    "the call": (
        {"when": lambda self, x: None if x.is_contiguous() else "takes contiguous rows"},
        X.t(),
        "takes contig",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_d5_refused_calls_run_the_next_and_are_counted(case: str) -> None:
    needs, x, sentence = REFUSALS[case]
    op = particular(**needs)()
    assert [op(x) for _ in range(3)] == ["forward_native"] * 3
    refusals = {why: n for route in op.routes for why, n in route.refusals.items()}
    assert list(refusals.values()) == [3]
    assert sentence in next(iter(refusals))
    assert sentence in str(op.decision(x))


@pytest.mark.parametrize("case", REFUSALS)
def test_d5_strict_raises(case: str) -> None:
    needs, x, sentence = REFUSALS[case]
    with opmux.use_config(opmux.CompilationConfig(strict=True)):
        op = particular(**needs)()
        native = op_class("forward_native")()
    for _ in range(2):
        with pytest.raises(KernelRefusedError, match=r"Particular.forward_cpu cannot take this call.*-Particular") as e:
            op(x)
        assert sentence in str(e.value)
    assert native(x) == "forward_native", "an op without a kernel is refused by nobody"
    op.redispatch(opmux.CompilationConfig(strict=False))
    assert op(x) == "forward_native"


def test_d5_strict_leaves_gradients_alone() -> None:
    with opmux.use_config(opmux.CompilationConfig(strict=True)):
        op = SiluAndMul()
    assert op(X.clone().requires_grad_(True)).requires_grad


def test_d5_missing_tools_and_capability() -> None:
    cls = op_class("forward_native")
    cls.forward_cuda = requires(triton=True, capability=(9, 0))(says("forward_cuda"))
    cls.forward_cpu = requires(native_library=True)(says("forward_cpu"))
    cls.forward_tpu = requires(pallas=True)(says("forward_tpu"))
    for place, sentence in (
        (Facts("cuda", "cuda", "cuda", capability=(8, 6)), "needs compute capability 9.0; the device has 8.6"),
        (Facts("cuda", "cuda", "cuda", triton="it is not installed"), "needs Triton: it is not installed"),
        (Facts("cpu", "cpu", "cpu", native_library="no compiler"), "needs the compiled CPU library: no compiler"),
        (Facts("tpu", "tpu", "xla", pallas="no jax"), "needs JAX with Pallas: no jax"),
    ):
        made = decide(on_cpu(cls), place, ON)
        assert made.method == "forward_native"
        assert made.rejected[0].why == made.refused[0].why == sentence
    assert decide(on_cpu(cls), Facts("cuda", "cuda", "cuda", capability=(9, 0)), ON).method == "forward_cuda"


def test_d5_without_native_the_refusal_is_the_error() -> None:
    cls = op_class(class_name="KernelOnly")
    cls.forward_cpu = requires(when=lambda self, x: "takes odd things")(says("forward_cpu"))
    with pytest.raises(
        NotImplementedError, match=r"KernelOnly: forward_cpu cannot take this call \(it takes odd things"
    ):
        cls()(X)


def test_d5_the_chain_goes_on_with_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = op_class("forward_native", "forward_cuda")
    cls.forward_hip = requires(when=lambda self, x: "takes one row")(says("forward_hip"))
    monkeypatch.setenv("OPMUX_PLATFORM", "rocm")
    assert cls()(X) == "forward_cuda"


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        ({"dtypes": torch.float32}, "tuple of dtypes"),
        ({"dtypes": ("float32",)}, "tuple of dtypes"),
        ({"capability": 8.0}, "major, minor"),
        ({"when": "never"}, "function"),
    ],
)
def test_d5_requirements_are_checked(needs: dict[str, Any], words: str) -> None:
    with pytest.raises(RegistrationError, match=words):
        requires(**needs)


# -- D6: gradients ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["input", "keyword", "weight"])
def test_d6_gradients_equal_native(what: str) -> None:
    x, residual = torch.randn(3, 4), torch.randn(3, 4)
    op = RMSNorm(4).requires_grad_(what == "weight")
    x.requires_grad_(what == "input")
    residual.requires_grad_(what == "keyword")
    wanted = {"input": x, "keyword": residual, "weight": op.weight}[what]
    out = op(x, residual=residual)[0]
    (got,) = torch.autograd.grad(out.square().sum(), wanted)
    (ref,) = torch.autograd.grad(op.forward_native(x, residual)[0].square().sum(), wanted)
    torch.testing.assert_close(got, ref)
    assert "an input needs a gradient" in str(op.decision(x, residual=residual))
    assert sum(r.calls for r in op.routes) == 0
    with torch.no_grad():
        op(x, residual)
        assert op.decision(x).method == "forward_cpu"
    with torch.inference_mode():
        op(x, residual)
    assert sum(r.calls for r in op.routes) == 2


def test_d6_gradient_inside_lists_and_modules() -> None:
    op = op_class("forward_native", "forward_cpu")()
    leaf = X.clone().requires_grad_(True)
    for other in ([leaf], {"a": leaf}, (1, [leaf]), nn.Linear(2, 2)):
        assert op(X, other) == "forward_native"
    assert op(X, nn.Linear(2, 2).requires_grad_(False)) == "forward_cpu"


def test_d6_forward_mode() -> None:
    op = SiluAndMul()
    x, tangent = torch.randn(2, 8), torch.randn(2, 8)
    with torch.no_grad(), forward_ad.dual_level():
        got = forward_ad.unpack_dual(op(forward_ad.make_dual(x, tangent))).tangent
    assert got is not None
    _, ref = torch.func.jvp(op.forward_native, (x,), (tangent,))
    torch.testing.assert_close(got, ref)
    torch.testing.assert_close(torch.func.jvp(op, (x,), (tangent,))[1], ref)
    torch.testing.assert_close(
        torch.func.grad(lambda x: op(x).sum())(x), torch.func.grad(lambda x: op.forward_native(x).sum())(x)
    )


def test_d6_a_kernel_that_declares_a_backward() -> None:
    cls = op_class("forward_native", class_name="Differentiable")
    cls.forward_cpu = requires(differentiable=True)(says("forward_cpu"))
    assert cls()(X.clone().requires_grad_(True)) == "forward_cpu"
    cls = op_class("forward_native")
    cls.forward_hip = says("forward_hip")
    cls.forward_cuda = requires(differentiable=True)(says("forward_cuda"))
    made = decide(on_cpu(cls), facts("rocm"), ON, needs_grad=True)
    assert made.method == "forward_cuda"


def test_d6_no_native_to_fall_to() -> None:
    op = op_class("forward_cpu", class_name="KernelOnly")()
    with pytest.raises(NotImplementedError, match=r"KernelOnly: forward_cpu cannot .*needs a gradient"):
        op(X.clone().requires_grad_(True))


def test_d6_a_kernel_pinned_by_hand() -> None:
    op = RMSNorm(4).requires_grad_()
    op._forward_method = op.forward_cpu
    assert op(X).requires_grad, "one of the op's own kernels is not differentiable for being pinned"
    op._forward_method = lambda x: x * 2
    assert torch.equal(op(X), X * 2)
    assert "assigned by hand" in " ".join(op.decision(X).notes)
    op._forward_method = None
    assert op(X).requires_grad


def test_d8_arguments_that_are_no_tensors() -> None:
    op = op_class("forward_native", "forward_cpu")()
    assert op(3) == op([]) == op(None) == op("x") == "forward_cpu"
    assert op(x=3) == "forward_cpu"


# -- out-of-tree replacements ----------------------------------------------------------------------------------------


def vendor_silu() -> Any:
    return type("VendorSilu", (SiluAndMul,), {"forward_oot": lambda self, x: "oot", "__module__": __name__})


@pytest.mark.parametrize("platform", ["", "oot", "cuda"])
@pytest.mark.parametrize("name", ["silu_and_mul", "SiluAndMul"])
def test_x1_directives_reach_replacements(platform: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPMUX_PLATFORM", platform)
    SiluAndMul.register_oot(vendor_silu())
    for directives, wanted in ((f"none,+{name}", True), (f"all,-{name}", False), ("all", True), ("none", False)):
        with opmux.use_config(opmux.CompilationConfig(custom_ops=directives)):
            op = SiluAndMul()
        assert (isinstance(op(X), str)) is wanted
        record = op.decision(X)
        assert record.method == ("forward_oot" if wanted else "forward_native")
        assert record.op == "silu_and_mul"
        assert "out-of-tree replacement" in record.class_why


def test_replacement_with_forward_oot_runs_on_the_cpu_and_subclasses_inherit() -> None:
    cls = SiluAndMul.register_oot(vendor_silu())
    assert SiluAndMul()(X) == "oot"
    derived = type("Derived", (cls,), {"__module__": __name__})
    assert derived()(X) == "oot"
    assert opmux.explain("silu_and_mul").method == "forward_oot"
    assert opmux.explain("silu_and_mul", platform="cuda").method == "forward_oot"


def test_forward_oot_of_an_in_tree_class_waits_for_an_oot_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = op_class("forward_native", "forward_oot")
    assert cls()(X) == "forward_native"
    monkeypatch.setenv("OPMUX_PLATFORM", "oot")
    assert cls()(X) == "forward_oot"
    assert platforms.current().platform.name == "oot"


def test_explain_by_name_class_and_platform() -> None:
    assert opmux.explain("rms_norm") == opmux.explain("RMSNorm") == opmux.explain(RMSNorm)
    assert opmux.explain("rms_norm", platform="cuda").method == "forward_cuda"
    assert opmux.explain("rms_norm", dtype=torch.float64).method == "forward_native"
    assert not opmux.explain("rms_norm", config=opmux.CompilationConfig(custom_ops="none")).enabled
    with pytest.raises(RegistrationError, match="Did you mean 'rms_norm'"):
        opmux.explain("rms_nrom")
    for bad in (3, None, object, RMSNorm(4)):
        with pytest.raises(UsageError, match=r"explain takes an op's name or class"):
            opmux.explain(bad)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"explain got dtype='float32'.*torch.bfloat16"):
        opmux.explain("rms_norm", dtype="float32")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"explain got config=.*CompilationConfig\(custom_ops"):
        opmux.explain("rms_norm", config=["none"])  # type: ignore[arg-type]
    for wrong in (3, ["cuda"], RMSNorm):
        with pytest.raises(PlatformError, match="There is no platform"):
            opmux.explain("rms_norm", platform=wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="redispatch takes a CompilationConfig"):
        RMSNorm(4).redispatch(["none"])  # type: ignore[arg-type]

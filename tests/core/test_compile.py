"""Ops in compiled code: D7 (zero graph breaks, zero recompiles), C10, and the case B56."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import opmux
from opmux.core.custom_op import CustomOp
from opmux.core.errors import KernelRefusedError
from opmux.core.requires import requires
from opmux.core.torch_library import opaque
from opmux.ops import RMSNorm, SiluAndMul


@opaque(fake=lambda x: torch.empty_like(x))
def compile_probe_kernel(x: Tensor) -> Tensor:
    return x.clone() * 2


class Probe(CustomOp):
    """Native adds one, the kernel doubles: the answer says which ran."""

    def forward_native(self, x: Tensor) -> Tensor:
        return x + 1

    @requires(dtypes=(torch.float32,), when=lambda self, x: None if x.shape[-1] == 4 else "takes rows of 4")
    def forward_cpu(self, x: Tensor) -> Tensor:
        return compile_probe_kernel(x)


X = torch.full((2, 4), 5.0)
NATIVE, KERNEL = 6.0, 10.0


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Graphs:
    """A backend that keeps the graphs it was given: one a compilation, more than one a call if the graph broke."""

    def __init__(self) -> None:
        self.modules: list[torch.fx.GraphModule] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.modules.append(module)
        return module.forward

    def calls(self, word: str) -> int:
        return sum(word in str(node.target) for module in self.modules for node in module.graph.nodes)

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, backend=self, fullgraph=True, dynamic=True)


class Block(nn.Module):
    """The two catalogue ops of a decoder layer's MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(8)
        self.act = SiluAndMul()

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        y, residual = self.norm(x, residual)
        return self.act(y), residual


@torch.no_grad()
def test_d7_no_graph_breaks_and_no_recompiles() -> None:
    model, graphs = Block(), Graphs()
    compiled = graphs.compile(model)
    for rows in (3, 5, 17, 64, 2):
        x, residual = torch.randn(rows, 8), torch.randn(rows, 8)
        for got, want in zip(compiled(x, residual), model(x, residual), strict=True):
            torch.testing.assert_close(got, want)
    assert len(graphs.modules) == 1
    assert graphs.calls("opmux.") == 2, "one opaque op each"
    assert graphs.calls("rsqrt") == 0


@torch.no_grad()
def test_d7_aot_eager() -> None:
    model = Block()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (3, 5, 17):
            x, residual = torch.randn(rows, 8), torch.randn(rows, 8)
            torch.testing.assert_close(compiled(x, residual), model(x, residual))


@torch.no_grad()
def test_d7_an_op_compiled_by_itself() -> None:
    op = Probe()
    assert torch.compile(op, backend="eager", fullgraph=True)(X)[0, 0] == KERNEL
    op.compile(backend="eager", fullgraph=True)
    assert op(X)[0, 0] == KERNEL
    assert op._compiled_call_impl is not None


@torch.no_grad()
def test_c10_disabled_ops_are_traced_natively() -> None:
    graphs = Graphs()
    with opmux.use_config(opmux.CompilationConfig(backend="inductor", mode=1, custom_ops=["+silu_and_mul"])):
        model = Block()
    compiled = graphs.compile(model)
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    torch.testing.assert_close(compiled(x, residual), model(x, residual))
    assert graphs.calls("rsqrt") == 1
    assert graphs.calls("opmux.") == 1


@torch.no_grad()
def test_c10_compile_native_outside_compiled_code() -> None:
    class Native(Probe):
        def __init__(self) -> None:
            super().__init__(compile_native=True)

    with opmux.use_config(opmux.CompilationConfig(custom_ops="none", backend="aot_eager", mode=1)):
        op, plain = Native(), Probe()
    assert op(X)[0, 0] == plain(X)[0, 0] == NATIVE
    assert op.routes[0].method is op._compiled_native
    assert plain.routes[0].method == plain.forward_native
    assert op.routes[0].differentiable


@torch.no_grad()
def test_compiled_calls_fall_back_like_eager_ones() -> None:
    op = Probe()
    compiled = torch.compile(op, backend="eager", fullgraph=True)
    for x in (X, X.double(), X[:, :3], X[:1]):
        torch.testing.assert_close(compiled(x), op(x))


@torch.no_grad()
def test_compiled_calls_are_strict_too() -> None:
    with opmux.use_config(opmux.CompilationConfig(strict=True)):
        op = Probe()
    compiled = torch.compile(op, backend="eager")
    for x, words in ((X[:, :3].contiguous(), "takes rows of 4"), (X.double(), "takes float32")):
        with pytest.raises(KernelRefusedError, match=words):
            op(x)
        with pytest.raises(KernelRefusedError, match=words):
            compiled(x)
    assert compiled(X)[0, 0] == KERNEL


def test_compiled_gradients() -> None:
    op = Probe()
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
    x = X.clone().requires_grad_(True)
    out = compiled(x)
    assert out[0, 0] == NATIVE
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.ones_like(x))
    with torch.no_grad():
        assert compiled(x)[0, 0] == KERNEL


@torch.no_grad()
def test_compiled_calls_of_two_devices_are_refused() -> None:
    op = RMSNorm(8)
    op.weight = nn.Parameter(torch.ones(8, device="meta"))
    with pytest.raises(Exception, match=r"two devices|meta"):
        torch.compile(op, backend="eager", fullgraph=True)(torch.ones(2, 8))


@torch.no_grad()
def test_d3_overrides_hold_in_compiled_code() -> None:
    class Overriding(Probe):
        def dispatch_forward(self, decision: Any) -> Any:
            return self.triple

        def triple(self, x: Tensor) -> Tensor:
            return x * 3

    op = Overriding()
    assert torch.compile(op, backend="eager", fullgraph=True)(X)[0, 0] == op(X)[0, 0] == 15


# -- B56 -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_b56_redispatch_takes_effect_and_flipping_does_not_recompile_without_end() -> None:
    op, graphs = Probe(), Graphs()
    compiled = graphs.compile(op)
    on, off = opmux.CompilationConfig(custom_ops="all"), opmux.CompilationConfig(custom_ops="none")
    compiled(X)
    for flip in range(12):
        op.redispatch(off if flip % 2 == 0 else on)
        wanted = NATIVE if flip % 2 == 0 else KERNEL
        assert compiled(X)[0, 0] == op(X)[0, 0] == wanted
        assert len(graphs.modules) == 2, f"after flip {flip}"


@torch.no_grad()
def test_b56_oot_registration_leaves_built_objects() -> None:
    op, graphs = Probe(), Graphs()
    CustomOp.register("compile_probe")(Probe)
    compiled = graphs.compile(op)
    compiled(X)

    @Probe.register_oot
    class Vendor(Probe):
        def forward_oot(self, x: Tensor) -> Tensor:
            return x * 0

    assert compiled(X)[0, 0] == op(X)[0, 0] == KERNEL
    assert op.decision(X).class_why.startswith("built before")
    fresh = Probe()
    assert graphs.compile(fresh)(X)[0, 0] == fresh(X)[0, 0] == 0


@torch.no_grad()
def test_b56_a_method_assigned_by_hand() -> None:
    op, graphs = Probe(), Graphs()
    compiled = graphs.compile(op)
    assert compiled(X)[0, 0] == KERNEL
    op._forward_method = op.forward_native
    assert compiled(X)[0, 0] == op(X)[0, 0] == NATIVE
    op._forward_method = None
    assert compiled(X)[0, 0] == op(X)[0, 0] == KERNEL
    assert len(graphs.modules) <= 3


@torch.no_grad()
def test_b56_a_context_around_the_call_changes_nothing() -> None:
    op, graphs = Probe(), Graphs()
    compiled = graphs.compile(op)
    compiled(X)
    with opmux.use_config(opmux.CompilationConfig(custom_ops="none")):
        assert compiled(X)[0, 0] == op(X)[0, 0] == KERNEL
    assert len(graphs.modules) == 1


@torch.no_grad()
def test_b56_ops_of_two_configs_in_one_graph() -> None:
    first = Probe()
    with opmux.use_config(opmux.CompilationConfig(custom_ops="none")):
        second = Probe()
    model = nn.Sequential(first, second)
    assert torch.compile(model, backend="eager", fullgraph=True)(X)[0, 0] == model(X)[0, 0] == 11


@torch.no_grad()
def test_traced_without_the_compiler() -> None:
    """make_fx, export and dispatch modes see the opaque op, not an empty tensor that something filled unseen."""
    model = SiluAndMul()
    x, other = torch.randn(2, 8), torch.randn(2, 8)
    graph = make_fx(model)(x)
    exported = torch.export.export(model, (x,)).module()
    for traced in (graph, exported):
        assert any("opmux." in str(node.target) for node in traced.graph.nodes)
        torch.testing.assert_close(traced(other), model(other))


def test_opaque_ops_pass_opcheck() -> None:
    op = torch.ops.opmux.compile_probe_kernel.default
    torch.library.opcheck(op, (torch.randn(3, 4),))

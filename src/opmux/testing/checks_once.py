"""Checks that need one case only: compilation, gradients, and the kernels as operators of torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.torch_library import NAMESPACE
from .checks import refusal
from .subject import Failure, Subject
from .tensors import same_bits, tensors

# Without the test of aot_dispatch: compiling the op itself covers it, on inputs that the op really gets.
_OPCHECKS = ("test_schema", "test_faketensor")


def check_compiled(subject: Subject) -> list[Failure]:
    """One graph without breaks, with the kernel inside as an opaque op, equal to eager bit for bit."""
    op, args = subject.build()
    if refusal(op, subject.method, args) is not None:
        return []
    if op.decision(*args).method != subject.method:
        op._forward_method = getattr(op, subject.method)  # else the compiled code would take the dispatcher's choice
    # Every op shares CustomOp.__call__, and with it the compiler's limit of versions of one function.
    torch.compiler.reset()
    try:
        with torch.no_grad():
            eager = [t.clone() for t in subject.results(op(*args), args)]
            args = subject.build()[1] if subject.cls.mutates else args
            compiled = subject.results(
                torch.compile(op, fullgraph=True, dynamic=True, backend="aot_eager")(*args), args
            )
    except Exception as error:  # the compiler has many kinds
        first_line = str(error).strip().partition("\n")[0]
        return [Failure(subject, "compiled", f"torch.compile(fullgraph=True) raised {type(error).__name__}: {first_line}")]
    finally:
        torch.compiler.reset()
    wrong = [n for n, (a, b) in enumerate(zip(compiled, eager, strict=True)) if not same_bits(a, b)]
    return [Failure(subject, "compiled", f"output {n} of the compiled op differs from the eager one") for n in wrong]


def check_gradients(subject: Subject) -> list[Failure]:
    """A call that needs a gradient gives native's gradients, whatever serves the others."""
    ours, native = (_gradients(subject, native=native) for native in (False, True))
    for number, (got, want) in enumerate(zip(ours, native, strict=True)):
        if (got is None) != (want is None):
            return [Failure(subject, "gradients", f"gradient {number} is there on one side only")]
        if got is not None and want is not None and not same_bits(got, want):
            return [Failure(subject, "gradients", f"gradient {number} differs from the definition's")]
    return []


def _gradients(subject: Subject, *, native: bool) -> list[Tensor | None]:
    """Of the sum of all outputs, for every floating argument and parameter."""
    op, args = subject.build()
    written = {id(t) for t in subject.written(args)}
    leaves = [t.requires_grad_() for t in tensors(args) if t.is_floating_point() and id(t) not in written]
    for module in (op, *(a for a in args if isinstance(a, nn.Module))):
        leaves += [p.requires_grad_() for p in module.parameters() if p.is_floating_point()]
    out = tensors(subject.cls.forward_native(op, *args) if native else op(*args))
    sums = [t.float().sum() for t in out if t.requires_grad]
    if not sums or not leaves:
        return []
    return list(torch.autograd.grad(torch.stack(sums).sum(), leaves, allow_unused=True))


def check_operators(subject: Subject) -> list[Failure]:
    """``torch.library.opcheck`` of every opaque op that the method calls: its schema and its fake kernel."""
    op, args = subject.build()
    if refusal(op, subject.method, args) is not None:
        return []
    recorder = _Recorder()
    with torch.no_grad(), recorder:
        getattr(op, subject.method)(*args)
    failures = []
    for kernel, kernel_args, kernel_kwargs in recorder.calls.values():
        try:
            torch.library.opcheck(kernel, kernel_args, kernel_kwargs, test_utils=_OPCHECKS)
        except Exception as error:  # opcheck raises what the failing test raised
            what = " ".join(str(error).split())
            failures.append(Failure(subject, "opcheck", f"{kernel}: {what[:300]}"))
    return failures


class _Recorder(TorchDispatchMode):
    """Notes the first call of every opaque op of opmux; while any dispatch mode is active they go through torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.namespace == NAMESPACE:
            self.calls.setdefault(func, (func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

"""verify finds what it is there to find: each kind of mistake, planted in an op of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from opmux import CustomOp
from opmux.core.cases import FLOATS, Case, Cost, Tolerance
from opmux.core.errors import UsageError
from opmux.core.requires import requires
from opmux.core.torch_library import opaque
from opmux.testing import Plan, Report, verify
from opmux.testing.guards import GUARD_BYTES, Guarded
from opmux.testing.tensors import LAYOUTS, first_difference, same_bits

Kernel = Callable[[Tensor], Tensor]
PLACES = 7 * 5


def right(x: Tensor) -> Tensor:
    out = torch.empty_like(x.contiguous())
    return out.copy_((x.float() * 2).to(x.dtype))


def cases() -> Iterator[Case]:
    yield Case("T=7 H=5", {}, lambda i: (i.randn(7, 5),), {"T": 7, "H": 5})
    yield Case("T=0 H=5", {}, lambda i: (i.randn(0, 5),), {"T": 0, "H": 5})
    yield Case("T=7 H=50", {}, lambda i: (i.randn(7, 50),), {"T": 7, "H": 50})


def op_with(kernel: Kernel) -> type:
    @CustomOp.register("twice")
    class Twice(CustomOp):
        tolerance = Tolerance(ulp=1.0, fp32=2.0)

        def forward_native(self, x: Tensor) -> Tensor:
            return (x.double() * 2).to(x.dtype)

        @requires(dtypes=FLOATS)
        def forward_cpu(self, x: Tensor) -> Tensor:
            return kernel(x)

        @classmethod
        def cases(cls) -> Iterator[Case]:
            yield from cases()

        @classmethod
        def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
            return Cost(2 * dtype.itemsize * case.dims["T"] * case.dims["H"])

    return Twice


def report_of(kernel: Kernel, **options: Any) -> Report:
    op_with(kernel)
    return verify(Plan(ops=["twice"], **{"dtypes": (torch.float32,), **options}))


def test_a_right_kernel_passes() -> None:
    report = report_of(right, dtypes=None)
    assert not report.failures
    assert [(row.method, row.dtype, row.cases) for row in report.rows] == [("forward_cpu", d, 3) for d in FLOATS]
    assert report.to_dict()["passed"]


def wrong_element(x: Tensor) -> Tensor:
    out = right(x)
    if x.shape == (7, 5):
        out[3, 2] = 7.0
    return out


def unwritten(x: Tensor) -> Tensor:
    out = torch.empty_like(x.contiguous())
    out[:-1] = 2 * x[:-1]
    return out


def behind(x: Tensor) -> Tensor:
    out = right(x)
    if out.untyped_storage().nbytes() > out.nbytes:  # else the write would hit what belongs to others
        out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(0.0)
    return out


def before(x: Tensor) -> Tensor:
    out = right(x)
    if out.storage_offset():
        out.as_strided((1,), (1,), out.storage_offset() - 1).fill_(0.0)
    return out


def writes_input(x: Tensor) -> Tensor:
    out = right(x)
    x.zero_()
    return out


def aliases(x: Tensor) -> Tensor:
    return x.mul_(2)


def ignores_strides(x: Tensor) -> Tensor:
    dense = x.as_strided(x.shape, (x.shape[1], 1))
    return right(dense)


def wrong_dtype(x: Tensor) -> Tensor:
    return right(x).half()


def raises(x: Tensor) -> Tensor:
    raise RuntimeError("out of registers")


def breaks_graphs(x: Tensor) -> Tensor:
    if float(x.sum()) == 12345.0:
        return x
    return right(x)


_calls = 0


def differs_on_repeat(x: Tensor) -> Tensor:
    global _calls
    _calls += 1
    return torch.nextafter(right(x), torch.full((), float(1e9 if _calls % 2 else -1e9)))


@pytest.mark.parametrize(
    ("kernel", "check"),
    [
        (wrong_element, "numbers"),
        (unwritten, "numbers"),
        (behind, "guards"),
        (before, "guards"),
        (writes_input, "inputs"),
        (aliases, "aliasing"),
        (ignores_strides, "strided inputs"),
        (ignores_strides, "transposed inputs"),
        (wrong_dtype, "numbers"),
        (raises, "runs"),
        (breaks_graphs, "compiled"),
        (differs_on_repeat, "repeat"),
    ],
)
def test_a_mistake_is_found(kernel: Kernel, check: str) -> None:
    assert check in {failure.check for failure in report_of(kernel).failures}


def test_the_first_bad_element_and_its_replay() -> None:
    [failure] = [f for f in report_of(wrong_element, seed=3).failures if f.check == "numbers"]
    assert failure.element is not None
    assert (failure.element.index, failure.element.got) == ((3, 2), 7.0)
    assert failure.subject.replay() == (
        "opmux verify twice --cases 'T=7 H=5' --dtype float32 --seed 3 --method forward_cpu"
    )
    again = verify(Plan(["twice"], dtypes=(torch.float32,), cases="T=7 H=5", seed=3, method="forward_cpu"))
    assert [f.element for f in again.failures if f.check == "numbers"] == [failure.element]
    assert again.rows[0].cases == 1  # the case of that name, not also the one whose name begins so


def wrong_fake(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape, 1))


@opaque(fake=wrong_fake)
def twice_with_a_wrong_fake(x: Tensor) -> Tensor:
    return right(x)


def test_a_fake_kernel_that_is_wrong_is_found() -> None:
    assert "opcheck" in {failure.check for failure in report_of(twice_with_a_wrong_fake).failures}


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return right(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad


def test_a_gradient_that_is_wrong_is_found() -> None:
    cls: Any = op_with(_WrongGradient.apply)
    cls.forward_cpu = requires(differentiable=True)(lambda self, x: _WrongGradient.apply(x))
    report = verify(Plan(["twice"], dtypes=(torch.float32,)))
    assert "gradients" in {failure.check for failure in report.failures}


def test_a_refused_call_is_counted_with_its_sentence() -> None:
    cls: Any = op_with(right)
    cls.forward_cpu = requires(when=lambda self, x: "takes no wide rows" if x.shape[1] > 9 else None)(cls.forward_cpu)
    [row] = verify(Plan(["twice"], dtypes=(torch.float32,))).rows
    assert (row.cases, dict(row.skipped)) == (2, {"refused: takes no wide rows": 1})


def test_a_replacement_is_checked_against_the_definition() -> None:
    cls: Any = op_with(right)

    class Vendor(cls):
        def forward_oot(self, x: Tensor) -> Tensor:
            return wrong_element(x)

    CustomOp.register_oot(_decorated_op_cls=Vendor, name="twice")
    report = verify(Plan(["twice"], dtypes=(torch.float32,)))
    assert {(row.method, bool(row.failures)) for row in report.rows} == {("forward_oot", True), ("forward_cpu", False)}


def test_what_cannot_run_here_says_why() -> None:
    [row] = verify(Plan(["rms_norm"], platform="cuda", quick=True)).rows
    assert row.cases == 0
    assert "this process has no cuda hardware" in str(row.why_not)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cases": "T=7 H=4"}, "Did you mean 'T=7 H=5'"),
        ({"method": "forward_cpx"}, "Did you mean 'forward_cpu'"),
    ],
)
def test_what_does_not_exist_is_an_error(options: dict[str, str], message: str) -> None:
    op_with(right)
    with pytest.raises(UsageError, match=message):
        verify(Plan(["twice"], **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.int64])
def test_guarded_memory(dtype: torch.dtype) -> None:
    x = torch.zeros(3, 4, dtype=dtype)
    memory = Guarded()
    with memory:
        made = [
            torch.empty(3, 4, dtype=dtype),
            torch.empty((3, 4), dtype=dtype, device="cpu"),
            torch.empty_like(x),
            torch.empty_like(x.t()),
            torch.empty_like(x[:1].expand(3, 4)),
            x.new_empty((3, 4)),
            x.new_empty(0, 4),
            torch.empty_strided((3, 4), (5, 1), dtype=dtype),
        ]
        plain = [torch.zeros(3), torch.empty(3, device="meta")]
    assert not any(t.isnan().any() for t in plain if t.device.type == "cpu")
    assert made[3].stride() == x.t().stride()
    for tensor in made:
        assert tensor.dtype == dtype
        assert bool(tensor.float().isnan().all() if dtype.is_floating_point else (tensor == -1).all())
    assert memory.damage() is None
    made[0].view(torch.uint8).as_strided((1,), (1,), GUARD_BYTES + made[0].nbytes).fill_(0)
    assert "behind" in str(memory.damage())


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("x", [torch.randn(3, 4), torch.arange(6), torch.tensor(2.0), torch.ones(2, 3, dtype=torch.bool)])
def test_layouts_keep_values(layout: Any, x: Tensor) -> None:
    assert torch.equal(layout(x), x)


def test_bits_tell_zeros_apart() -> None:
    zero = torch.zeros(2, 3)
    other = zero.clone()
    other[1, 2] = -0.0
    assert torch.equal(zero, other)
    assert not same_bits(zero, other)
    assert first_difference(zero, other) == (1, 2)
    assert same_bits(torch.full((1,), float("nan")).expand(1), torch.full((1,), float("nan")))


def op_with_state(kernel: Callable[[Tensor, Tensor], Tensor], writes: tuple[str, ...] = ("state",)) -> type:
    @CustomOp.register("twice")
    class Twice(CustomOp):
        """Adds x to a state and returns the sum."""

        mutates = writes
        tolerance = Tolerance(ulp=1.0, fp32=2.0)

        def forward_native(self, x: Tensor, state: Tensor) -> Tensor:
            state += x.detach()
            return state + (x - x.detach())

        @requires(dtypes=FLOATS)
        def forward_cpu(self, x: Tensor, state: Tensor) -> Tensor:
            return kernel(x, state)

        @classmethod
        def cases(cls) -> Iterator[Case]:
            yield Case("T=7", {}, lambda i: (i.randn(7, 5), i.randn(7, 5, shift=1.0)), {})

        @classmethod
        def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
            return Cost(35 * dtype.itemsize)

    return Twice


def added(x: Tensor, state: Tensor) -> Tensor:
    return state.copy_((state.float() + x.float()).to(x.dtype)).clone()


def test_a_state_is_an_output_where_the_op_says_that_it_writes_it() -> None:
    op_with_state(added)
    report = verify(Plan(ops=["twice"], dtypes=(torch.float32,)))
    assert report.checked == 1
    assert not report.failures, report.failures


@pytest.mark.parametrize(
    ("kernel", "writes", "check"),
    [
        (lambda x, state: (state.float() + x.float()).to(x.dtype), ("state",), "numbers"),  # forgets the state
        (added, (), "inputs"),  # writes what it does not state
    ],
)
def test_a_state_that_is_wrong_shows(kernel: Any, writes: tuple[str, ...], check: str) -> None:
    op_with_state(kernel, writes)
    report = verify(Plan(ops=["twice"], dtypes=(torch.float32,)))
    assert check in {failure.check for failure in report.failures}

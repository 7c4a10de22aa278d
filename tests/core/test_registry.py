"""Contract section 1: the registries (R1-R10), and the cases B07, B37, B47, X2, X3."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import importlib.util
import itertools
import pickle
import sys
from inspect import Parameter, Signature
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import opmux
from opmux.core import custom_op, registry, torch_library
from opmux.core.custom_op import CustomOp
from opmux.core.errors import RegistrationError
from opmux.core.torch_library import opaque
from opmux.ops import RMSNorm, SiluAndMul


class VendorNorm(RMSNorm):
    """At module level, so that it pickles."""

    def forward_oot(self, x: Tensor, residual: Tensor | None = None) -> Any:
        return self.forward_native(x, residual) * 2


class MyNorm(RMSNorm):
    """An in-tree subclass that nobody registered."""


def test_r1_two_dictionaries() -> None:
    assert CustomOp.op_registry["rms_norm"] is RMSNorm
    assert CustomOp.op_registry_oot.get("RMSNorm") is None
    CustomOp.register_oot("RMSNorm")(VendorNorm)
    assert dict(CustomOp.op_registry_oot) == {"RMSNorm": VendorNorm}
    assert "rms_norm" in CustomOp.op_registry
    assert len(list(CustomOp.op_registry.items())) == len(CustomOp.op_registry)


def test_r1_what_a_caller_removes_is_gone() -> None:
    CustomOp.register_oot("RMSNorm")(VendorNorm)
    CustomOp.op_registry_oot.clear()
    assert type(RMSNorm(4)) is RMSNorm
    assert opmux.explain("rms_norm").cls == "RMSNorm"


def test_r2_register_adds_and_names() -> None:
    @CustomOp.register("probe_op")
    class Probe(CustomOp):
        def forward_native(self, x: Tensor) -> Tensor:
            return x + 1

    assert CustomOp.op_registry["probe_op"] is Probe
    assert Probe.name == "probe_op"
    assert Probe()(torch.zeros(1)).item() == 1


FORMS = {
    "positional string": lambda v: CustomOp.register_oot("RMSNorm")(v),
    "keyword": lambda v: CustomOp.register_oot(name="RMSNorm")(v),
    "bare on the class": lambda v: RMSNorm.register_oot(v),
    "called on the class": lambda v: RMSNorm.register_oot()(v),
    "function call": lambda v: CustomOp.register_oot(_decorated_op_cls=v, name="RMSNorm"),
    "registered name": lambda v: CustomOp.register_oot("rms_norm")(v),
    "registered name, keyword": lambda v: CustomOp.register_oot(name="rms_norm")(v),
    "registered name, function call": lambda v: CustomOp.register_oot(_decorated_op_cls=v, name="rms_norm"),
}


@pytest.mark.parametrize("form", FORMS)
def test_r3_every_form_registers_alike(form: str) -> None:
    assert FORMS[form](VendorNorm) is VendorNorm
    assert dict(CustomOp.op_registry_oot) == {"RMSNorm": VendorNorm}
    assert type(RMSNorm(4)) is VendorNorm


def test_r4_bulk() -> None:
    class VendorSilu(SiluAndMul):
        pass

    for name, cls in {"RMSNorm": VendorNorm, "silu_and_mul": VendorSilu}.items():
        CustomOp.register_oot(_decorated_op_cls=cls, name=name)
    assert dict(CustomOp.op_registry_oot) == {"RMSNorm": VendorNorm, "SiluAndMul": VendorSilu}
    assert type(SiluAndMul()) is VendorSilu


def test_r5_construction_runs_the_replacement() -> None:
    @RMSNorm.register_oot
    class Doubling(RMSNorm):
        def __init__(self, hidden_size: int, eps: float = 1e-6, **more: Any) -> None:
            super().__init__(hidden_size * 2, eps=eps * 10, **more)
            self.seen = (hidden_size, eps, more)

    op = RMSNorm(4, eps=0.5, has_weight=False)
    assert type(op) is Doubling
    assert isinstance(op, RMSNorm)
    assert op.seen == (4, 0.5, {"has_weight": False})
    assert op.hidden_size == 8
    assert op.eps == 5.0
    assert op.weight is None


def test_r5_construction_that_fails_leaves_nothing() -> None:
    config = opmux.CompilationConfig(custom_ops=["all"])
    with opmux.use_config(config), pytest.raises(ValueError, match="var_hidden_size is 9"):
        RMSNorm(4, var_hidden_size=9)
    assert not config.enabled_custom_ops
    assert not config.disabled_custom_ops
    with opmux.use_config(config):
        RMSNorm(4)
    assert config.enabled_custom_ops == {"rms_norm": 1}


# -- R6: registration is strict --------------------------------------------------------------------------------------


def native(self: Any, x: Tensor) -> Tensor:
    return x


def new_op(class_name: str, **body: Any) -> type:
    return type(class_name, (CustomOp,), {"forward_native": native, "__module__": __name__, **body})


def test_r6_a_name_used_twice() -> None:
    CustomOp.register("probe_op")(new_op("One"))
    with pytest.raises(RegistrationError, match=r"'probe_op' is taken by .*One.*Two needs another name"):
        CustomOp.register("probe_op")(new_op("Two"))
    assert CustomOp.op_registry["probe_op"].__name__ == "One"


def test_r6_two_classes_of_one_name_in_one_function() -> None:
    def first() -> None:
        @CustomOp.register("probe_op")
        class Op(CustomOp):
            def forward_native(self, x: Tensor) -> Tensor:
                return x

    first()
    first()  # the same code again is the same class
    with pytest.raises(RegistrationError, match="taken"):

        @CustomOp.register("probe_op")
        class Op(CustomOp):
            def forward_native(self, x: Tensor) -> Tensor:
                return x


def test_r6_one_class_under_two_names() -> None:
    cls = CustomOp.register("probe_op")(new_op("One"))
    with pytest.raises(RegistrationError, match="registered as 'probe_op' already"):
        CustomOp.register("other_op")(cls)


def test_r6_a_class_name_used_twice() -> None:
    with pytest.raises(RegistrationError, match=r"goes by one of these names.*Rename the class"):
        CustomOp.register("my_norm")(new_op("RMSNorm"))
    with pytest.raises(RegistrationError, match="Rename the class"):
        CustomOp.register("my_norm")(new_op("rms_norm"))


@pytest.mark.parametrize("name", ["My Op", "my op", "my-op", "MyOp", "", "1op", "all", "none", None, 3, ["a"], ("a",)])
def test_r6_a_name_that_is_none(name: Any) -> None:
    with pytest.raises(RegistrationError, match="snake_case"):
        CustomOp.register(name)(new_op("One"))


@pytest.mark.parametrize("thing", [None, 3, "RMSNorm", len, object, int, torch.nn.Linear, RMSNorm(2)])
def test_r6_a_thing_that_is_no_op_class(thing: Any) -> None:
    with pytest.raises(RegistrationError, match="not a subclass of CustomOp"):
        CustomOp.register("probe_op")(thing)
    assert "probe_op" not in CustomOp.op_registry
    with pytest.raises(RegistrationError, match=r"cannot replace .*RMSNorm.*must be a subclass"):
        CustomOp.register_oot("RMSNorm")(thing)
    with pytest.raises(RegistrationError, match="not a subclass of CustomOp"):
        CustomOp.register_oot("NotThereYet", lazy=True)(thing)
    assert not CustomOp.op_registry_oot
    assert not registry.pending()


def test_x2_replacement_that_is_not_a_subclass() -> None:
    with pytest.raises(RegistrationError, match=r"SiluAndMul.* cannot replace .*RMSNorm.*class SiluAndMul\(RMSNorm\)"):
        CustomOp.register_oot("RMSNorm")(SiluAndMul)
    with pytest.raises(RegistrationError, match="cannot replace itself"):
        RMSNorm.register_oot(RMSNorm)
    assert type(RMSNorm(4)) is RMSNorm


def test_x3_unknown_target_names_the_nearest() -> None:
    with pytest.raises(RegistrationError, match=r"no op 'RMSNrom'.*Did you mean 'RMSNorm'.*lazy=True"):
        CustomOp.register_oot("RMSNrom")(VendorNorm)
    with pytest.raises(RegistrationError, match=r"'rms-norm'.*Did you mean 'rms_norm'"):
        CustomOp.register_oot("rms-norm")(VendorNorm)


def test_r6_bare_register_oot_on_the_base() -> None:
    with pytest.raises(RegistrationError, match=r"does not say which op.*@CustomOp.register_oot\('RMSNorm'\)"):
        CustomOp.register_oot(VendorNorm)
    with pytest.raises(RegistrationError, match="does not say which op"):
        CustomOp.register_oot()


@pytest.mark.parametrize("bad", [3, 1.5, ["RMSNorm"], ("RMSNorm",), [["RMSNorm"]], {"RMSNorm": VendorNorm}, b"RMSNorm"])
def test_r6_wrong_types_for_the_target(bad: Any) -> None:
    with pytest.raises(RegistrationError, match=r"register_oot got .*RMSNorm"):
        CustomOp.register_oot(bad)
    with pytest.raises(RegistrationError, match=r"register_oot got the target .*takes the name of an op"):
        CustomOp.register_oot(name=bad)(VendorNorm)
    with pytest.raises(RegistrationError, match="two names"):
        CustomOp.register_oot("RMSNorm", name="SiluAndMul")
    with pytest.raises(RegistrationError, match=r"scope=.*function"):
        CustomOp.register_oot("RMSNorm", scope=bad)(VendorNorm)


def test_r6_two_replacements() -> None:
    class Other(RMSNorm):
        pass

    CustomOp.register_oot("RMSNorm")(VendorNorm)
    with pytest.raises(RegistrationError, match=r"already has .*VendorNorm.*Other was not registered"):
        CustomOp.register_oot("rms_norm")(Other)
    assert type(RMSNorm(4)) is VendorNorm
    CustomOp.register_oot("rms_norm")(VendorNorm)  # the same class again, by its other name, is a no-op
    assert dict(CustomOp.op_registry_oot) == {"RMSNorm": VendorNorm}


def test_r6_a_class_in_both_registries() -> None:
    cls = CustomOp.register("vendor_norm")(type("VendorRms", (RMSNorm,), {"__module__": __name__}))
    with pytest.raises(RegistrationError, match="registered in-tree as 'vendor_norm'"):
        CustomOp.register_oot("RMSNorm")(cls)


SIGNATURES = {
    "missing parameter": (lambda self, x: x, "residual"),
    "renamed parameter": (lambda self, y, residual=None: y, "called 'y', not 'x'"),
    "required where optional": (lambda self, x, residual: x, "no default"),
    "one more required": (lambda self, x, residual=None, *, scale: x, "'scale' has no default"),
    "swapped": (lambda self, residual=None, x=None: x, "called 'residual'"),
    "positional only": (lambda self, x, residual=None, /: x, "cannot be given by name"),
    "keyword only": (lambda self, x, *, residual=None: x, "positional"),
    "keyword only after args": (lambda self, *args, x, residual=None: x, "cannot be given by position"),
    "args without keywords": (lambda self, x, *args: x, "'residual' is missing"),
    "not callable": (3, "must be a method"),
}


@pytest.mark.parametrize("method", registry.PLATFORM_METHODS)
@pytest.mark.parametrize("fault", SIGNATURES)
def test_r6_platform_method_narrower_than_native(fault: str, method: str) -> None:
    function, words = SIGNATURES[fault]
    body = {"forward_native": lambda self, x, residual=None: x, method: function}
    with pytest.raises(RegistrationError, match=words) as raised:
        CustomOp.register("probe_op")(new_op("Probe", **body))
    assert method in str(raised.value)
    assert "probe_op" not in CustomOp.op_registry
    if callable(function):
        vendor = type("Vendor", (RMSNorm,), {method: function, "__module__": __name__})
        with pytest.raises(RegistrationError, match="accepts less"):
            RMSNorm.register_oot(vendor)
        assert not CustomOp.op_registry_oot


KINDS = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def every_signature() -> list[Signature]:
    """All signatures of up to two parameters a and b, without catch-alls."""
    found: dict[str, Signature] = {}
    for order in (("a",), ("b",), ("a", "b"), ("b", "a")):
        for kinds in itertools.product(KINDS, repeat=len(order)):
            for defaults in itertools.product((Parameter.empty, 0), repeat=len(order)):
                made = [Parameter(n, k, default=d) for n, k, d in zip(order, kinds, defaults, strict=True)]
                with contextlib.suppress(ValueError):  # a parameter without a default after one with
                    signature = Signature(sorted(made, key=lambda p: p.kind))
                    found[str(signature)] = signature
    return list(found.values())


def test_r6_a_signature_that_is_accepted_takes_every_call_alike() -> None:
    calls = [(args, dict.fromkeys(names)) for args in ((), (0,), (0, 1)) for names in ("", "a", "b", "ab")]

    def bound(signature: Signature, args: tuple[int, ...], kwargs: dict[str, None]) -> dict[str, Any] | None:
        try:
            return dict(signature.bind(*args, **kwargs).arguments)
        except TypeError:
            return None

    for want, have in itertools.product(every_signature(), repeat=2):
        if registry.narrower(have, want) is None:
            for args, kwargs in calls:
                wanted = bound(want, args, kwargs)
                assert wanted is None or bound(have, args, kwargs) == wanted, (str(want), str(have), args, kwargs)


def test_r6_override_narrower_than_what_it_overrides() -> None:
    class Vendor(RMSNorm):
        def forward_native(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return x

    with pytest.raises(RegistrationError, match=r"forward_native.*accepts less than .*residual"):
        RMSNorm.register_oot(Vendor)


def test_r6_wider_signatures_are_fine() -> None:
    body = {
        "forward_native": lambda self, x, residual=None: x,
        "forward_cpu": lambda self, *args, **kwargs: "cpu",
        "forward_cuda": lambda self, x, residual=None, *, more=1: "cuda",
        "forward_hip": None,  # taken back: not implemented
    }
    cls: Any = CustomOp.register("probe_op")(new_op("Probe", **body))
    assert cls()(torch.zeros(1)) == "cpu"
    assert opmux.explain("probe_op", platform="rocm").method == "forward_cuda"


def test_r6_same_class_again_is_a_no_op() -> None:
    cls = CustomOp.register("probe_op")(new_op("Probe"))
    assert CustomOp.register("probe_op")(cls) is cls
    RMSNorm.register_oot(VendorNorm)
    RMSNorm.register_oot(VendorNorm)
    assert type(RMSNorm(4)) is VendorNorm


def test_r6_lazy_target() -> None:
    class Vendor(CustomOp):
        def forward_native(self, x: Tensor) -> Tensor:
            return x

    CustomOp.register_oot("LaterOp", lazy=True)(Vendor)
    assert registry.pending() == {"LaterOp": Vendor}
    with pytest.raises(RegistrationError, match=r"waits for 'LaterOp' already"):
        CustomOp.register_oot("LaterOp", lazy=True)(new_op("Second"))
    CustomOp.register_oot("LaterOp", lazy=True)(Vendor)


@pytest.mark.parametrize("key", ["later_op", "LaterOp"])
def test_r6_lazy_target_arrives(key: str) -> None:
    base = new_op("LaterOp")
    allowed: list[bool] = [True]
    vendor = type("Vendor", (base,), {"__module__": __name__})
    CustomOp.register_oot(key, lazy=True, scope=lambda: allowed[0])(vendor)
    assert type(base()) is base
    CustomOp.register("later_op")(base)
    assert dict(CustomOp.op_registry_oot) == {"LaterOp": vendor}
    assert not registry.pending()
    assert type(base()) is vendor
    allowed[0] = False
    assert type(base()) is base, "a lazy registration keeps its scope"


def test_r6_lazy_target_arrives_and_is_no_base_of_what_waits() -> None:
    CustomOp.register_oot("LaterOp", lazy=True)(new_op("Waiting"))
    base: Any = new_op("LaterOp")
    with pytest.raises(RegistrationError, match=r"Waiting cannot replace .*LaterOp.*subclass"):
        CustomOp.register("later_op")(base)
    assert CustomOp.op_registry["later_op"] is base
    assert not CustomOp.op_registry_oot
    assert type(base()) is base


def test_r6_lazy_of_a_known_target_is_at_once() -> None:
    CustomOp.register_oot("RMSNorm", lazy=True)(VendorNorm)
    assert type(RMSNorm(4)) is VendorNorm
    assert not registry.pending()


# -- R7 --------------------------------------------------------------------------------------------------------------


def test_r7_b07_subclass_of_a_replaced_class_is_itself() -> None:
    RMSNorm.register_oot(VendorNorm)
    op = MyNorm(8)
    assert type(op) is MyNorm
    assert "MyNorm has no replacement; its parent RMSNorm has" in op.decision().class_why
    assert "VendorNorm" in opmux.explain(MyNorm).class_why


def test_r7_b07_unrelated_class_of_the_same_name() -> None:
    RMSNorm.register_oot(VendorNorm)
    other: Any = type("RMSNorm", (CustomOp,), {"forward_native": native, "__module__": "elsewhere"})
    assert type(other()) is other
    with pytest.raises(RegistrationError, match=r"Rename the class|nothing can replace"):
        other.register_oot(type("X", (other,), {"__module__": "elsewhere"}))


def test_r7_b07_the_replacement_itself() -> None:
    RMSNorm.register_oot(VendorNorm)
    assert type(VendorNorm(8)) is VendorNorm


@pytest.mark.parametrize("registered", [False, True])
def test_r7_b07_child_and_parent_replaced(registered: bool) -> None:
    class Child(RMSNorm):
        pass

    class VendorChild(Child):
        pass

    if registered:
        CustomOp.register("child_norm")(Child)
    RMSNorm.register_oot(VendorNorm)
    Child.register_oot(VendorChild)
    assert type(Child(8)) is VendorChild
    assert type(RMSNorm(8)) is VendorNorm
    assert CustomOp.op_registry_oot == {"RMSNorm": VendorNorm, "Child": VendorChild}


def test_r7_chain_of_replacements() -> None:
    class Better(VendorNorm):
        pass

    RMSNorm.register_oot(VendorNorm)
    VendorNorm.register_oot(Better)
    assert type(RMSNorm(8)) is VendorNorm, "one step, never a chain"
    assert type(VendorNorm(8)) is Better
    assert Better.name == "rms_norm"


@pytest.mark.parametrize("copy_of", [copy.deepcopy, copy.copy, lambda op: pickle.loads(pickle.dumps(op))])
def test_r7_copies_keep_type_and_weights(copy_of: Any) -> None:
    before = RMSNorm(4)
    before.weight.data.fill_(3.0)
    before(torch.ones(1, 4))
    RMSNorm.register_oot(VendorNorm)
    after = RMSNorm(4)
    after.weight.data.fill_(5.0)
    for op, kind, value in ((before, RMSNorm, 3.0), (after, VendorNorm, 5.0)):
        twin = copy_of(op)
        assert type(twin) is kind
        assert twin.weight.tolist() == [value] * 4
        assert torch.equal(twin(torch.ones(2, 4)), op(torch.ones(2, 4)))
    independent = copy.deepcopy(before)
    independent.weight.data.fill_(7.0)
    assert before.weight.tolist() == [3.0] * 4


def test_r7_copies_of_hooked_pinned_and_compiled_objects() -> None:
    op = RMSNorm(4)
    op._forward_method = op.forward_native
    op.compile(backend="eager")
    twin = copy.deepcopy(op)
    assert twin._forward_method.__self__ is twin
    assert torch.equal(pickle.loads(pickle.dumps(op))(torch.ones(1, 4)), op.forward_native(torch.ones(1, 4)))


def test_r8_replacement_keeps_the_registered_name() -> None:
    class Stubborn(RMSNorm):
        name = "something_else"

        def forward_oot(self, x: Tensor, residual: Tensor | None = None) -> Any:
            return "oot"

    RMSNorm.register_oot(Stubborn)
    for directives, wanted in (
        (["none", "+rms_norm"], True), (["all", "-rms_norm"], False),
        (["none", "+RMSNorm"], True), (["all", "-RMSNorm"], False),
    ):  # fmt: skip
        with opmux.use_config(opmux.CompilationConfig(custom_ops=directives)), torch.no_grad():
            out = RMSNorm(4)(torch.ones(1, 4))
            assert (isinstance(out, str) and out == "oot") is wanted
            assert RMSNorm(4).decision().enabled is wanted
            assert opmux.explain("rms_norm").op == "rms_norm"


def test_r9_unregistered_subclasses_follow_their_ancestor() -> None:
    class Grandchild(MyNorm):
        pass

    with opmux.use_config(opmux.CompilationConfig(custom_ops=["all", "-rms_norm"])):
        assert Grandchild(4).decision().method == "forward_native"
        assert not Grandchild.enabled()
    assert Grandchild.enabled()


def test_r9_a_class_without_registered_ancestor_follows_the_base_mode() -> None:
    cls: Any = new_op("Loose", forward_cpu=lambda self, x: "cpu")
    assert cls()(torch.zeros(1)) == "cpu"
    with opmux.use_config(opmux.CompilationConfig(custom_ops=["none", "+rms_norm"])):
        assert isinstance(cls()(torch.zeros(1)), Tensor)


def test_r9_the_base_cannot_be_built() -> None:
    with pytest.raises(TypeError, match=r"CustomOp is abstract.*forward_native.*@CustomOp.register"):
        CustomOp()


def test_r10_scope_restores_both_registries() -> None:
    before = dict(CustomOp.op_registry), dict(CustomOp.op_registry_oot)
    with opmux.oot_scope():
        RMSNorm.register_oot(VendorNorm)
        CustomOp.register("probe_op")(new_op("Probe"))
        CustomOp.register_oot("Never", lazy=True)(new_op("Waiting"))
        with opmux.oot_scope():
            CustomOp.register_oot("SiluAndMul")(type("VendorSilu", (SiluAndMul,), {"__module__": __name__}))
            assert len(CustomOp.op_registry_oot) == 3
        assert set(CustomOp.op_registry_oot) == {"RMSNorm", "Never"}
        assert type(SiluAndMul()) is SiluAndMul
        assert type(RMSNorm(4)) is VendorNorm
    assert (dict(CustomOp.op_registry), dict(CustomOp.op_registry_oot)) == before
    assert type(RMSNorm(4)) is RMSNorm
    assert not registry.pending()


def test_r10_scope_restores_after_an_exception() -> None:

    def fail() -> None:
        with opmux.oot_scope():
            RMSNorm.register_oot(VendorNorm)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert type(RMSNorm(4)) is RMSNorm


def test_r10_scope_keeps_what_is_loaded_on_demand(run_python: Any) -> None:
    code = """
import opmux
with opmux.oot_scope():
    from opmux.ops import RMSNorm
print(sorted(opmux.CustomOp.op_registry)[0], opmux.CompilationConfig(custom_ops=["+rms_norm"]))
"""
    assert "+rms_norm" in run_python(code).stdout


def test_r10_a_replacement_limited_by_its_scope() -> None:
    """B53: a vendor class may serve one model and leave another alone."""
    building: list[str] = ["a"]
    RMSNorm.register_oot(scope=lambda: building[0] == "a")(VendorNorm)
    first = RMSNorm(4)
    building[0] = "b"
    second = RMSNorm(4)
    assert type(first) is VendorNorm
    assert type(second) is RMSNorm
    building[0] = "a"
    assert "did not replace it" in second.decision().class_why


# -- B37, B47 --------------------------------------------------------------------------------------------------------

OP_MODULE = """
import torch
from opmux.core.custom_op import CustomOp
from opmux.core.torch_library import opaque

@opaque(fake=lambda x: torch.empty_like(x))
def b37_kernel(x: torch.Tensor) -> torch.Tensor:
    return x + {value}

@CustomOp.register("b37_op")
class B37Op(CustomOp):
    def forward_native(self, x):
        return b37_kernel(x)
"""


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_b37_reload_and_import_under_two_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "b37_module.py"
    path.write_text(OP_MODULE.format(value=1))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("b37_module")
    x = torch.zeros(2)
    assert module.B37Op()(x).tolist() == [1, 1]

    module = importlib.reload(module)
    assert module.B37Op()(x).tolist() == [1, 1]
    second = load(path, "b37_by_another_name")
    assert second.B37Op()(x).tolist() == [1, 1]
    assert CustomOp.op_registry["b37_op"] is second.B37Op

    path.write_text(OP_MODULE.format(value=22))
    module = importlib.reload(module)
    assert module.B37Op()(x).tolist() == [22, 22]
    assert torch.ops.opmux.b37_kernel(x).tolist() == [22, 22]


def test_b37_reload_of_an_op_module_keeps_its_replacement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b37_reload.py").write_text(OP_MODULE.format(value=3).replace("b37_kernel", "b37_kernel_c"))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("b37_reload")
    vendor = type("Vendor", (module.B37Op,), {"__module__": __name__})
    CustomOp.register_oot("b37_op")(vendor)
    module = importlib.reload(module)
    assert type(module.B37Op()) is vendor
    CustomOp.register_oot("b37_op")(vendor)  # the vendor's registration run again, its base now one reload old
    assert type(module.B37Op()) is vendor


def test_b37_kernel_defined_in_a_helper_outlives_it() -> None:
    def define() -> Any:
        @opaque(fake=lambda x: torch.empty_like(x))
        def b37_local(x: Tensor) -> Tensor:
            return x * 2

        return torch.ops.opmux.b37_local

    op = define()
    gc.collect()
    assert op(torch.ones(2)).tolist() == [2, 2]
    assert torch.ops.opmux.b37_local(torch.ones(1)).item() == 2


def test_b37_another_function_under_a_kernel_name() -> None:
    def b37_taken(x: Tensor) -> Tensor:
        return x + 1

    opaque(fake=lambda x: torch.empty_like(x))(b37_taken)

    def other(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    other.__name__ = "b37_taken"
    with pytest.raises(RegistrationError, match=r"opmux::b37_taken is taken by .*\(line \d+\).*other.*\(line \d+\)"):
        opaque(fake=lambda x, y: torch.empty_like(x))(other)
    assert "b37_taken" in torch_library.defined()


def test_b47_one_registry_whatever_the_path() -> None:
    import opmux.ops as ops

    assert opmux.CustomOp is custom_op.CustomOp
    assert opmux.CustomOp.op_registry is registry.op_registry
    assert ops.RMSNorm is importlib.import_module("opmux.ops.norm.rms_norm").RMSNorm


def test_b47_importing_one_op_registers_that_op_only(run_python: Any) -> None:
    code = """
import opmux.ops.activation.silu_and_mul
from opmux.core.registry import op_registry, op_registry_oot
print(sorted(op_registry), dict(op_registry_oot))
"""
    assert run_python(code).stdout.strip() == "['silu_and_mul'] {}"


def test_b47_objects_built_before_registration_say_so() -> None:
    op = RMSNorm(4)
    RMSNorm.register_oot(VendorNorm)
    assert type(op) is RMSNorm
    assert op.decision().class_why.startswith("built before ")
    assert "VendorNorm" in op.decision().class_why
    op.redispatch()
    assert type(op) is RMSNorm
    assert op.decision().class_why.startswith("built before ")

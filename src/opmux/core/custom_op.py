"""``CustomOp``: one op, every backend.

A subclass holds the plain definition (``forward_native``) and a fast kernel for each kind of hardware
(``forward_cpu``, ``forward_cuda``, ...). Calling the op runs the method that was decided for the tensors' device::

    @CustomOp.register("silu_and_mul")
    class SiluAndMul(CustomOp):
        def forward_native(self, x): ...

    SiluAndMul()(x)                 # the right method for x's device
    print(SiluAndMul().decision(x)) # which one, and why
"""

from __future__ import annotations

import copyreg
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .. import platforms
from . import heritage, registry
from .config import CompilationConfig, current_config
from .decide import NATIVE, Decision, Facts, Lineage, Verdict, decide
from .errors import DeviceMismatchError, KernelRefusedError, RegistrationError
from .plugins import load_general_plugins
from .requires import NOTHING, requirements_of

_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled
_any_global_hook = nn.modules.module._has_any_global_hook


def _abstract(method: Callable[..., Any]) -> Callable[..., Any]:
    method.__opmux_abstract__ = True  # type: ignore[attr-defined]
    return method


class Route:
    """Where calls on one (device, dtype) go: the decision, its bound method, and what happened to the calls."""

    __slots__ = ("calls", "decision", "differentiable", "method", "refusals", "when")

    def __init__(self, op: CustomOp, decision: Decision, method: Callable[..., Any]) -> None:
        needs = requirements_of(method)
        self.decision = decision
        self.method = method
        self.when = needs.when
        self.differentiable = needs.differentiable or decision.method == NATIVE
        self.calls = 0
        self.refusals: Counter[str] = Counter()

    def refuse(self, instead: Callable[..., Any], why: str) -> Callable[..., Any]:
        """Count a call that the kernel cannot take, with the sentence that says why, and pass on what runs instead."""
        self.refusals[why] += 1
        return instead


class _CustomOpMeta(type(nn.Module)):  # type: ignore[misc]
    """Builds the OOT replacement where the in-tree class is called.

    The swap happens when a class is called, not in ``__new__``, so that ``copy.deepcopy`` and pickle, which use
    ``__new__``, keep an object's own type.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        load_general_plugins()
        replacement = registry.replacement_of(cls)
        if replacement is None:
            heritage.note(cls.__name__)
            return super().__call__(*args, **kwargs)
        return super(_CustomOpMeta, replacement.cls).__call__(*args, **kwargs)


class CustomOp(nn.Module, metaclass=_CustomOpMeta):
    """Base class of every op. See the module's docstring; ``docs/custom_op.md`` tells the whole story.

    Args:
        enforce_enable: enable this object whatever the directives say.
        compile_native: where the op is disabled and the config compiles with Inductor, compile ``forward_native`` for
            calls that come from code the compiler does not see.
    """

    op_registry: ClassVar[dict[str, type]] = registry.op_registry
    op_registry_oot: ClassVar[dict[str, type]] = registry.op_registry_oot
    name: ClassVar[str]
    lead: ClassVar[int] = 0  # index of the argument whose device and dtype decide
    _class_key: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._class_key = f"{registry.origin(cls)}@{id(cls)}"
        _classes[cls._class_key] = cls

    def __init__(self, *, enforce_enable: bool = False, compile_native: bool = False) -> None:
        if type(self) is CustomOp:
            raise TypeError(
                "CustomOp is abstract. Subclass it, define forward_native, and register it with "
                "@CustomOp.register('my_op')."
            )
        super().__init__()
        self._enforce_enable = enforce_enable
        self._compile_native = compile_native
        self._built = registry.next_serial()
        self._by_hand: Callable[..., Any] | None = None
        self.redispatch()

    # -- registration ------------------------------------------------------------------------------------------------

    @classmethod
    def register(cls, name: str) -> Callable[[type], type]:
        """Add the decorated class to the in-tree registry under ``name`` and set its ``name``."""
        return lambda op_cls: registry.register(op_cls, name, CustomOp)

    @classmethod
    def register_oot(
        cls,
        _decorated_op_cls: type | str | None = None,
        name: str | None = None,
        *,
        lazy: bool = False,
        scope: Callable[[], bool] | None = None,
    ) -> Any:
        """Register an out-of-tree replacement.

        All of these do the same: ``@CustomOp.register_oot("RMSNorm")``, ``@CustomOp.register_oot(name="RMSNorm")``,
        ``@RMSNorm.register_oot``, ``@RMSNorm.register_oot()``, ``CustomOp.register_oot(_decorated_op_cls=MyNorm,
        name="RMSNorm")``. The registered name (``"rms_norm"``) may stand for the class name. With ``lazy=True`` the
        target may be an op that is not imported yet. ``scope`` is asked at construction whether to replace.
        """
        if isinstance(_decorated_op_cls, str):
            if name is not None:
                raise RegistrationError(f"register_oot got two names, {_decorated_op_cls!r} and {name!r}. Give one.")
            _decorated_op_cls, name = None, _decorated_op_cls
        target: type | str | None = name if name is not None else (None if cls is CustomOp else cls)
        if target is None:
            raise RegistrationError(
                "@CustomOp.register_oot does not say which op to replace. Write @CustomOp.register_oot('RMSNorm') or "
                "@RMSNorm.register_oot."
            )
        resolved = target

        def decorate(op_cls: type) -> type:
            return registry.register_oot(op_cls, resolved, lazy=lazy, scope=scope)

        return decorate if _decorated_op_cls is None else decorate(_decorated_op_cls)

    # -- enabling ----------------------------------------------------------------------------------------------------

    @classmethod
    def enabled(cls) -> bool:
        """Whether the directives of the config in force enable this op."""
        return current_config().verdict(getattr(cls, "name", None)).enabled

    @staticmethod
    def default_on() -> bool:
        """Whether the base mode of the config in force is ``all``."""
        return current_config().base_mode()[0] == "all"

    # -- the methods that a subclass defines -------------------------------------------------------------------------

    @_abstract
    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        """The definition in plain PyTorch."""
        raise NotImplementedError

    @_abstract
    def forward_cpu(self, *args: Any, **kwargs: Any) -> Any:
        """The CPU kernel."""
        raise NotImplementedError

    @_abstract
    def forward_cuda(self, *args: Any, **kwargs: Any) -> Any:
        """The CUDA kernel; ROCm falls back to it."""
        raise NotImplementedError

    @_abstract
    def forward_hip(self, *args: Any, **kwargs: Any) -> Any:
        """The ROCm kernel."""
        raise NotImplementedError

    @_abstract
    def forward_xpu(self, *args: Any, **kwargs: Any) -> Any:
        """The Intel GPU kernel."""
        raise NotImplementedError

    @_abstract
    def forward_tpu(self, *args: Any, **kwargs: Any) -> Any:
        """The TPU kernel."""
        raise NotImplementedError

    @_abstract
    def forward_oot(self, *args: Any, **kwargs: Any) -> Any:
        """The kernel of an out-of-tree platform or replacement."""
        raise NotImplementedError

    # -- the way of a call -------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # nn.Module.__call__ costs as much as the whole dispatch; without hooks there is nothing for it to do.
        if (
            self._forward_hooks
            or self._forward_pre_hooks
            or self._backward_hooks
            or self._backward_pre_hooks
            or _any_global_hook()
            or _compiling()
        ):
            return super().__call__(*args, **kwargs)
        return self._select(args, kwargs)(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method that was decided for the tensors' device and dtype."""
        if _compiling():
            return self._forward_traced(*args, **kwargs)
        return self._select(args, kwargs)(*args, **kwargs)

    def _select(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """The bound method that takes this call. Every eager call passes here: keep it short."""
        try:
            lead = args[self.lead]
            device = lead.device
            route = self._routes[device, lead.dtype]
        except (IndexError, KeyError, AttributeError):
            route = self._route(args, kwargs)
        else:
            if kwargs:
                self._check_devices(args, kwargs)
            else:
                for arg in args:
                    if arg is not lead and isinstance(arg, Tensor) and arg.device != device:
                        self._check_devices(args, kwargs)
        if _grad_enabled() and not route.differentiable and self._needs_grad(args, kwargs):
            return route.refuse(self.forward_native, "has no backward, and an input needs a gradient")
        if route.when is not None:
            refusal = route.when(self, *args, **kwargs)
            if refusal is not None:
                return self._fall_back(route, refusal, args, kwargs)
        route.calls += 1
        return route.method

    def dispatch_forward(self, decision: Decision) -> Callable[..., Any]:
        """The bound method that serves ``decision``. A subclass may override it (contract D3)."""
        if decision.method is None:
            raise NotImplementedError(f"{decision.op}: {decision.why}.")
        if decision.method == NATIVE and not decision.enabled and self._compiles_native():
            return self._native_compiled()
        method: Callable[..., Any] = getattr(self, decision.method)
        return method

    def decision(self, *args: Any, **kwargs: Any) -> Decision:
        """The record of what would serve a call with these arguments; with none, a call on the current platform."""
        device, dtype, shape = self._lead_facts(args, kwargs)
        call = ((self, *args), kwargs) if args or kwargs else None
        return self._decide(device, dtype, shape, call)

    def redispatch(self, config: CompilationConfig | None = None) -> None:
        """Decide anew, under ``config`` or the one now in force. Objects keep their decisions otherwise (C6)."""
        self._config = current_config() if config is None else config
        self._verdict = self._config.verdict(getattr(type(self), "name", None))
        # Compiled code guards on this flag alone: a change recompiles once, and changing back finds the old code.
        self._on = self._enforce_enable or self._verdict.enabled
        self._routes: dict[Any, Route] = {}
        self._compiled_native: Callable[..., Any] | None = None
        name = getattr(type(self), "name", type(self).__name__)
        (self._config.enabled_custom_ops if self._on else self._config.disabled_custom_ops)[name] += 1

    @property
    def _forward_method(self) -> Callable[..., Any] | None:
        """A method pinned by hand; it is called on every device. Assigning it takes effect at the next call."""
        return self._by_hand

    @_forward_method.setter
    def _forward_method(self, method: Callable[..., Any] | None) -> None:
        self._by_hand = method
        self._routes = {}

    @property
    def routes(self) -> list[Route]:
        """Every route taken so far: decision, calls and refusals."""
        return list(self._routes.values())

    def _forward_traced(self, *args: Any, **kwargs: Any) -> Any:
        # The compiler evaluates all of this while it traces; the graph holds only the method's own operations.
        if self._by_hand is not None:
            return self._by_hand(*args, **kwargs)
        lead = args[self.lead] if len(args) > self.lead else next(a for a in kwargs.values() if isinstance(a, Tensor))
        if torch.is_grad_enabled() and self._needs_grad(args, kwargs):
            return self.forward_native(*args, **kwargs)
        for method in _methods_while_tracing(self._class_key, self._on, lead.device.type, lead.dtype):
            when = getattr(type(self), method).__dict__.get("__opmux_requires__", NOTHING).when
            if when is None or when(self, *args, **kwargs) is None:
                return getattr(self, method)(*args, **kwargs)
        return self.forward_native(*args, **kwargs)

    def _route(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Route:
        self._check_devices(args, kwargs)
        device, dtype, shape = self._lead_facts(args, kwargs)
        key = (device, dtype)
        if key not in self._routes:
            decision = self._decide(device, dtype, shape, None)
            method = self._by_hand or self.dispatch_forward(decision)
            self._routes[key] = Route(self, decision, method)
        return self._routes[key]

    def _decide(
        self, device: torch.device | None, dtype: torch.dtype | None, shape: tuple[int, ...] | None, call: Any
    ) -> Decision:
        cls = type(self)
        facts = platforms.facts_for(device, dtype, shape)
        return decide(
            lineage_of(cls, built=self._built),
            facts,
            self._verdict,
            enforce_enable=self._enforce_enable,
            call=call,
            notes=self._notes(),
        )

    def _notes(self) -> tuple[str, ...]:
        notes = []
        if type(self).dispatch_forward is not CustomOp.dispatch_forward:
            notes.append(f"{type(self).__qualname__} overrides dispatch_forward(), which has the last word")
        if self._by_hand is not None:
            notes.append("_forward_method was assigned by hand and is called on every device")
        return tuple(notes)

    def _lead_facts(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[torch.device | None, torch.dtype | None, tuple[int, ...] | None]:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if not tensors:
            own = next(self.parameters(), None)
            return (None, None, None) if own is None else (own.device, own.dtype, None)
        lead = args[self.lead] if len(args) > self.lead and isinstance(args[self.lead], Tensor) else tensors[0]
        return lead.device, lead.dtype, tuple(lead.shape)

    def _fall_back(self, route: Route, refusal: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        op, method = route.decision.op, route.decision.method
        if self._config.strict:
            raise KernelRefusedError(
                f"{op}.{method} cannot take this call: it {refusal}. Under strict=True there is no fall-back; change "
                f"the input, or disable the op with '-{op}'."
            )
        for name in route.decision.fallbacks:
            when = requirements_of(getattr(type(self), name)).when
            if when is None or when(self, *args, **kwargs) is None:
                return route.refuse(getattr(self, name), refusal)
        raise NotImplementedError(f"{op}: {method} cannot take this call (it {refusal}), and no other method is implemented.")

    def _needs_grad(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return any(isinstance(a, Tensor) and a.requires_grad for a in (*args, *kwargs.values())) or any(
            p.requires_grad for p in self.parameters()
        )

    def _check_devices(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        own = (*self.parameters(), *self.buffers())
        tensors = [t for t in (*args, *kwargs.values(), *own) if isinstance(t, Tensor)]
        if len({t.device for t in tensors}) > 1:
            self._raise_two_devices(args, kwargs)

    def _raise_two_devices(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = {f"argument {i}": a for i, a in enumerate(args)} | kwargs
        named |= dict(self.named_parameters()) | dict(self.named_buffers())
        where = ", ".join(f"{n} on {t.device}" for n, t in named.items() if isinstance(t, Tensor))
        raise DeviceMismatchError(
            f"{getattr(self, 'name', type(self).__name__)} got tensors on two devices: {where}. Move them to one device."
        )

    # -- compilation of a disabled op --------------------------------------------------------------------------------

    def _compiles_native(self) -> bool:
        return self._compile_native and self._config.compiles and self._config.backend != "eager"

    def _native_compiled(self) -> Callable[..., Any]:
        if self._compiled_native is None:
            self._compiled_native = torch.compile(self.forward_native, backend=self._config.backend, dynamic=True)
        return self._compiled_native

    # -- life of the object ------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        # Moved or cast parameters: what was decided for the old device or dtype may not hold.
        self._routes = {}
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_routes": {}, "_compiled_native": None}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copyreg.__newobj__, (type(self),), self.__getstate__()  # type: ignore[attr-defined]


_classes: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()


@torch.compiler.assume_constant_result
def _methods_while_tracing(class_key: str, enabled: bool, device_type: str, dtype: torch.dtype) -> tuple[str, ...]:
    """The platform methods to try for traced code. Takes constants only, as the compiler demands."""
    cls = _classes[class_key]
    facts = platforms.facts_for(torch.device(device_type), dtype, None)
    verdict = Verdict(enabled, "as decided at construction", "constructor")
    decision = decide(lineage_of(cls, built=0), facts, verdict)
    return tuple(m for m in (decision.method, *decision.fallbacks) if m not in (None, NATIVE))


def lineage_of(cls: type, built: int | None = None) -> Lineage:
    """Which class serves where ``cls`` is asked for; ``built`` is the serial of an object that exists already."""
    replacement = registry.replacement_of(cls)
    if replacement is not None and built is None:
        return Lineage(cls, replacement.cls, True, f"{registry.origin(replacement.cls)} is registered out of tree for {cls.__name__}")
    if replacement is not None and built is not None and built < replacement.serial:
        return Lineage(cls, cls, False, f"built before {registry.origin(replacement.cls)} was registered for {cls.__name__}")
    if registry.is_replacement(cls):
        return Lineage(cls, cls, True, f"{registry.origin(cls)} is an out-of-tree replacement")
    for parent in cls.__mro__[1:]:
        over = registry.replacement_of(parent)
        if over is not None:
            return Lineage(cls, cls, False, f"{cls.__qualname__} has no replacement; its parent {parent.__qualname__} has {registry.origin(over.cls)}, which serves that class only")
    lost = heritage.note(cls.__name__)
    if lost is not None:
        return Lineage(cls, cls, False, lost)
    return Lineage(cls, cls, False, f"{cls.__qualname__} is the in-tree class and has no replacement")


def explain(
    op: str | type,
    *,
    platform: str | None = None,
    dtype: torch.dtype | None = None,
    shape: tuple[int, ...] | None = None,
    config: CompilationConfig | None = None,
) -> Decision:
    """The decision for an op by name or class, on this platform or a named one, without running it."""
    cls = registry.find(op) if isinstance(op, str) else op
    facts: Facts = platforms.facts_of_platform(platform, dtype, shape)
    verdict = (config or current_config()).verdict(getattr(cls, "name", None))
    return decide(lineage_of(cls), facts, verdict)

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
import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

from .. import platforms
from . import heritage, registry, tracing
from .config import CompilationConfig, current_config
from .decide import NATIVE, NO_BACKWARD, Decision, decide
from .errors import DeviceMismatchError, KernelRefusedError, RegistrationError, UsageError
from .lineage import lineage_of
from .plugins import load_general_plugins, require_loaded
from .requires import requirements_of
from .route import Route

_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled


def _abstract(method: Callable[..., Any]) -> Callable[..., Any]:
    method.__opmux_abstract__ = True  # type: ignore[attr-defined]
    return method


class _CustomOpMeta(type(nn.Module)):  # type: ignore[misc]
    """Builds the OOT replacement where the in-tree class is called.

    The swap happens when a class is called, not in ``__new__``, so that ``copy.deepcopy`` and pickle, which use
    ``__new__``, keep an object's own type.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        load_general_plugins()
        replacement = registry.replacement_of(cls)
        if replacement is None:
            heritage.note(cls)
            op = super().__call__(*args, **kwargs)
        else:
            op = super(_CustomOpMeta, replacement.cls).__call__(*args, **kwargs)  # type: ignore[misc]
        op._count()  # not in __init__, which may yet fail
        return op


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
    mutates: ClassVar[tuple[str, ...]] = ()  # arguments that a call may write: states kept between calls
    anywhere: ClassVar[tuple[str, ...]] = ()  # arguments that may lie on another device than the rest: sizes, bounds
    _class_key: ClassVar[str]
    _whens: ClassVar[dict[str, Callable[..., str | None]]]  # platform method -> what may refuse a call
    _differentiable: ClassVar[tuple[str, ...]]  # platform methods with a backward
    _lead_name: ClassVar[str | None] = None
    _anywhere_at: ClassVar[frozenset[int]] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if callable(cls.forward_native):
            names = list(inspect.signature(cls.forward_native).parameters)[1:]
            cls._lead_name = names[cls.lead] if cls.lead < len(names) else None
            cls._anywhere_at = frozenset(i for i, name in enumerate(names) if name in cls.anywhere)
        # Plain class attributes, because not every version of the compiler reads a function's own attributes.
        needs = {m: requirements_of(getattr(cls, m)) for m in registry.PLATFORM_METHODS if callable(getattr(cls, m))}
        cls._whens = {m: n.when for m, n in needs.items() if n.when is not None}
        cls._differentiable = tuple(m for m, n in needs.items() if n.differentiable)
        cls._class_key = f"{registry.origin(cls)}@{id(cls)}"
        tracing.classes[cls._class_key] = cls

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
        self._counted: Counter[str] | None = None
        self._decide_under(current_config())

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
        if _decorated_op_cls is not None and not isinstance(_decorated_op_cls, (str, type)):
            raise RegistrationError(
                f"register_oot got {_decorated_op_cls!r}; it takes a class, or the name of the op to replace: "
                "@CustomOp.register_oot('RMSNorm')."
            )
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
            return registry.register_oot(op_cls, resolved, CustomOp, lazy=lazy, scope=scope)

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
        own = self.__dict__
        if (
            _compiling()
            or own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or "forward" in own  # replaced on the object, as accelerate does
            or "_compiled_call_impl" in own  # nn.Module.compile()
            or type(self).forward is not _forward
            or _global_forward_hooks
            or _global_forward_pre_hooks
            or _global_backward_hooks
            or _global_backward_pre_hooks
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
            lead = args[self.lead] if args else kwargs[self._lead_name]  # type: ignore[index]
            device = lead.device
            route = self._routes[device, lead.dtype, type(lead)]
        except (IndexError, KeyError, AttributeError):
            route = self._route(args, kwargs)
        else:
            for arg in (*args, *kwargs.values()) if kwargs else args:
                if arg is not lead and isinstance(arg, Tensor) and arg.device != device:
                    self._check_devices(args, kwargs)
        if (
            not route.differentiable
            and (_grad_enabled() or forward_ad._current_level >= 0)
            and self._needs_grad(args, kwargs)
        ):
            return self._fall_back(route, NO_BACKWARD, args, kwargs)
        if route.when is not None:
            refusal = route.when(self, *args, **kwargs)
            if refusal is not None:
                return self._fall_back(route, refusal, args, kwargs)
        route.calls += 1
        return route.method

    def dispatch_forward(self, decision: Decision) -> Callable[..., Any]:
        """The bound method that serves ``decision``. A subclass may override it."""
        if decision.method is None:
            raise NotImplementedError(f"{decision.op} cannot run on {decision.platform}: {decision.why}.")
        if decision.method == NATIVE and not decision.enabled and self._compiles_native():
            return self._native_compiled()
        method: Callable[..., Any] = getattr(self, decision.method)
        return method

    def decision(self, *args: Any, **kwargs: Any) -> Decision:
        """The record of what would serve a call with these arguments; with none, a call on the current platform."""
        return self._decide(args, kwargs, ((self, *args), kwargs) if args or kwargs else None)

    def redispatch(self, config: CompilationConfig | None = None) -> None:
        """Decide anew, under ``config`` or the one now in force. Objects keep their decisions otherwise."""
        if config is not None and not isinstance(config, CompilationConfig):
            raise UsageError(
                f"redispatch takes a CompilationConfig, not {config!r}. Write CompilationConfig(custom_ops=[...])."
            )
        self._decide_under(current_config() if config is None else config)
        self._count()

    def _decide_under(self, config: CompilationConfig) -> None:
        verdict = config.verdict(getattr(type(self), "name", None))
        if config.strict:
            require_loaded()
        self._config = config
        self._verdict = verdict
        self._strict = config.strict
        # Compiled code guards on this flag and _strict alone: a change recompiles once, and changing back finds the
        # old code.
        self._on = self._enforce_enable or verdict.enabled
        self._routes: dict[Any, Route] = {}
        self._compiled_native: Callable[..., Any] | None = None

    def _count(self) -> None:
        """Count this object in its config's counters, once."""
        name = str(getattr(type(self), "name", type(self).__name__))
        if self._counted is not None:
            self._counted.subtract([name])
        self._counted = self._config.enabled_custom_ops if self._on else self._config.disabled_custom_ops
        self._counted[name] += 1

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
        self._check_devices(args, kwargs)
        lead = self._lead_tensor(args, kwargs)
        grad = torch.is_grad_enabled() and self._needs_grad(args, kwargs)
        if self._by_hand is not None:
            return (self.forward_native if grad and self._is_kernel(self._by_hand) else self._by_hand)(*args, **kwargs)
        if lead is None:
            return self.forward_native(*args, **kwargs)
        if type(self).dispatch_forward is not CustomOp.dispatch_forward and not grad:
            decision = tracing.decision(self._class_key, self._on, lead.device.type, lead.dtype)
            return self.dispatch_forward(decision)(*args, **kwargs)
        refused, methods = tracing.methods_to_try(self._class_key, self._on, lead.device.type, lead.dtype)
        if self._strict and refused is not None:
            self._refuse_strictly(*refused)
        for method in methods:
            if grad and method not in self._differentiable:
                continue
            when = self._whens.get(method)
            refusal = None if when is None else when(self, *args, **kwargs)
            if refusal is None:
                return getattr(self, method)(*args, **kwargs)
            if self._strict:
                self._refuse_strictly(method, refusal)
        return self.forward_native(*args, **kwargs)

    def _route(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Route:
        self._check_devices(args, kwargs)
        lead = self._lead_tensor(args, kwargs)
        key = None if lead is None else (lead.device, lead.dtype, type(lead))
        if key not in self._routes:
            decision = self._decide(args, kwargs, None)
            if self._strict and decision.refused and self._by_hand is None:
                self._refuse_strictly(decision.refused[0].candidate, decision.refused[0].why)
            method = self._by_hand or self.dispatch_forward(decision)
            if lead is not None and requirements_of(method).triton:
                platforms.require_hardware(f"{decision.op}.{decision.method}", lead.device.type)
            self._routes[key] = Route(decision, method, not self._is_kernel(method))
        return self._routes[key]

    def _decide(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Any) -> Decision:
        lead = self._lead_tensor(args, kwargs)
        if lead is not None:
            facts = platforms.facts_for(lead.device, lead.dtype, tuple(lead.shape))
        else:
            own = next(self.parameters(), None)
            facts = platforms.facts_for(None if own is None else own.device, None if own is None else own.dtype, None)
        if not all(_has_memory(t) for t in (*_tensors_in(args), *_tensors_in(kwargs.values()), *_tensors_in([self]))):
            facts = replace(facts, kind="wrapped")
        return decide(
            lineage_of(type(self), built=self._built),
            facts,
            self._verdict,
            enforce_enable=self._enforce_enable,
            call=call,
            needs_grad=call is not None and torch.is_grad_enabled() and self._needs_grad(args, kwargs),
            notes=self._notes(),
        )

    def _is_kernel(self, method: Callable[..., Any]) -> bool:
        """Whether autograd cannot follow ``method``: a platform method, or whatever ``dispatch_forward`` made up."""
        if requirements_of(method).differentiable or method == self._compiled_native:
            return False
        name = getattr(method, "__name__", "")
        if self._by_hand is not None:  # its author knows what it does, unless it is one of ours
            return name in registry.PLATFORM_METHODS
        return name != NATIVE

    def _notes(self) -> tuple[str, ...]:
        notes = []
        if type(self).dispatch_forward is not CustomOp.dispatch_forward:
            notes.append(f"{type(self).__qualname__} overrides dispatch_forward(), which has the last word")
        if self._by_hand is not None:
            notes.append("_forward_method was assigned by hand and is called on every device")
        return tuple(notes)

    def _lead_tensor(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The tensor whose device and dtype decide: the op's lead argument, else the first tensor there is."""
        lead = args[self.lead] if len(args) > self.lead else kwargs.get(self._lead_name or "")
        if isinstance(lead, Tensor):
            return lead
        tensors = _tensors_in(args) or _tensors_in(kwargs.values())
        return tensors[0] if tensors else None

    def _fall_back(
        self, route: Route, refusal: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[..., Any]:
        method = route.decision.method
        if self._strict and refusal is not NO_BACKWARD:
            self._refuse_strictly(method or "", refusal)
        for name in route.decision.fallbacks or (NATIVE,):
            needs = requirements_of(getattr(type(self), name))
            if refusal is NO_BACKWARD and name != NATIVE and not needs.differentiable:
                continue
            refused = needs.when is not None and needs.when(self, *args, **kwargs) is not None
            if registry.implemented(type(self), name) and not refused:
                return route.refuse(getattr(self, name), refusal)
        raise NotImplementedError(
            f"{route.decision.op}: {method} cannot take this call (it {refusal}), and no other method can. Define "
            "forward_native, the definition that takes every call."
        )

    def _refuse_strictly(self, method: str, refusal: str) -> None:
        op = getattr(type(self), "name", type(self).__name__)
        raise KernelRefusedError(
            f"{op}.{method} cannot take this call: it {refusal}. Under strict=True there is no fall-back; change the "
            f"input, or disable the op with '-{op}'."
        )

    def _needs_grad(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if forward_ad._current_level >= 0:  # whether a tensor carries a tangent is not cheap to ask
            return True
        tensors = [*_tensors_in(args), *_tensors_in(kwargs.values()), *self.parameters()]
        return any(t.requires_grad for t in tensors)

    def _check_devices(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.anywhere:
            args = tuple(arg for i, arg in enumerate(args) if i not in self._anywhere_at)
            kwargs = {name: arg for name, arg in kwargs.items() if name not in self.anywhere}
        tensors = [*_tensors_in(args), *_tensors_in(kwargs.values()), *_tensors_in([self])]
        if any(t.device != tensors[0].device for t in tensors):
            self._raise_two_devices(args, kwargs)

    def _raise_two_devices(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = {f"argument {i}": a for i, a in enumerate(args)} | kwargs
        named |= dict(self.named_parameters()) | dict(self.named_buffers())
        where = ", ".join(f"{n} on {t.device}" for n, v in named.items() for t in _tensors_in([v]))
        raise DeviceMismatchError(
            f"{getattr(self, 'name', type(self).__name__)} got tensors on two devices: {where}. Move them to one "
            "device."
        )

    # -- compilation of a disabled op --------------------------------------------------------------------------------

    def _compiles_native(self) -> bool:
        return self._compile_native and self._config.compiles and self._config.backend != "eager"

    def _native_compiled(self) -> Callable[..., Any]:
        if self._compiled_native is None:
            self._compiled_native = torch.compile(self.forward_native, backend=self._config.backend, dynamic=True)
        return self._compiled_native

    # -- life of the object ------------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, Tensor):  # a parameter or buffer that may lie elsewhere
            self._routes = {}

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        # Moved or cast parameters: what was decided for the old device or dtype may not hold.
        self._routes = {}
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_routes": {}, "_compiled_native": None, "_counted": None}
        state.pop("_compiled_call_impl", None)
        return state

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copyreg.__newobj__, (type(self),), self.__getstate__()  # type: ignore[attr-defined]


_forward = CustomOp.forward


def _tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Every tensor of a call: arguments, what lists and dicts hold, and the weights of modules passed along."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, nn.Module):
            found.extend(value.parameters())
            found.extend(value.buffers())
        elif isinstance(value, (list, tuple)):
            found.extend(_tensors_in(value))
        elif isinstance(value, dict):
            found.extend(_tensors_in(value.values()))
    return found


def _has_memory(tensor: Tensor) -> bool:
    """False for subclasses that take over every operation (FakeTensor, DTensor): their address means nothing."""
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__

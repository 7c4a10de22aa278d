"""The two registries: in-tree ops by registered name, out-of-tree (OOT) replacements by in-tree class name.

``CustomOp.op_registry`` and ``CustomOp.op_registry_oot`` are the dictionaries of this module. Classes are told apart by
their origin (module and qualified name), never by their bare ``__name__``.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import heritage
from .errors import RegistrationError, did_you_mean

PLATFORM_METHODS = (
    "forward_cpu",
    "forward_cuda",
    "forward_hip",
    "forward_xpu",
    "forward_tpu",
    "forward_oot",
)

op_registry: dict[str, type] = {}
op_registry_oot: dict[str, type] = {}


@dataclass
class _State:
    """What the two public dictionaries do not say."""

    replacements: dict[str, Replacement] = field(default_factory=dict)  # origin of the in-tree class -> replacement
    pending: dict[str, Pending] = field(default_factory=dict)  # lazy=True, by target name


@dataclass(frozen=True)
class Replacement:
    """An OOT class in force for one in-tree class."""

    target: str
    cls: type
    serial: int
    scope: Callable[[], bool] | None = None
    how: str = "is registered out of tree"


@dataclass(frozen=True)
class Pending:
    """An OOT class that waits for its target to be registered."""

    cls: type
    scope: Callable[[], bool] | None = None


_state = _State()
_ever: weakref.WeakSet[type] = weakref.WeakSet()  # replacements, also past ones, of which objects may be left
_watchers: list[list[type]] = []
_here: contextvars.ContextVar[Mapping[str, type | None]] = contextvars.ContextVar("opmux_replacements", default={})  # noqa: B039
_serials = itertools.count(1)
_catalogues: list[str] = []
_loaded: set[str] = set()


def next_serial() -> int:
    """A number that orders registrations and constructions in time."""
    return next(_serials)


def origin(cls: type) -> str:
    """Module and qualified name, for messages and as a key."""
    return f"{cls.__module__}.{cls.__qualname__}"


def same(one: type, other: type) -> bool:
    """Whether two class objects are one class: reloaded, or its file imported under two module names."""
    if one is other:
        return True
    if one.__qualname__ != other.__qualname__:
        return False
    if "<locals>" in one.__qualname__:  # two functions' classes, or one's second, may have one qualified name
        return _source(one) == _source(other)
    return one.__module__ == other.__module__ or None is not _source(one)[0] == _source(other)[0]


def _source(cls: type) -> tuple[str | None, int]:
    """File and line of the first function that ``cls`` defines."""
    codes = (getattr(value, "__code__", None) for value in vars(cls).values())
    return next(((code.co_filename, code.co_firstlineno) for code in codes if code is not None), (None, 0))


# -- the catalogue ---------------------------------------------------------------------------------------------------


def add_catalogue(module: str) -> None:
    """Name a module whose ``load_all()`` registers ops. It is imported when a name is first looked up."""
    if module not in _catalogues:
        _catalogues.append(module)


def load_catalogues() -> None:
    """Import every op of every catalogue, then the plugins. Cheap after the first time."""
    from .plugins import load_general_plugins

    for module in _catalogues:
        if module not in _loaded:
            importlib.import_module(module).load_all()
            _loaded.add(module)
    load_general_plugins()


def known_names() -> dict[str, str]:
    """Every name a directive may use -> the registered name: registered names and their class names."""
    load_catalogues()
    names = {cls.__name__: name for name, cls in op_registry.items()}
    names.update({name: name for name in op_registry})
    return names


def find(name: str) -> type:
    """The in-tree class that goes by ``name`` (registered name or class name)."""
    names = known_names()
    if name not in names:
        raise RegistrationError(f"There is no op {name!r}. {did_you_mean(name, names)}")
    return op_registry[names[name]]


# -- in-tree ---------------------------------------------------------------------------------------------------------


def register(cls: type, name: str, base: type) -> type:
    """Add ``cls`` to the in-tree registry under ``name``."""
    if not isinstance(name, str) or not name.isidentifier() or name != name.lower() or name in ("all", "none"):
        raise RegistrationError(
            f"An op is registered under a snake_case name other than 'all' and 'none'; got {name!r}. Write "
            "@CustomOp.register('my_op')."
        )
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise RegistrationError(
            f"{_describe(cls)} cannot be registered as {name!r}: it is not a subclass of {base.__name__}. Write "
            f"class {getattr(cls, '__name__', 'MyOp')}({base.__name__})."
        )
    for known, other in op_registry.items():
        if same(other, cls):
            if known != name:
                raise RegistrationError(
                    f"{origin(cls)} is registered as {known!r} already and cannot be {name!r} too: directives go by "
                    "one name."
                )
        elif known == name:
            raise RegistrationError(
                f"The op name {name!r} is taken by {origin(other)}; {origin(cls)} needs another name, or register_oot "
                f"to replace {other.__name__}."
            )
        elif cls.__name__ in (other.__name__, known) or name == other.__name__:
            raise RegistrationError(
                f"{origin(cls)} cannot be registered as {name!r}: {origin(other)}, registered as {known!r}, goes by "
                "one of these names, and directives and OOT registrations take class names too. Rename the class."
            )
    check_signatures(cls)
    _note(cls)
    op_registry[name] = cls
    cls.name = name  # type: ignore[attr-defined]
    for key in (name, cls.__name__):
        waiting = _state.pending.pop(key, None)
        if waiting is not None:
            op_registry_oot.pop(key, None)
            _replace(cls, waiting.cls, waiting.scope)
    return cls


def registered_ancestor(cls: type) -> type | None:
    """The nearest class in ``cls``'s ancestry (itself included) that is registered in-tree."""
    return next((a for a in cls.__mro__ if any(same(a, c) for c in op_registry.values())), None)


# -- out of tree -----------------------------------------------------------------------------------------------------


def register_oot(
    cls: type, target: str | type, base: type, *, lazy: bool = False, scope: Callable[[], bool] | None = None
) -> type:
    """Make ``cls`` the replacement of ``target``, an in-tree class, its name, or its registered name."""
    if not isinstance(target, (str, type)):
        raise RegistrationError(
            f"register_oot got the target {target!r}; it takes the name of an op or its class: "
            "@CustomOp.register_oot('RMSNorm')."
        )
    if scope is not None and not callable(scope):
        raise RegistrationError(f"register_oot got scope={scope!r}; it takes a function that returns True or False.")
    in_tree = target if isinstance(target, type) else _resolve(target, lazy)
    if in_tree is not None:
        return _replace(in_tree, cls, scope)
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise RegistrationError(
            f"{_describe(cls)} cannot wait for {target!r}: it is not a subclass of {base.__name__}."
        )
    waiting = _state.pending.get(str(target))
    if waiting is not None and not same(waiting.cls, cls):
        raise RegistrationError(
            f"{origin(waiting.cls)} waits for {target!r} already; {origin(cls)} was not registered. Uninstall one of "
            "the two."
        )
    _note(cls)
    _state.pending[str(target)] = Pending(cls, scope)
    op_registry_oot[str(target)] = cls
    return cls


def replacement_of(cls: type) -> Replacement | None:
    """The replacement in force for exactly this class, never for its subclasses."""
    here = _here.get()
    if here and origin(cls) in here:
        chosen = here[origin(cls)]
        return None if chosen is None else Replacement(cls.__name__, chosen, 0, how="was given to apply for this module")
    found = _state.replacements.get(origin(cls))
    # The public dictionary has the last word: an entry that a caller removed from it is gone.
    if found is None or op_registry_oot.get(found.target) is not found.cls:
        return None
    return found if found.scope is None or found.scope() else None


def replaced(*classes: type) -> bool:
    """Whether one of these in-tree classes has a replacement in force."""
    return any(replacement_of(cls) is not None for cls in classes)


def pending() -> dict[str, type]:
    """Replacements registered with ``lazy=True`` whose target has not appeared."""
    return {target: waiting.cls for target, waiting in _state.pending.items()}


def is_replacement(cls: type) -> bool:
    """Whether ``cls`` (or an ancestor) was registered out of tree. It stays one for objects that outlive a scope."""
    return any(ancestor in _ever for ancestor in cls.__mro__) or any(
        same(ancestor, r.cls) for ancestor in cls.__mro__ for r in _state.replacements.values()
    )


@contextlib.contextmanager
def replacing(classes: Mapping[type, type | None]) -> Iterator[None]:
    """Inside, ops of these in-tree classes are built as the given replacements, or as themselves where it is None.

    Goes before what is registered, for this thread and this async task only.
    """
    for target, cls in classes.items():
        if cls is not None:
            _require_replaces(cls, target)
            cls.name = target.name  # type: ignore[attr-defined]
            _ever.add(cls)
    token = _here.set({**_here.get(), **{origin(target): cls for target, cls in classes.items()}})
    try:
        yield
    finally:
        _here.reset(token)


@contextlib.contextmanager
def watching() -> Iterator[list[type]]:
    """Collect the classes that are registered inside, also those that were registered already."""
    seen: list[type] = []
    _watchers.append(seen)
    try:
        yield seen
    finally:
        _watchers.remove(seen)


def _note(cls: type) -> None:
    for seen in _watchers:
        seen.append(cls)


@contextlib.contextmanager
def oot_scope() -> Iterator[None]:
    """Undo, on exit, every registration made inside."""
    load_catalogues()  # what is loaded on demand belongs to the process, not to the first scope that needs it
    restore = _snapshot(op_registry, op_registry_oot, _state.replacements, _state.pending)
    try:
        yield
    finally:
        restore()


@contextlib.contextmanager
def all_or_nothing() -> Iterator[None]:
    """Undo the replacements made inside if it ends in an exception: a plugin that is skipped leaves none in force."""
    restore = _snapshot(op_registry_oot, _state.replacements, _state.pending)
    try:
        yield
    except BaseException:
        restore()
        raise


def _snapshot(*tables: dict[str, Any]) -> Callable[[], None]:
    saved = [dict(table) for table in tables]

    def restore() -> None:
        for table, old in zip(tables, saved, strict=True):
            table.clear()
            table.update(old)
        heritage.publish(_state.replacements)

    return restore


def _resolve(target: str, lazy: bool) -> type | None:
    for name, cls in op_registry.items():
        if target in (name, cls.__name__):
            return cls
    names = known_names()  # imports the catalogue only when the name is not there yet
    if target in names:
        return op_registry[names[target]]
    if lazy:
        return None
    raise RegistrationError(
        f"There is no op {target!r} to replace. {did_you_mean(target, names)} If its module is imported later, "
        "pass lazy=True."
    )


def _require_replaces(cls: type, in_tree: type) -> None:
    """Raise if ``cls`` cannot stand where ``in_tree`` is asked for."""
    if not isinstance(cls, type) or not any(same(ancestor, in_tree) for ancestor in cls.__mro__):
        raise RegistrationError(
            f"{_describe(cls)} cannot replace {origin(in_tree)}: a replacement must be a subclass of the class that it "
            f"replaces. Write class {getattr(cls, '__name__', 'MyOp')}({in_tree.__name__})."
        )
    if same(cls, in_tree):
        raise RegistrationError(f"{origin(cls)} cannot replace itself. Derive a class from it and register that.")
    check_signatures(cls)


def _replace(in_tree: type, cls: type, scope: Callable[[], bool] | None) -> type:
    _require_replaces(cls, in_tree)
    if registered_ancestor(in_tree) is None:
        raise RegistrationError(
            f"{origin(in_tree)} is not registered in-tree, nor is an ancestor, so nothing can replace it. Register it "
            "first with @CustomOp.register('name')."
        )
    for name, other in op_registry.items():
        if same(other, cls):
            raise RegistrationError(
                f"{origin(cls)} is registered in-tree as {name!r}, and a replacement goes by the name of what it "
                "replaces. Register it in one way only."
            )
        if other.__name__ == in_tree.__name__ and not same(other, in_tree):
            raise RegistrationError(
                f"{origin(in_tree)} cannot be replaced: the class name {in_tree.__name__} belongs to {origin(other)}. "
                "Rename the class."
            )
    taken = op_registry_oot.get(in_tree.__name__)
    if taken is not None and not same(taken, cls):
        raise RegistrationError(
            f"{in_tree.__name__} already has the OOT replacement {origin(taken)}; {origin(cls)} was not registered. "
            "Only one can be in force: uninstall one, or scope them with opmux.oot_scope()."
        )
    _note(cls)
    _ever.add(cls)
    cls.name = in_tree.name  # type: ignore[attr-defined]  # directives control both alike, whatever the class says
    op_registry_oot[in_tree.__name__] = cls
    _state.replacements[origin(in_tree)] = Replacement(in_tree.__name__, cls, next_serial(), scope)
    heritage.publish(_state.replacements)
    return cls


def _describe(cls: Any) -> str:
    return origin(cls) if isinstance(cls, type) else repr(cls)


# -- signatures ------------------------------------------------------------------------------------------------------


def check_signatures(cls: type) -> None:
    """Every platform method takes what native takes, every override what it overrides."""
    native = getattr(cls, "forward_native", None)
    if native is not None and implemented(cls, "forward_native"):
        for method in PLATFORM_METHODS:
            found = getattr(cls, method, None)  # None withdraws an inherited method
            if found is not None and not callable(found):
                raise RegistrationError(f"{origin(cls)}.{method} is {found!r}; it must be a method.")
            if found is not None and implemented(cls, method):
                _require_accepts(cls, method, found, "forward_native", native)
    for method in ("forward_native", *PLATFORM_METHODS):
        own = cls.__dict__.get(method)
        if own is None or not callable(own):
            continue
        for ancestor in cls.__mro__[1:]:
            if ancestor.__dict__.get(method) is not None and implemented(ancestor, method):
                where = f"{ancestor.__qualname__}.{method}"
                _require_accepts(cls, method, own, where, ancestor.__dict__[method])
                break


def implemented(cls: type, method: str) -> bool:
    """Whether ``cls`` or an ancestor other than the base class defines ``method``."""
    found = getattr(cls, method, None)
    return callable(found) and not getattr(found, "__opmux_abstract__", False)


def _require_accepts(cls: type, name: str, method: Callable[..., Any], wanted_name: str, wanted: Any) -> None:
    fault = narrower(inspect.signature(method), inspect.signature(wanted))
    if fault is not None:
        raise RegistrationError(
            f"{origin(cls)}.{name}{inspect.signature(method)} accepts less than {wanted_name}"
            f"{inspect.signature(wanted)}: {fault}. Give it the same parameters."
        )


def narrower(have: inspect.Signature, want: inspect.Signature) -> str | None:
    """What ``want`` accepts and ``have`` does not, or None."""
    kinds = inspect.Parameter
    takes_args = any(p.kind is kinds.VAR_POSITIONAL for p in have.parameters.values())
    takes_kwargs = any(p.kind is kinds.VAR_KEYWORD for p in have.parameters.values())
    positional = [p for p in have.parameters.values() if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    wanted = list(want.parameters.values())
    for index, p in enumerate(wanted):
        if p.kind is kinds.VAR_POSITIONAL:
            if not takes_args:
                return f"it has no *{p.name}"
            continue
        if p.kind is kinds.VAR_KEYWORD:
            if not takes_kwargs:
                return f"it has no **{p.name}"
            continue
        mine = have.parameters.get(p.name)
        by_position = p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        if by_position and not (index < len(positional) or takes_args):
            return f"it takes {len(positional)} positional parameters, {p.name!r} is number {index + 1}"
        if by_position and index < len(positional) and positional[index].name != p.name:
            return f"parameter {index + 1} is called {positional[index].name!r}, not {p.name!r}"
        if mine is None and not takes_kwargs and p.kind is not kinds.POSITIONAL_ONLY:
            return f"parameter {p.name!r} is missing"
        if mine is not None and mine.kind is kinds.KEYWORD_ONLY and by_position:
            return f"parameter {p.name!r} cannot be given by position"
        if mine is not None and mine.kind is kinds.POSITIONAL_ONLY and p.kind is not kinds.POSITIONAL_ONLY:
            return f"parameter {p.name!r} cannot be given by name"
        if mine is not None and p.default is not kinds.empty and mine.default is kinds.empty:
            return f"parameter {p.name!r} has no default"
    names = {p.name for p in wanted}
    for p in have.parameters.values():
        named = p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
        if named and p.name not in names and p.default is kinds.empty:
            return f"its extra parameter {p.name!r} has no default"
    return None

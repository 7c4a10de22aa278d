"""Which ops are on: the directives ``all``, ``none``, ``+op``, ``-op``, where they came from, and their scope."""

from __future__ import annotations

import contextlib
import contextvars
import enum
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import heritage, registry
from .decide import Verdict
from .errors import ConfigError, DirectiveError, did_you_mean

ENVIRONMENT = "OPMUX_COMPILATION_CONFIG"
FILE_ENVIRONMENT = "OPMUX_CONFIG"
FIELDS = ("custom_ops", "backend", "mode", "mm_encoder", "strict")
DEFAULT_SOURCE = "default"
CHANGED_SOURCE = "changed after construction"


class CompilationMode(enum.IntEnum):
    """How the model is compiled, with vLLM's numbers."""

    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


@dataclass(frozen=True)
class Directives:
    """A checked list of directives, by registered names."""

    base: str | None
    plus: frozenset[str]
    minus: frozenset[str]


def split(custom_ops: str | Sequence[str]) -> list[str]:
    """The entries of any accepted form: a list, a tuple, one string, or items that are comma-joined."""
    items = [custom_ops] if isinstance(custom_ops, str) else custom_ops
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
        raise DirectiveError(
            f"custom_ops is {custom_ops!r}; it takes a list of strings or one comma-joined string, such as "
            "['none', '+rms_norm']."
        )
    return [entry.strip() for item in items for entry in item.split(",")] if items else []


def parse(custom_ops: str | Sequence[str]) -> Directives:
    """Check every entry and resolve its name."""
    entries = split(custom_ops)
    bases = [entry for entry in entries if entry in ("all", "none")]
    if len(bases) > 1:
        raise DirectiveError(
            f"custom_ops {entries!r} has {' and '.join(repr(b) for b in bases)}: give one base mode, 'all' or 'none'."
        )
    names: dict[str, dict[str, str]] = {"+": {}, "-": {}}
    for entry in entries:
        if entry in ("all", "none"):
            continue
        if len(entry) < 2 or entry[0] not in "+-" or not entry[1:].isidentifier():
            raise DirectiveError(_syntax(entry))
        known = registry.known_names()
        if entry[1:] not in known:
            raise DirectiveError(
                f"custom_ops entry {entry!r}: there is no op {entry[1:]!r}. {did_you_mean(entry[1:], known)}"
            )
        names[entry[0]][known[entry[1:]]] = entry
    for both in names["+"].keys() & names["-"].keys():
        raise DirectiveError(
            f"custom_ops has {names['+'][both]!r} and {names['-'][both]!r}: the op {both!r} is either on or off. "
            "Remove one of them."
        )
    return Directives(bases[0] if bases else None, frozenset(names["+"]), frozenset(names["-"]))


def _syntax(entry: str) -> str:
    hint = ""
    if entry.lower() in ("all", "none"):
        hint = f" Did you mean {entry.lower()!r}?"
    elif entry.isidentifier():
        known = registry.known_names()
        hint = (
            f" Did you mean '+{entry}' or '-{entry}'?"
            if entry in known
            else f" {did_you_mean(entry, [*known, 'all', 'none'])}"
        )
    elif entry[:1] in ("+", "-") and entry[1:].strip() in registry.known_names():
        hint = f" Did you mean {entry[0] + entry[1:].strip()!r}?"
    elif "*" in entry:
        hint = (
            " There are no wildcards: name each op; a subclass that is not registered follows its parent's directive."
        )
    elif entry[:1] in "[{":
        hint = " A list written as JSON must be parsed first."
    return f"custom_ops entry {entry!r} is not a directive. Directives are 'all', 'none', '+op' and '-op'.{hint}"


class CompilationConfig:
    """The setting of one model: directives, compiler backend and mode.

    Args:
        custom_ops: directives: a list, a tuple, or comma-joined. Without a base mode ``base_mode`` says which holds.
        backend: ``"eager"``, ``"inductor"``, or another backend of ``torch.compile``.
        mode: a ``CompilationMode`` or its number.
        mm_encoder: directives of its own for the multimodal encoder (a list, a dict of fields, or a config); without
            it the encoder's attention and rope are always enabled.
        strict: raise where a kernel refuses a call, instead of falling back.

    ``sources`` says for each field where its value came from. ``enabled_custom_ops`` and ``disabled_custom_ops`` count
    the ops that were built under this config. Configs pickle, so workers get what their parent had.
    """

    def __init__(
        self,
        custom_ops: str | Sequence[str] | None = None,
        backend: str | None = None,
        mode: int | CompilationMode | None = None,
        mm_encoder: CompilationConfig | Mapping[str, Any] | Sequence[str] | str | None = None,
        strict: bool | None = None,
    ) -> None:
        given = {"custom_ops": custom_ops, "backend": backend, "mode": mode, "mm_encoder": mm_encoder, "strict": strict}
        self._checked: tuple[tuple[str, ...], Directives] | None = None
        self.backend: str = backend  # type: ignore[assignment]  # __setattr__ checks and converts each field
        self.mode: CompilationMode = mode  # type: ignore[assignment]
        self.strict: bool = strict  # type: ignore[assignment]
        self.enabled_custom_ops: Counter[str] = Counter()
        self.disabled_custom_ops: Counter[str] = Counter()
        self.custom_ops: list[str] = [] if custom_ops is None else custom_ops  # type: ignore[assignment]
        self.mm_encoder: CompilationConfig | None = mm_encoder  # type: ignore[assignment]
        self.sources: dict[str, str] = {
            name: DEFAULT_SOURCE if value is None else "argument" for name, value in given.items()
        }
        self.directives()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FIELDS:
            value = _CHECKS[name](value)
            if "sources" in self.__dict__:
                self.sources[name] = CHANGED_SOURCE
        elif name not in _STATE:
            raise ConfigError(f"CompilationConfig has no field {name!r}. {did_you_mean(name, FIELDS)}")
        super().__setattr__(name, value)

    @classmethod
    def resolve(
        cls,
        argument: Mapping[str, Any] | None = None,
        cli: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
        file: str | os.PathLike[str] | None = None,
    ) -> CompilationConfig:
        """Merge the places a setting can stand in: argument > command line > environment > file > default."""
        environ = os.environ if environ is None else environ
        path = file or environ.get(FILE_ENVIRONMENT)
        layers: list[tuple[str, Mapping[str, Any]]] = []
        if path:
            layers.append((f"file {os.fspath(path)}", _read_file(Path(path))))
        if environ.get(ENVIRONMENT):
            layers.append((f"environment {ENVIRONMENT}", _read_environment(environ[ENVIRONMENT])))
        layers.append(("command line", _mapping(cli or {}, "the command line's compilation_config")))
        layers.append(("argument", _mapping(argument or {}, "the argument compilation_config")))
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for source, layer in layers:
            for name, value in layer.items():
                if name not in FIELDS:
                    raise ConfigError(
                        f"compilation_config has no field {name!r} ({source}). {did_you_mean(name, FIELDS)}"
                    )
                if value is not None:
                    values[name], sources[name] = value, source
        try:
            config = cls(**values)
        except (ConfigError, DirectiveError) as error:
            places = ", ".join(f"{name} from {source}" for name, source in sources.items())
            raise type(error)(f"{error} ({places})") from None
        config.sources.update(sources)
        return config

    def directives(self) -> Directives:
        """The directives, checked again if the list was changed since."""
        now = tuple(split(self.custom_ops))
        if self._checked is None or self._checked[0] != now:
            if self._checked is not None:
                self.sources["custom_ops"] = CHANGED_SOURCE
            self._checked = now, parse(now)
        return self._checked[1]

    def base_mode(self) -> tuple[str, str]:
        """``all`` or ``none``, and the sentence that says why."""
        base = self.directives().base
        if base is not None:
            return base, f"'{base}' is given"
        if self.backend == "inductor" and self.mode != CompilationMode.NONE:
            return "none", (
                f"no base mode is given, and the default is 'none' under backend 'inductor' with mode {self.mode.name}"
            )
        return (
            "all",
            f"no base mode is given, and the default is 'all' under backend {self.backend!r} with mode "
            f"{self.mode.name}",
        )

    def verdict(self, name: str | None) -> Verdict:
        """Whether the op with this registered name is enabled, and by what. None: an op with no registered ancestor."""
        directives = self.directives()
        source = self.sources["custom_ops"]
        if name in directives.minus:
            return Verdict(False, f"'-{name}' is given", source)
        if name in directives.plus:
            return Verdict(True, f"'+{name}' is given", source)
        base, why = self.base_mode()
        return Verdict(base == "all", why, source if directives.base is not None else DEFAULT_SOURCE)

    def is_custom_op_enabled(self, name: str) -> bool:
        """Whether ``name`` (registered name or class name) is enabled; an unknown name is an error."""
        known = registry.known_names()
        if not isinstance(name, str) or name not in known:
            raise DirectiveError(f"There is no op {name!r}. {did_you_mean(name, known)}")
        return self.verdict(known[name]).enabled

    @property
    def compiles(self) -> bool:
        """Whether a model under this config is compiled."""
        return self.mode != CompilationMode.NONE

    def for_encoder(self) -> tuple[CompilationConfig, bool]:
        """The config of the multimodal encoder, and whether its attention and rope are enforced."""
        return (self, True) if self.mm_encoder is None else (self.mm_encoder, False)

    def to_dict(self) -> dict[str, Any]:
        """Fields and sources as plain data."""
        return {
            "custom_ops": list(self.custom_ops),
            "backend": self.backend,
            "mode": int(self.mode),
            "mm_encoder": None if self.mm_encoder is None else self.mm_encoder.to_dict(),
            "strict": self.strict,
            "sources": dict(self.sources),
        }

    def __repr__(self) -> str:
        return f"CompilationConfig(custom_ops={self.custom_ops!r}, backend={self.backend!r}, mode={self.mode.name})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CompilationConfig):
            return NotImplemented
        return {**self.to_dict(), "sources": None} == {**other.to_dict(), "sources": None}

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "parent": heritage.testament()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        heritage.inherit(state["parent"])
        self.__dict__.update({name: value for name, value in state.items() if name != "parent"})


def _checked_backend(backend: str | None) -> str:
    if backend is None:
        return "eager"
    if not isinstance(backend, str) or not backend:
        raise ConfigError(f"backend is {backend!r}; it takes a name such as 'eager' or 'inductor'.")
    return backend


def _checked_mode(mode: int | str | CompilationMode | None) -> CompilationMode:
    if mode is None:
        return CompilationMode.NONE
    modes = ", ".join(f"{m.value} ({m.name})" for m in CompilationMode)
    try:
        if isinstance(mode, str) and not mode.isdigit():
            return CompilationMode[mode.upper()]
        if isinstance(mode, (bool, float)):
            raise ValueError
        return CompilationMode(int(mode))
    except (KeyError, ValueError, TypeError):
        raise ConfigError(f"mode is {mode!r}; there are {modes}.") from None


def _checked_strict(strict: bool | None) -> bool:
    if strict not in (None, True, False):
        raise ConfigError(f"strict is {strict!r}; it takes true or false.")
    return bool(strict)


def _encoder_config(value: Any) -> CompilationConfig | None:
    if value is None or isinstance(value, CompilationConfig):
        return value
    if isinstance(value, Mapping):
        unknown = [name for name in value if name not in FIELDS and name != "sources"]
        if unknown:
            raise ConfigError(f"mm_encoder has no field {unknown[0]!r}. {did_you_mean(unknown[0], FIELDS)}")
        return CompilationConfig(**{name: v for name, v in value.items() if name != "sources"})
    try:
        return CompilationConfig(custom_ops=value)
    except DirectiveError as error:
        raise DirectiveError(f"mm_encoder: {error}") from None


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "custom_ops": split,
    "backend": _checked_backend,
    "mode": _checked_mode,
    "mm_encoder": _encoder_config,
    "strict": _checked_strict,
}
_STATE = ("sources", "enabled_custom_ops", "disabled_custom_ops", "_checked")


def _read_environment(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f'{ENVIRONMENT} is not JSON ({error}): {text!r}. Example: {{"custom_ops": ["none"]}}.'
        ) from None
    return _mapping(value, f"{ENVIRONMENT}")


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The config file {path} cannot be read: {error.strerror}.") from None
    try:
        value = json.loads(text) if path.suffix == ".json" else _yaml(text)
    except ValueError as error:
        raise ConfigError(f"The config file {path} cannot be parsed: {error}") from None
    value = _mapping(value, str(path))
    return _mapping(value.get("compilation_config", {}), f"compilation_config in {path}")


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} holds {value!r}; it takes a mapping of {', '.join(FIELDS)}.")
    return value


# -- the config in force ---------------------------------------------------------------------------------------------

_current: contextvars.ContextVar[CompilationConfig | None] = contextvars.ContextVar("opmux_config", default=None)
_outside: tuple[tuple[str | None, str | None], CompilationConfig] | None = None


def current_config() -> CompilationConfig:
    """The config of the innermost ``use_config``; outside any, the environment's or the default one."""
    return _current.get() or _outside_config()


def _outside_config() -> CompilationConfig:
    global _outside
    key = os.environ.get(ENVIRONMENT), os.environ.get(FILE_ENVIRONMENT)
    if _outside is None or _outside[0] != key:
        _outside = key, CompilationConfig.resolve()
    return _outside[1]


@contextlib.contextmanager
def use_config(config: CompilationConfig) -> Iterator[CompilationConfig]:
    """Build ops under ``config``. Nests; holds for this thread and this async task only."""
    if not isinstance(config, CompilationConfig):
        raise ConfigError(
            f"use_config takes a CompilationConfig, not {config!r}. Write CompilationConfig(custom_ops=[...])."
        )
    token = _current.set(config)
    try:
        yield config
    finally:
        _current.reset(token)

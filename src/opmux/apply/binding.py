"""A module whose ``forward`` is ours: how it is bound, when it steps aside, how it is undone.

A binding is a plain object. Its ops are therefore no children of the module: ``state_dict``, ``named_modules``,
``save_pretrained`` and ``.to()`` see the module as it was. ``module.forward`` is a bound method of the binding, which
``copy.deepcopy`` and pickle follow, so that a copied model has bindings and ops of its own.
"""

from __future__ import annotations

import copy
import inspect
import operator
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core.custom_op import CustomOp
from ..core.tracing import constant

if TYPE_CHECKING:
    from .linears import Merged

_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled


class Binding:
    """Base of all bindings.

    A subclass sets ``parts`` (the modules that its fast path bypasses), gives ``ops`` and overrides ``forward``, which
    begins with :meth:`steps_aside`.

    Attributes:
        module: the module that was bound.
        parts: what the fast path relies on, as (the dictionary that holds the child, its name, the child). A child
            that was replaced later (a LoRA wrapper, say) makes the binding step aside.
        merged: merged weights that the fast path reads.
    """

    def __init__(self, module: Any, parts: list[tuple[dict[str, Any], str, nn.Module]] | None = None) -> None:
        self.module = module
        self.parts = parts or []
        self.merged: list[Merged] = []
        self._watch()

    def _watch(self) -> None:
        inside = {id(m): m for _, _, part in self.parts for m in part.modules()}.values()
        self.hooks = [hooks for m in inside for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        # One lookup for all children of a module, since this is asked at every call.
        holders = {id(holder): holder for holder, _, _ in self.parts}
        self.children = []
        for key, holder in holders.items():
            names = [name for h, name, _ in self.parts if id(h) == key]
            get = operator.itemgetter(*names)
            self.children.append((get, holder, get(holder)))
        self.key = _register(self)

    def ops(self) -> Iterator[tuple[str, CustomOp, str]]:
        """(path below the module, op, note) for the report."""
        return iter(())

    def sample(self, op: CustomOp) -> tuple[Any, ...]:
        """Arguments with which to ask ``op`` for its decision: none where its own parameters say device and dtype."""
        own = next(self.module.parameters(), None)
        return () if own is None or next(op.parameters(), None) is not None else (own.detach(),)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the module's class."""
        return type(self.module).forward(self.module, *args, **kwargs)

    def steps_aside(self, *inputs: Any) -> bool:
        """Whether the module's own forward must run: training, a gradient, autocast, a hook inside, a part replaced."""
        if self.module.training or (_grad_enabled() and self.needs_grad(*inputs)) or autocasts():
            return True
        if _compiling():
            return not _ready_while_tracing(self.key)
        return not self.ready()

    def ready(self) -> bool:
        """Whether the parts are in place and no hook waits inside. Every call passes here: keep it short."""
        try:
            for get, holder, expected in self.children:
                if get(holder) != expected:
                    return False
        except KeyError:
            return False
        if any(self.hooks) and not all(map(idle, self.hooks)):
            return False
        return all(merged.fresh() for merged in self.merged)

    def gather(self, *inner: Binding) -> None:
        """Watch what the bindings inside watch, too, in one loop each."""
        self.children += [entry for binding in inner for entry in binding.children]
        self.merged += [merged for binding in inner for merged in binding.merged]

    def needs_grad(self, *inputs: Any) -> bool:
        """Whether an input or a parameter needs a gradient."""
        return any(isinstance(x, Tensor) and x.requires_grad for x in inputs) or any(
            p.requires_grad for p in self.module.parameters()
        )

    def bind(self) -> None:
        """Put the binding's forward in place of the module's."""
        self.module.forward = self.forward

    def unbind(self) -> None:
        """Give the module its class's forward back."""
        self.module.__dict__.pop("forward", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Binding:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__dict__, memo))
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.key = _register(self)


def autocasts() -> bool:
    """Whether torch.autocast chooses dtypes now, which kernels know nothing of."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def bound(module: Any) -> Any:
    """The binding of a module, if it has one."""
    owner = getattr(module.__dict__.get("forward"), "__self__", None) if isinstance(module, nn.Module) else None
    return owner if isinstance(owner, Binding) else None


def share_parameters(op: CustomOp, module: Any) -> None:
    """Let ``op`` use the module's own dictionary of parameters.

    No copy, and whatever replaces a parameter (tying, ``load_state_dict(assign=True)``, a cast) is seen by the op.
    """
    op.__dict__["_parameters"] = module._parameters


def foreign_forward(module: Any) -> str | None:
    """Why the module's forward may not be replaced, or None."""
    if hasattr(module, "_hf_hook"):
        return "is offloaded or dispatched by accelerate (it has an _hf_hook)"
    mine = module.__dict__.get("forward")
    if mine is not None and bound(module) is None:
        return f"its forward was replaced already, by {getattr(mine, '__module__', None) or type(mine).__module__}"
    return None


def parameter_names(module: Any) -> list[str]:
    """The names of the arguments of the forward of the module's class, without self."""
    return [name for name in inspect.signature(type(module).forward).parameters if name != "self"]


def idle(hooks: dict[int, Any]) -> bool:
    """Whether every hook is one that transformers left behind to capture outputs, while nothing is captured."""
    if not hooks:
        return True
    from transformers.utils import output_capturing

    if output_capturing._active_collector.get():
        return False
    return all(getattr(hook, "__module__", None) == output_capturing.__name__ for hook in hooks.values())


_bindings: weakref.WeakValueDictionary[int, Binding] = weakref.WeakValueDictionary()
_next_key = 0


def _register(binding: Binding) -> int:
    global _next_key
    _next_key += 1
    _bindings[_next_key] = binding
    return _next_key


@constant
def _ready_while_tracing(key: int) -> bool:
    # Asked once, while the compiler traces: hooks and replaced parts are judged as they are then, without a guard each.
    return _bindings[key].ready()

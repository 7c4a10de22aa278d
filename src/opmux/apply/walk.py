"""``apply`` and ``unapply``: walk the model from its leaves to its stack, put bindings in, write the report."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from ..core import registry
from ..core.config import CompilationConfig, CompilationMode, current_config, use_config
from ..core.errors import OpmuxError, UsageError
from ..ops.embedding.vocab_parallel_embedding import VocabParallelEmbedding
from . import activations, attention, convs, embeddings, interface, layers, linears, mlp, norms, shards
from .binding import Binding, foreign_forward
from .replacements import Oot, Replacements
from .report import Report
from .rope import find_rotaries, nearest

_STATE = "_opmux"


class NotAppliedError(OpmuxError):
    """``strict=True``, and something in the model was left as it is."""


class NothingAppliedWarning(UserWarning):
    """No module of the model was replaced."""


class _Applied:
    """What was done to a model, kept on it so that it can be undone."""

    def __init__(self, settings: tuple[Any, ...], report: Report) -> None:
        self.settings = settings
        self.report = report
        self.bindings: list[Binding] = []
        self.compiled = False


def apply(
    model: nn.Module,
    config: CompilationConfig | None = None,
    strict: bool = False,
    fuse: bool = True,
    *,
    oot: Oot | None = None,
) -> Report:
    """Put opmux's ops into a transformers model.

    Modules are recognised by their structure and by running them against the ops' formulas on random input, and are
    replaced one by one by binding their ``forward``: parameters, ``state_dict``, hooks and ``save_pretrained`` stay as
    they are, and other models of the same class are not touched. Applying again with the same settings does nothing;
    with others it starts anew.

    Args:
        model: any ``nn.Module``; transformers' decoders are where it finds most.
        config: directives, backend and mode; None means the config in force.
        strict: raise if anything that has an op was left as it is.
        fuse: merge q, k and v, and gate and up, and run layers whole.
        oot: replacements for this model alone, before the registered ones: ``{"RMSNorm": VendorNorm}``, ``{"RMSNorm":
            None}`` for the op's own class, ``{"RMSNorm": {"model.layers": VendorNorm}}`` for what lies below a module.

    Returns: what was done and what was not, with reasons.
    Raises:  NotAppliedError under ``strict``; RegistrationError for a class in ``oot`` that cannot replace its op;
             UsageError for a module that the model does not have. The model is then as it was.
    Warns:   NothingAppliedWarning if nothing was replaced.
    """
    config = current_config() if config is None else config
    if not isinstance(config, CompilationConfig):
        raise UsageError(f"apply takes a CompilationConfig, not {config!r}. Write CompilationConfig(custom_ops=[...]).")
    replacements = Replacements(oot, (path for path, _ in model.named_modules()))
    settings = (config, fuse, replacements.places)
    before: _Applied | None = model.__dict__.get(_STATE)
    if before is not None and before.settings == settings:
        _insist(before.report, strict)
        return before.report
    unapply(model)
    report = Report(_directives(config), config.sources)
    applied = _Applied(settings, report)
    try:
        with torch.no_grad():
            _Walk(model, config, fuse, replacements, applied).run()
        report.start_counting()
        _note_unused(report, config)
        _insist(report, strict)
        report.compile = _compile(model, config, applied)
    except BaseException:
        _undo(model, applied)
        raise
    model.__dict__[_STATE] = applied
    if not applied.bindings:
        warnings.warn(
            f"opmux replaced nothing in this {type(model).__name__}. print(report) says what it looked at and why.",
            NothingAppliedWarning, stacklevel=2,
        )  # fmt: skip
    return report


def unapply(model: nn.Module) -> None:
    """Give every module its own forward back. Merged weights stay views of one buffer, with the same values."""
    applied = model.__dict__.pop(_STATE, None)
    if applied is not None:
        _undo(model, applied)


class _Walk:
    """One pass per kind of module, from leaves to the whole, since the larger ones are made of the smaller."""

    def __init__(
        self, model: nn.Module, config: CompilationConfig, fuse: bool, replacements: Replacements, applied: _Applied
    ) -> None:
        self.model, self.fuse, self.replacements, self.applied = model, fuse, replacements, applied
        self.config = config
        self.encoder_config, self.enforced = config.for_encoder()
        self.encoders = _encoders(model)
        self.uses = linears.Uses(model)
        self.rotaries = find_rotaries(model)
        self.wrappers = {n for n, m in model.named_modules() if hasattr(m, "base_layer")}
        self.bound: set[int] = set()

    def run(self) -> None:
        head = _output_embeddings(self.model)
        self._pass(norms.looks_like_norm, lambda m, at: norms.find_norm(m), norms.op_name)
        self._pass(mlp.looks_like_mlp, lambda m, at: mlp.find_mlp(m, self.uses, at.config, self.fuse), mlp.op_name)
        if self.fuse:
            self._pass(attention.looks_like_attention, self._attention, "attention")
            self._pass(layers.looks_like_layer, lambda m, at: layers.find_layer(m, at.rotary), "layer")
        self._pass(
            interface.asks_its_config, lambda m, at: interface.find_interface(m, at.rotary, at.enforced), "attention"
        )
        self._pass(lambda m: m is head, lambda m, at: embeddings.find_head(m), "logits_processor")
        self._pass(
            lambda m: isinstance(m, (nn.Embedding, VocabParallelEmbedding, shards.ShardedEmbedding)),
            lambda m, at: embeddings.find_embedding(m),
            "vocab_parallel_embedding",
        )
        self._pass(convs.looks_like_conv, lambda m, at: convs.find_conv(m), convs.op_name)
        covered = {id(part) for b in self.applied.bindings for _, _, part in b.parts}
        self._pass(lambda m: _is_linear(m) and id(m) not in covered, self._linear, "replicated_linear")
        self._pass(
            lambda m: id(m) not in covered and activations.looks_like_activation(m),
            lambda m, at: activations.find_activation(m),
            "activation",
        )
        if self.fuse and any(isinstance(b, layers.LayerBinding) for b in self.applied.bindings):
            from . import models  # needs transformers, as such a model does

            self._pass(models.looks_like_model, lambda m, at: models.find_model(m), "model")

    def _pass(self, looks: Any, find: Any, op: Any) -> None:
        for path, module in self.model.named_modules():
            if id(module) in self.bound or not looks(module):
                continue
            in_encoder = not self.encoders.isdisjoint(_ancestry(path))
            at = _Place(path, self.encoder_config if in_encoder else self.config, in_encoder and self.enforced, self)
            with use_config(at.config), registry.replacing(self.replacements.at(path)):
                found = foreign_forward(module) or find(module, at)
            if isinstance(found, str):
                name = op if isinstance(op, str) else op(module)
                self.applied.report.skipped(path, name, type(module).__qualname__, found)
            else:
                found.bind()
                self.bound.add(id(module))
                self.applied.bindings.append(found)
                self._record(path, found)

    def _record(self, path: str, binding: Binding) -> None:
        if not list(binding.ops()):  # a layer or a stack, whose ops are those of the modules inside
            self.applied.report.whole.append(path)
        for below, op, note in binding.ops():
            self.applied.report.applied(".".join(part for part in (path, below) if part), op, note, binding.sample(op))

    def _attention(self, module: Any, at: _Place) -> Any:
        return attention.find_attention(module, self.uses, at.rotary, at.enforced)

    def _linear(self, module: Any, at: _Place) -> Any:
        wrapper = next((w for w in _ancestry(at.path)[:-1] if w in self.wrappers), None)
        if wrapper is not None:
            return f"is part of {wrapper}, which is LoRA-wrapped"
        return linears.untouchable(module) or shards.find_shard(module) or linears.LinearBinding(module)


class _Place:
    """Where in the model a module is, and what follows from that."""

    def __init__(self, path: str, config: CompilationConfig, enforced: bool, walk: _Walk) -> None:
        self.path, self.config, self.enforced = path, config, enforced
        self._walk = walk

    @property
    def rotary(self) -> nn.Module | None:
        """The module that makes the rotary tables here."""
        return nearest(self._walk.rotaries, self.path)


def _ancestry(path: str) -> list[str]:
    """The path and those of what holds it, the outermost first, without the model itself."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _is_linear(module: Any) -> bool:
    return isinstance(module, nn.Linear) or (hasattr(module, "in_features") and hasattr(module, "out_features"))


def _output_embeddings(model: nn.Module) -> nn.Module | None:
    getter = getattr(model, "get_output_embeddings", None)
    try:
        return getter() if getter is not None else None
    except (AttributeError, NotImplementedError):
        return None


def _encoders(model: nn.Module) -> set[str]:
    """Paths of vision and audio towers: sub-models whose config is one of the model's configs but not the text's."""
    config = getattr(model, "config", None)
    names = [n for n in getattr(config, "sub_configs", None) or {} if "text" not in n and "decoder" not in n]
    towers = {type(c) for c in (getattr(config, n, None) for n in names) if c is not None}
    return {path for path, m in model.named_modules() if path and type(getattr(m, "config", None)) in towers}


def _insist(report: Report, strict: bool) -> None:
    left = [e for e in report.entries if e["status"] == "skipped"]
    if strict and (left or not report.entries):
        what = "\n".join(f"  {e['path']} ({e['op']}): {e['reason']}" for e in left) or "  nothing was recognised"
        raise NotAppliedError(
            f"apply(strict=True): these modules were left as they are:\n{what}\nWithout strict=True they keep their "
            "own forward and the rest is replaced."
        )


def _directives(config: CompilationConfig) -> str:
    given = ", ".join(config.custom_ops)
    return given or f"{config.base_mode()[0]} ({config.base_mode()[1]})"


def _note_unused(report: Report, config: CompilationConfig) -> None:
    directives = config.directives()
    present = set(report.counts())
    for sign, names in (("+", directives.plus), ("-", directives.minus)):
        report.unused.extend(
            f"'{sign}{name}': this model contains no {name}" for name in sorted(names) if name not in present
        )


def _compile(model: nn.Module, config: CompilationConfig, applied: _Applied) -> str:
    if not config.compiles:
        return f"not compiled (mode {config.mode.name})"
    model.compile(backend=config.backend, dynamic=True)
    applied.compiled = True
    line = f"compiled by torch.compile(backend={config.backend!r}, dynamic=True)"
    if config.mode == CompilationMode.VLLM_COMPILE:
        line += "; VLLM_COMPILE is vLLM's own pipeline, so the model is compiled the stock way here"
    return line


def _undo(model: nn.Module, applied: _Applied) -> None:
    for binding in reversed(applied.bindings):
        binding.unbind()
    if applied.compiled:
        model._compiled_call_impl = None

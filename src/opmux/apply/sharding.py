"""``shard``: a loaded transformers model over the ranks, by opmux's parallel layers.

Attention is split by heads, an MLP by its inner features, embedding and output projection by the vocabulary. What may be
split is found as ``apply`` finds what it may replace, by structure and numbers: the shards that all ranks would hold of a
module are made one after the other on random weights, and their outputs must add up to the module's own.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import UsageError
from ..distributed import TensorParallel, TensorParallelError, tensor_parallel
from . import attention, probe
from .binding import parameter_names
from .linears import untouchable
from .report import numbered
from .rope import find_rotary
from .shards import HOLDERS, SHARDS
from .splits import Split, by_features, by_heads, split_vocabulary

Run = Callable[[Any], Iterator[Tensor]]  # a module's outputs for some random input

_MOST_RANKS = 1024


@dataclass(frozen=True)
class Sharding:
    """What ``shard`` did.

    Attributes:
        tp: the ranks.
        split: paths of the modules of which each rank holds a part.
        whole: paths of the modules that every rank holds and computes whole, each with its reason.
    """

    tp: TensorParallel
    split: list[str] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"size": self.tp.size, "split": list(self.split), "whole": dict(self.whole)}

    def __str__(self) -> str:
        lines = [f"{len(self.split)} modules split over {self.tp.size} ranks"]
        kept = Counter((numbered(path), why) for path, why in self.whole.items())
        lines += [f"whole on every rank: {path}{f' x{n}' * (n > 1)} {why}" for (path, why), n in kept.items()]
        return "\n".join(lines)


class _Rehearsal(TensorParallel):
    """One rank of several, played in this process: nothing is sent."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x


def shard(model: nn.Module) -> Sharding:
    """Split a transformers model over the ranks in force, in place; each rank keeps its part of the weights only.

    Call it on every rank, on the same loaded model, inside ``init_tensor_parallel`` and before ``apply``. The modules'
    own forward then runs on this rank's heads and features; q, k and v are replaced by ``ColumnParallelLinear``, an
    output projection by ``RowParallelLinear``, and so on. A module that cannot be split stays whole on every rank, which
    gives the same answer. With one rank nothing is done. There is no way back: load the model again.

    Weights are copied out of the model's, so a model that ``from_pretrained`` mapped from safetensors on the CPU, in the
    checkpoint's dtype, costs each rank the memory of its part.

    Raises:
        TensorParallelError: a number of heads or features does not divide by the ranks (the model is as it was);
            nothing can be split; the ranks do not agree on what to split.
        UsageError: the model is sharded already, or ``apply`` was there first.
    """
    tp = tensor_parallel()
    if tp.size == 1:
        return Sharding(tp)
    if any(isinstance(m, (*SHARDS, *HOLDERS)) for m in model.modules()):
        raise UsageError("The model is sharded already. Load it again to shard it otherwise.")
    if "_opmux" in model.__dict__:
        raise UsageError("opmux.apply was here already. Shard first: opmux.unapply(model), shard(model), then apply.")
    with torch.no_grad():
        plan = _Plan(model, tp)
        plan.agree()
        for path, split in plan.splits.items():
            split(model.get_submodule(path), tp)
        vocabulary = split_vocabulary(model, tp, plan.whole)
    if not plan.splits and not vocabulary:
        raise TensorParallelError(
            f"Nothing in this {type(model).__name__} can be split over {tp.size} ranks: "
            + ("; ".join(f"{path} {why}" for path, why in plan.whole.items()) or "no part of it was recognised")
        )
    _note_the_rest(model, plan.whole)
    return Sharding(tp, [*plan.splits, *vocabulary], plan.whole)


def _note_the_rest(model: nn.Module, whole: dict[str, str]) -> None:
    """Weights that nobody looked at are whole, too: experts, say. Vectors (norms, biases) go without saying."""
    for path, module in model.named_modules():
        weights = [p for p in module._parameters.values() if p is not None and p.dim() > 1]
        known = isinstance(module, (*SHARDS, *HOLDERS)) or any(f"{path}.".startswith(f"{w}.") for w in whole)
        if weights and not known:
            whole[path] = f"is a {type(module).__name__}, which opmux does not split"


class _Plan:
    """What will be split, decided before anything is."""

    def __init__(self, model: nn.Module, tp: TensorParallel) -> None:
        self.tp = tp
        self.splits: dict[str, Split] = {}
        self.whole: dict[str, str] = {}
        self._sizes: list[tuple[str, str, Callable[[int], bool]]] = []
        rotary = find_rotary(model)
        for path, module in model.named_modules():
            if attention.looks_like_attention(module):
                self._add(path, _attention(module, tp, rotary))
            elif shapes := _shapes(module):
                self._add(path, _mlp(module, shapes, tp))
        self._insist()

    def _add(self, path: str, found: _Found | str) -> None:
        if isinstance(found, str):
            self.whole[path] = found
        else:
            self._sizes.append((path, found.what, found.fits))
            self.splits[path] = found.split

    def _insist(self) -> None:
        """An error that names the first size that does not divide, and the numbers of ranks that would."""
        for path, what, fits in self._sizes:
            if not fits(self.tp.size):
                *most, last = [str(n) for n in range(1, _MOST_RANKS) if all(fit(n) for _, _, fit in self._sizes)]
                sizes = f"{', '.join(most)} or {last} ranks" if most else "1 rank"
                raise TensorParallelError(
                    f"{path} has {what}, which do not divide by {self.tp.size} tensor-parallel ranks. This model can "
                    f"be split over {sizes}."
                )

    def agree(self) -> None:
        """Every rank must split the same modules, or they would wait for each other for ever."""
        everybody = self.tp.gather_objects(list(self.splits))
        for rank, theirs in enumerate(everybody):
            if theirs != everybody[0]:
                odd = sorted(set(theirs) ^ set(everybody[0]))
                raise TensorParallelError(
                    f"Rank {rank} would split other modules than rank 0: {', '.join(odd[:3])}. Are the model and the "
                    "libraries the same on every rank?"
                )


@dataclass(frozen=True)
class _Found:
    """A module that can be split: how, and over which numbers of ranks."""

    what: str
    fits: Callable[[int], bool]
    split: Split


def _attention(module: Any, tp: TensorParallel, rotary: nn.Module | None) -> _Found | str:
    children, names = module._modules, parameter_names(module)
    for name in (*attention.input_names(children), next(n for n in attention.OUTPUTS if n in children)):
        why = untouchable(children[name])
        if why is not None:
            return f"its {name} {why}"
    sizes = attention.sizes_of(module)
    if sizes is None or "position_embeddings" not in names or not set(names) & set(attention.CACHE_NAMES):
        return "is not an attention with q, k, v and output projections whose sizes opmux can read"
    _, heads, kv_heads = sizes

    def fits(ranks: int) -> bool:
        return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)

    def run(twin: Any) -> Iterator[Tensor]:
        twin.layer_idx = 0
        cache_name = next(name for name in parameter_names(twin) if name in attention.CACHE_NAMES)
        for tables, x, mask, (cache, _) in attention.attention_steps(twin, rotary, 1.0):
            named = {"hidden_states": x, "position_embeddings": tables, "attention_mask": mask, cache_name: cache}
            yield twin(**named)[0]

    what = f"{heads} heads" if kv_heads == heads else f"{heads} heads and {kv_heads} key heads"
    return _rehearsed(module, tp, what, fits, [by_heads(sizes, own) for own in (False, True)], run)


@dataclass(frozen=True)
class _Shape:
    """``down`` is the last layer, of ``inner`` features; the first ones make ``parts`` times as many from ``hidden``."""

    down: str
    hidden: int
    inner: int
    parts: int


def _shapes(module: Any) -> list[_Shape]:
    """How two or three linear layers that are all of the module's parameters may be an MLP; mostly one way or none."""
    named = {n: m for n, m in module._modules.items() if hasattr(m, "in_features") and hasattr(m, "out_features")}
    others = [m for n, m in module._modules.items() if n not in named and m is not None]
    own = any(p is not None for p in module._parameters.values())
    if len(named) not in (2, 3) or own or any(list(m.parameters()) for m in others):
        return []
    shapes = []
    # Of two layers the last one is the last; of three, sizes tell.
    for down in list(reversed(named))[: 1 if len(named) == 2 else 3]:
        first = {(m.in_features, m.out_features) for n, m in named.items() if n != down}
        hidden, rows = next(iter(first))
        parts, odd = divmod(rows, named[down].in_features)
        whole = len(first) == 1 and not odd and hidden == named[down].out_features
        if whole and (parts == 1 or (parts == 2 and len(named) == 2)):
            shapes.append(_Shape(down, hidden, named[down].in_features, parts))
    return shapes


def _mlp(module: Any, shapes: list[_Shape], tp: TensorParallel) -> _Found | str:
    for name, child in module._modules.items():
        why = untouchable(child) if hasattr(child, "in_features") else None
        if why is not None:
            return f"its {name} {why}"
    hidden, inner = shapes[0].hidden, shapes[0].inner

    def fits(ranks: int) -> bool:
        return inner % ranks == 0

    def run(twin: Any) -> Iterator[Tensor]:
        yield twin(probe.random(twin, 7, hidden))

    return _rehearsed(module, tp, f"{inner} inner features", fits, [by_features(s.down, s.parts) for s in shapes], run)


def _rehearsed(
    module: Any, tp: TensorParallel, what: str, fits: Callable[[int], bool], splits: list[Split], run: Run
) -> _Found | str:
    """The module with the split that was seen to work, or why none does."""
    # Where the ranks in force do not fit, others show whether it is a module to split at all.
    ranks = tp.size if fits(tp.size) else next((n for n in range(2, _MOST_RANKS) if fits(n)), 1)
    key = ("shard", ranks, probe.fingerprint(module))
    split = probe.once(key, lambda: _first_that_adds_up(splits, module, ranks, run))
    return split if isinstance(split, str) else _Found(what, fits, split)


def _first_that_adds_up(splits: list[Split], module: nn.Module, ranks: int, run: Run) -> Split | str:
    """The first split whose shards, rank by rank, add up to the module's own outputs; else why none does."""
    why = "the parts that the ranks would hold do not add up to it (compared on random input)"
    for split in splits:
        with probe.quietly():
            try:
                twin = probe.specimen(module, torch.float32)
                wanted = _outputs(run, twin)
                sums = [torch.zeros_like(w) for w in wanted]
                for rank in range(ranks):
                    part = copy.deepcopy(twin)
                    split(part, _Rehearsal(ranks, rank))
                    for total, out in zip(sums, _outputs(run, part), strict=True):
                        total += out
                if all(probe.agrees(a, b) for a, b in zip(sums, wanted, strict=True)):
                    return split
            except Exception as error:  # a module that cannot be rehearsed is a module that stays whole
                why = f"could not be rehearsed ({probe.reason_of(error)})"
    return why


def _outputs(run: Run, twin: Any) -> list[Tensor]:
    torch.manual_seed(1)  # the same input for the whole module and for each part
    return list(run(twin))

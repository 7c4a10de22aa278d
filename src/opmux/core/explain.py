"""``explain``: the decision for an op that is not built, on any platform."""

from __future__ import annotations

import torch

from .. import platforms
from . import registry
from .config import CompilationConfig, current_config
from .custom_op import CustomOp
from .decide import Decision, decide
from .errors import UsageError
from .lineage import lineage_of
from .plugins import load_general_plugins


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
    if not (isinstance(cls, type) and issubclass(cls, CustomOp)):
        raise UsageError(
            f"explain takes an op's name or class, not {op!r}. Write explain('rms_norm'); for an object, "
            "op.decision(x)."
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise UsageError(f"explain got dtype={dtype!r}; it takes a torch.dtype such as torch.bfloat16.")
    if config is not None and not isinstance(config, CompilationConfig):
        raise UsageError(f"explain got config={config!r}; it takes a CompilationConfig(custom_ops=[...]).")
    load_general_plugins()
    facts = platforms.facts_of_platform(platform, dtype, shape)
    verdict = (config or current_config()).verdict(getattr(cls, "name", None))
    return decide(lineage_of(cls), facts, verdict)

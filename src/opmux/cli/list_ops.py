"""Every op: where it has kernels, what would run here, whether it is enabled, and what replaces it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.markup import escape

from . import arguments, tables

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    from .output import Output

PLATFORMS = ("cpu", "cuda", "rocm", "xpu", "tpu", "oot")


def add_arguments(parser: ArgumentParser) -> None:
    """The options of ``opmux list``."""
    parser.add_argument(
        "--platform", metavar="NAME", help="Show what would run there. Left out: the platform of this machine."
    )


def run(args: Namespace, output: Output) -> int:
    """Ask for every op's decision, print."""
    from .. import platforms
    from ..core import registry

    registry.load_catalogues()
    config = args.compilation_config
    platform = arguments.platform_named(args.platform) or platforms.current().platform.name
    ops = [_describe(name, cls, platform, config) for name, cls in sorted(registry.op_registry.items())]
    pending = {target: registry.origin(cls) for target, cls in sorted(registry.pending().items())}
    output.json({"platform": platform, "ops": ops, "pending_replacements": pending, "config": config.to_dict()})
    _print(ops, pending, platform, config, output)
    return 0


def _describe(name: str, cls: type, platform: str, config: Any) -> dict[str, Any]:
    from ..core import registry
    from ..core.config import CompilationConfig
    from ..core.decide import CHAINS, NATIVE
    from ..core.explain import explain
    from ..core.lineage import lineage_of

    decision = explain(cls, platform=platform, config=config)
    # What stands in the way here apart from the directives.
    enabled = explain(cls, platform=platform, config=CompilationConfig(custom_ops=["all"]))
    chosen = lineage_of(cls).chosen
    replacement = registry.replacement_of(cls)
    kernels = {p: [m for m in CHAINS[p] if m != NATIVE and registry.implemented(chosen, m)] for p in PLATFORMS}
    return {
        "name": name,
        "class": cls.__name__,
        "implemented": kernels,
        "enabled": decision.enabled,
        "directive": decision.directive,
        "directive_source": decision.directive_source,
        "runs": decision.method,
        "can_run": enabled.method,
        "rejected": {r.candidate: r.why for r in enabled.rejected if r.candidate != NATIVE},
        "replacement": None if replacement is None else registry.origin(replacement.cls),
    }


def _print(ops: list[dict[str, Any]], pending: dict[str, str], platform: str, config: Any, output: Output) -> None:
    table = tables.plain("op", "class", "kernels for", "enabled", f"runs on {platform}")
    for op in ops:
        where = " ".join(p for p in PLATFORMS if op["implemented"][p]) or "[dim]none[/dim]"
        state = "[green]on[/green]" if op["enabled"] else "[dim]off[/dim]"
        runs = escape(str(op["runs"]))
        if op["enabled"] and op["runs"] == "forward_native":
            runs += "".join(f"\n[dim]not {escape(name)}: {escape(why)}[/dim]" for name, why in op["rejected"].items())
        if not op["enabled"]:
            runs += f"\n[dim]{escape(op['directive'])} ({escape(op['directive_source'])})[/dim]"
        if op["replacement"]:
            runs += f"\nreplaced by {escape(op['replacement'])}"
        table.add_row(op["name"], op["class"], where, state, runs)
    output.print(table)
    for target, cls in pending.items():
        output.print(f"[yellow]pending:[/yellow] {escape(cls)} waits for an op {escape(repr(target))} to be registered")
    tables.print_settings(output, config)

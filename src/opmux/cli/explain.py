"""Why an op runs what it runs: the decision, with every candidate that was rejected.

An OP is decided without running it, for any platform, present or not. For a MODEL, the ops are put in and the report is
shown.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from ..core.errors import UsageError, did_you_mean
from . import arguments, tables

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    from .output import Output


def add_arguments(parser: ArgumentParser) -> None:
    """The options of ``opmux explain``."""
    parser.add_argument(
        "target",
        metavar="OP|MODEL",
        type=str,
        help="An op by registered or class name, or a model: a folder, a .gguf file, a hub name.",
    )
    parser.add_argument(
        "--platform",
        metavar="NAME",
        help="Decide for cpu, cuda, rocm, xpu, tpu, oot or a plugin's platform (ops only).",
    )
    parser.add_argument(
        "--dtype",
        choices=arguments.DTYPES,
        help="Dtype of the input or of the model. A model is loaded in bfloat16 if this is left out.",
    )
    parser.add_argument("--shape", metavar="1x4096", help="Shape of the input (ops only).")
    parser.add_argument("--device", metavar="DEVICE", help="Where the model goes (models only).")


def run(args: Namespace, output: Output) -> int:
    """Explain an op, or a model."""
    from ..core import registry

    names = registry.known_names()
    if args.target in names:
        return _op(args, output, names[args.target])
    from ..tools import models

    named = Path(args.target).expanduser().exists() or "/" in args.target or args.target.endswith(".gguf")
    if not named and args.target != models.DEFAULT_MODEL:
        raise UsageError(
            f"{args.target!r} is neither an op nor a model here. {did_you_mean(args.target, names)} A model is a "
            f"folder, a .gguf file, owner/name on the hub, or {models.DEFAULT_MODEL}."
        )
    return _model(args, output)


def _op(args: Namespace, output: Output, name: str) -> int:
    from ..core.explain import explain

    if args.device is not None:
        raise UsageError("--device goes with a model; for an op, say --platform.")
    dtype = None if args.dtype is None else arguments.dtype_named(args.dtype)
    shape = arguments.shape_named(args.shape)
    platform = arguments.platform_named(args.platform)
    decision = explain(name, platform=platform, dtype=dtype, shape=shape, config=args.compilation_config)
    output.json(decision.to_dict())
    where = [decision.platform, *filter(None, [decision.dtype, args.shape])]
    output.print(
        f"[bold]{decision.op}[/bold] on {escape(', '.join(where))} runs "
        f"[bold]{decision.cls}.{decision.method or 'nothing'}[/bold], because {escape(decision.why)}."
    )
    table = tables.plain("", "")
    table.show_header = False
    table.add_row("class", escape(decision.class_why))
    table.add_row(
        "enabled",
        f"{'yes' if decision.enabled else 'no'}: {escape(decision.directive)} ({escape(decision.directive_source)})",
    )
    for rejected in decision.rejected:
        table.add_row(f"not {escape(rejected.candidate)}", escape(rejected.why))
    for note in decision.notes:
        table.add_row("note", escape(note))
    output.print(table)
    return 0


def _model(args: Namespace, output: Output) -> int:
    for option in ("platform", "shape"):
        if args[option] is not None:
            raise UsageError(f"--{option} goes with an op; {args.target!r} is a model.")
    from ..apply import apply
    from ..tools import models

    source = models.find(None if args.target == models.DEFAULT_MODEL else args.target)
    with output.progress() as progress:
        loaded = models.load(source, args.dtype or arguments.DTYPES[0], arguments.device_named(args.device), progress)
        progress("Putting the ops into the model", None)
        report = apply(loaded.model, args.compilation_config)
    output.json({"model": source.name, "report": report.to_dict(), "config": args.compilation_config.to_dict()})
    output.print(f"[bold]{escape(source.name)}[/bold]: what would run")
    tables.print_report(output, report.entries)
    tables.print_settings(output, args.compilation_config)
    return 0

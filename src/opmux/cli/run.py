"""Answer a prompt with a model whose operators run through opmux, and show what ran.

With --compare, the same prompt goes through the untouched model too, and both speeds are shown.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from ..core.errors import UsageError
from ..tools import ranks
from . import arguments, tables

if TYPE_CHECKING:
    import torch
    from jsonargparse import ArgumentParser, Namespace

    from ..apply import Sharding
    from ..tools.models import Loaded, Source
    from .output import Output

DEFAULT_PROMPT = "What is the capital of France?"


def add_arguments(parser: ArgumentParser) -> None:
    """The options of ``opmux run``."""
    parser.add_argument(
        "prompt", nargs="?", type=str, help=f"The prompt; - reads standard input. Left out: {DEFAULT_PROMPT!r}"
    )
    arguments.add_model(parser)
    parser.add_argument(
        "--max-new-tokens", type=int, default=128, metavar="N", help="The answer ends here at the latest."
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads. Left out: torch's default.")
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="N",
        help="Split the model over N processes: torchrun --nproc-per-node N -m opmux run --tensor-parallel-size N ...",
    )  # fmt: skip
    parser.add_argument("--no-chat-template", action="store_true", help="Give the prompt to the model as it is.")
    parser.add_argument("--compare", action="store_true", help="Measure against the untouched model, in turns.")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="Rounds of --compare; medians are shown.")


def run(args: Namespace, output: Output) -> int:
    """Load, apply, generate or compare, print."""
    from ..tools import models

    _check(args)
    prompt = _prompt(args.prompt)
    models.check_prompt(prompt)
    source = models.find(args.model)
    import torch

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = arguments.device_named(args.device)
    with contextlib.ExitStack() as stack:
        if args.tensor_parallel_size > 1:
            device = stack.enter_context(ranks.group(args.tensor_parallel_size, device))
        loaded, sharding = _load(args, output, source, device)
        ids = loaded.encode(prompt, chat_template=not args.no_chat_template)
        if args.compare:
            return _compare(args, output, loaded, ids, device)
        return _answer(args, output, loaded, prompt, ids, sharding)


def _check(args: Namespace) -> None:
    for option in ("max_new_tokens", "threads", "rounds"):
        value = args[option]
        if value is not None and value < 1:
            raise UsageError(f"--{option.replace('_', '-')} {value}: it takes a number from 1 up.")
    ranks.check(args.tensor_parallel_size)
    if args.compare and args.tensor_parallel_size > 1:
        raise UsageError("--compare measures two models in one process: leave out --tensor-parallel-size and torchrun.")


def _prompt(given: str | None) -> str:
    if given is None:
        return DEFAULT_PROMPT
    return sys.stdin.read() if given == "-" else given


def _load(args: Namespace, output: Output, source: Source, device: torch.device) -> tuple[Loaded, Sharding | None]:
    """The model on ``device``, and how it was split if it was."""
    from ..apply import shard
    from ..tools import models

    with output.progress() as progress:
        if args.tensor_parallel_size == 1:
            return models.load(source, args.dtype, device, progress), None
        with ranks.first_alone():  # on the CPU, where loading maps the files: only this rank's part is ever read
            loaded = models.load(source, args.dtype, "cpu", progress)
        progress(f"Splitting the model over {args.tensor_parallel_size} ranks", None)
        sharding = shard(loaded.model)
        loaded.model.to(device)
        return loaded, sharding


def _apply(model: Any, args: Namespace, output: Output) -> Any:
    from ..apply import apply

    with output.progress() as progress:
        progress("Putting the ops into the model", None)
        return apply(model, args.compilation_config)


def _answer(
    args: Namespace, output: Output, loaded: Loaded, prompt: str, ids: Any, sharding: Sharding | None
) -> int:
    from ..tools.generate import generate

    report = _apply(loaded.model, args, output)
    ranked = "" if sharding is None else f", split over {sharding.tp.size} ranks"
    output.print(
        f"[bold]{escape(loaded.source.name)}[/bold] in {args.dtype} on {ids.device}{ranked}: {escape(repr(prompt))}\n"
    )
    if args.compilation_config.compiles:
        output.note("The model is compiled at its first tokens, which takes up to a minute ...")
    answer = generate(loaded, ids, args.max_new_tokens, output.write)
    output.write("\n\n")
    output.print(
        f"prompt of {answer.prompt_tokens} tokens: {answer.prefill_ms:.0f} ms · "
        f"answer of {answer.new_tokens} tokens: {answer.tokens_per_s:.1f} tokens/s "
        "[dim](one cold run; --compare measures)[/dim]"
    )
    _print_report(args, output, report)
    if sharding is not None:
        output.print(f"[dim]{escape(str(sharding))}[/dim]")
    output.json(
        {
            "model": loaded.source.name,
            "dtype": args.dtype,
            "device": str(ids.device),
            "tensor_parallel": {"size": 1} if sharding is None else sharding.to_dict(),
            "prompt": prompt,
            **answer.to_dict(),
            "report": report.to_dict(),
            "config": args.compilation_config.to_dict(),
        }
    )
    return 0


def _compare(args: Namespace, output: Output, loaded: Loaded, ids: Any, device: Any) -> int:
    from ..tools import models
    from ..tools.compare import Plan, compare, machine

    # Loaded twice rather than copied: both models get their weights the way every user's model does.
    with output.progress() as progress:
        untouched = models.load(loaded.source, args.dtype, device, progress).model
    report = _apply(loaded.model, args, output)
    started = time.perf_counter()
    with output.progress() as progress:
        plan = Plan(rounds=args.rounds)
        result = compare(untouched, loaded.model, loaded.tokenizer, ids, plan, progress)
    here = machine()
    _print_comparison(args, output, loaded, result, here, time.perf_counter() - started)
    _print_report(args, output, report)
    output.json(
        {
            "model": loaded.source.name,
            "dtype": args.dtype,
            "device": str(device),
            **result,
            "report": report.to_dict(),
            "config": args.compilation_config.to_dict(),
            "machine": here,
        }
    )
    return 0


def _print_comparison(
    args: Namespace, output: Output, loaded: Loaded, result: dict[str, Any], here: dict[str, Any], took_s: float
) -> None:
    size = result["measured"]
    stock, ours = result["stock"], result["opmux"]
    output.print(
        f"[bold]{escape(loaded.source.name)}[/bold] in {args.dtype} on {escape(str(loaded.model.device))}, "
        f"{here['threads']} threads: the untouched transformers model against the same model with opmux's ops\n"
    )
    table = tables.plain("", "untouched", "opmux", "opmux is")
    for label, key, ratio, unit in (
        (f"decode, {size['decode_tokens']} tokens", "decode_tokens_per_s", "decode_ratio", "tokens/s"),
        (f"prompt of {size['prefill_tokens']} tokens", "prefill_ms", "prefill_ratio", "ms"),
        (f"your prompt, {size['prompt_tokens']} tokens", "prompt_ms", "prompt_ratio", "ms"),
        ("model.generate(), prompt included", "generate_tokens_per_s", "generate_ratio", "tokens/s"),
    ):
        table.add_row(label, f"{stock[key]:.1f} {unit}", f"{ours[key]:.1f} {unit}", _faster(result[ratio]))
    scores = result["logprob"]["text_at_once"]
    table.add_row(
        "mean log-probability of a fixed text",
        f"{scores['stock']:.4f}",
        f"{scores['opmux']:.4f}",
        f"{result['logprob_diff']:.4f} apart",
    )
    output.print(table)
    output.print(
        f"[dim]Medians of {size['rounds']} of {size['rounds_planned']} round(s) in {took_s:.0f} s, in one process: "
        "both models warm, taking turns, while decoding after every 16 tokens. Greedy, one sequence, by model.forward "
        "with its cache unless stated. The distance is the larger one of a text of "
        f"{size['text_tokens']} tokens read at once and its first {size['stepped_tokens']} read token by token.[/dim]"
    )
    tables.print_load(output, here)


def _faster(ratio: float) -> str:
    colour, word, shown = ("green", "faster", ratio) if ratio >= 1 else ("red", "slower", 1 / ratio)
    return f"[bold {colour}]{shown:.2f} x {word}[/bold {colour}]"


def _print_report(args: Namespace, output: Output, report: Any) -> None:
    output.print("\n[bold]What ran[/bold]")
    tables.print_report(output, report.entries)
    tables.print_settings(output, args.compilation_config)

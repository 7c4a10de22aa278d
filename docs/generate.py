"""Writes the pages of the ops (``docs/ops/``) and the table of ops in README.md from the code.

``python docs/generate.py`` writes them; ``tests/docs/test_generated.py`` fails where they differ from the code.
Everything comes from an op's own file: its docstring, its constructor, the platform methods with what they require, its
cases and its tolerance.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from opmux.core import registry
from opmux.core.decide import CHAINS, NATIVE
from opmux.core.requires import Requirements, requirements_of

DOCS = Path(__file__).parent
README = DOCS.parent / "README.md"
BEGIN, END = "<!-- ops: written by docs/generate.py -->", "<!-- ops: end -->"

PLATFORMS = {"cpu": "CPU", "cuda": "CUDA", "rocm": "ROCm", "xpu": "XPU", "tpu": "TPU"}
NOTICE = "<!-- Written by docs/generate.py from the op's own file. Change that file, then run the script. -->"

_FIELD = re.compile(r"([A-Z][a-z]+):\s*(.*)")
_ARGUMENT = re.compile(r"    (\w[\w, ]*):\s+(.*)")


def catalogue(package: str = "opmux.ops") -> dict[str, type]:
    """The ops of one package by registered name; what others registered in this process is left out."""
    registry.load_catalogues()
    own = {name: cls for name, cls in registry.op_registry.items() if cls.__module__.startswith(f"{package}.")}
    return dict(sorted(own.items()))


def pages(package: str = "opmux.ops") -> dict[str, str]:
    """File name in ``docs/ops`` -> its text."""
    ops = catalogue(package)
    return {"README.md": _index(ops), **{f"{name}.md": _page(cls) for name, cls in ops.items()}}


def readme() -> str:
    """README.md with its table of ops made anew."""
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{_table(catalogue(), 'docs/ops/')}\n{END}{after}"


def main() -> None:
    """Write every page and remove those of ops that are gone."""
    folder = DOCS / "ops"
    wanted = pages()
    for old in folder.glob("*.md"):
        if old.name not in wanted:
            old.unlink()
    for name, text in wanted.items():
        (folder / name).write_text(text, encoding="utf-8")
    README.write_text(readme(), encoding="utf-8")


# -- the tables of all ops -------------------------------------------------------------------------------------------


def _index(ops: dict[str, type]) -> str:
    return f"""{NOTICE}

# The ops

One page an op. A cell names the language of the kernel; *native* means that the op's definition in PyTorch runs there.

{_table(ops, "")}

[What the methods, chains and requirements mean](../custom_op.md) · [Numbers and edges of all ops](../numerics.md)
"""


def _table(ops: dict[str, type], prefix: str) -> str:
    lines = [f"| op | class | {' | '.join(PLATFORMS.values())} |", f"|---|---|{'---|' * len(PLATFORMS)}"]
    for name, cls in ops.items():
        cells = " | ".join(_language(cls, kind) for kind in PLATFORMS)
        lines.append(f"| [`{name}`]({prefix}{name}.md) | `{cls.__name__}` | {cells} |")
    return "\n".join(lines)


def _language(cls: type, kind: str) -> str:
    method = _first(cls, kind)
    needs = requirements_of(getattr(cls, method))
    if method == NATIVE:
        return "*native*"
    return "Triton" if needs.triton else "Pallas" if needs.pallas else "C++" if needs.native_library else "Python"


def _first(cls: type, kind: str) -> str:
    return next((method for method in CHAINS[kind] if registry.implemented(cls, method)), NATIVE)


# -- the page of one op ----------------------------------------------------------------------------------------------


def _page(cls: type) -> str:
    init, forward = cls.__init__, cls.forward_native  # type: ignore[attr-defined,misc]
    built = ",\n    ".join(_parameters(init))
    called = f"{', '.join(_parameters(forward))}) -> {_text(inspect.signature(forward).return_annotation)}"
    sections = [
        f"{NOTICE}\n\n# `{cls.name}`",  # type: ignore[attr-defined]
        f"```text\nopmux.ops.{cls.__name__}(\n    {built}\n)\n\nforward({called}\n```",
        _docstring(inspect.getdoc(cls) or ""),
        f"## Where it runs\n\n{_methods(cls)}",
        f"## Numbers\n\n{_tolerance(cls)}",
        f"## Cases\n\n{_cases(cls)}",
        "[All ops](README.md)",
    ]
    return "\n\n".join(sections) + "\n"


def _parameters(function: Callable[..., Any]) -> list[str]:
    """Each parameter as the source has it, ``self`` left out, with the ``*`` before those that go by name only."""
    texts: list[str] = []
    for name, p in list(inspect.signature(function).parameters.items())[1:]:
        if p.kind is p.KEYWORD_ONLY and "*" not in texts:
            texts.append("*")
        default = "" if p.default is p.empty else f" = {p.default!r}"
        texts.append(f"{name}: {_text(p.annotation)}{default}")
    return texts


def _text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _docstring(text: str) -> str:
    """The docstring as Markdown: paragraphs, fields ("Shapes: ...") and arguments as lists."""
    # Two short fields may share a line.
    lines = re.sub(r"(?<=\S)\s{3,}(?=[A-Z][a-z]+: )", "\n", text).splitlines()
    blocks: list[list[str]] = [[]]
    in_arguments = False
    for line in lines:
        field, argument = _FIELD.fullmatch(line), _ARGUMENT.fullmatch(line)
        if not line.strip():
            blocks.append([])
        elif line == "Args:":
            in_arguments = True
            blocks += [["**Arguments**"], []]
        elif in_arguments and argument:
            names = ", ".join(f"`{name.strip()}`" for name in argument[1].split(","))
            blocks[-1].append(f"- {names}: {_markdown(argument[2])}")
        elif field:
            blocks[-1].append(f"- **{field[1]}**: {_markdown(field[2])}")
        elif line.startswith(" ") and blocks[-1]:
            blocks[-1][-1] += f" {_markdown(line.strip())}"
        elif blocks[-1] and blocks[-1][-1].startswith("- "):  # a sentence of its own between fields
            blocks[-1].append(f"- {_markdown(line)}")
        else:
            blocks[-1].append(_markdown(line))
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _markdown(text: str) -> str:
    """Two backticks become one; what Markdown would read as emphasis outside code is escaped."""
    parts = re.split(r"(``.*?``)", text)
    return "".join(f"`{p[2:-2]}`" if p.startswith("``") else p.replace("*", r"\*").replace("<", r"\<") for p in parts)


def _methods(cls: type) -> str:
    lines = ["| platform | method | needs |", "|---|---|---|"]
    for kind, title in PLATFORMS.items():
        method = _first(cls, kind)
        lines.append(f"| {title} | `{method}` | {_needs(requirements_of(getattr(cls, method)), method)} |")
    return "\n".join(lines)


def _needs(needs: Requirements, method: str) -> str:
    if method == NATIVE:
        return "nothing: it is the definition"
    parts = []
    if needs.dtypes is not None:
        parts.append(", ".join(str(d).removeprefix("torch.") for d in needs.dtypes))
    if needs.native_library:
        parts.append("the compiled CPU library")
    if needs.isa is not None:
        parts.append(" or ".join(name.strip() for name in needs.isa.split("|")))
    if needs.triton:
        parts.append("Triton")
    if needs.pallas:
        parts.append("JAX with Pallas")
    if needs.capability is not None:
        parts.append(f"compute capability {'.'.join(map(str, needs.capability))}")
    if needs.when is not None:
        said = inspect.getdoc(needs.when)
        parts.append(f"looks at each call: {said.splitlines()[0]}" if said else "looks at each call")
    if needs.differentiable:
        parts.append("has a backward")
    return "; ".join(parts) or "nothing"


def _tolerance(cls: type) -> str:
    bound = getattr(cls, "tolerance", None)
    if bound is None:
        return "The op states no tolerance of its own."
    if bound.ulp == bound.fp32 == 0:
        return "Every method gives the bits of the definition."
    text = (
        f"A test compares every method with the definition in float64: at most {bound.ulp:g} ulp in fp16 and bf16, "
        f"{bound.fp32:g} ulp in fp32 (ulp: one unit in the last place of the output's dtype)."
    )
    if bound.scale:
        text += (
            f" The error of a value smaller than {bound.scale:g} times the root mean square of the output is measured "
            "in ulp of that size: what cancelled to almost nothing has no digits left to compare."
        )
    return text


def _cases(cls: type) -> str:
    rows = list(_case_rows(cls))
    if not rows:
        return "None of its own."
    intro = "Named inputs for the test of every op. Those marked *timed* are shapes of real models, the others edges."
    return "\n".join([intro, "", "| case | built with | |", "|---|---|---|", *rows])


def _case_rows(cls: type) -> Iterator[str]:
    for case in cls.cases():  # type: ignore[attr-defined]
        built = ", ".join(f"{name}={value!r}" for name, value in case.init.items())
        yield f"| {case.name} | {f'`{built}`' if built else 'defaults'} | {'timed' if case.bench else ''} |"


if __name__ == "__main__":
    main()

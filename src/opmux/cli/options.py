"""The parser of every command, spellings of the compilation config, and where each value came from."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from ..core.errors import ConfigError, did_you_mean
from . import bench, doctor, explain, list_ops, run, verify

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS: dict[str, ModuleType] = {
    "run": run,
    "list": list_ops,
    "explain": explain,
    "doctor": doctor,
    "verify": verify,
    "bench": bench,
}

CONFIG = "compilation_config"
# As opmux.core.config has it, which imports torch: neither --help nor a usage error should wait for that.
FILE_ENVIRONMENT = "OPMUX_CONFIG"
_CONFIG_OPTION = re.compile(r"(?:-cc|--compilation[-_]config)(?P<field>\.[\w-]+\+?)?(?P<value>=.*)?", re.DOTALL)

_EPILOG = """The compilation config is taken, field by field, from the command line, else from OPMUX_COMPILATION_CONFIG
(JSON), else from the key compilation_config of the --config file.
Exit codes: 0 done, 1 the work failed, 2 wrong call or input.
Completion: eval "$(opmux --print_completion shtab-bash)" (or shtab-zsh, shtab-tcsh) in the shell's start file."""


@dataclass
class CompilationOptions:
    """Which ops run and how the model is compiled; -cc is short for --compilation_config

    Args:
        custom_ops: Directives: all, none, +op, -op, as a list or comma-joined.
        backend: eager, inductor, or another backend of torch.compile.
        mode: 0 does not compile, 1 compiles with torch.compile.
        mm_encoder: Directives of its own for the multimodal encoder.
        strict: Raise where a kernel refuses a call, instead of running the definition.
    """

    custom_ops: list[str] | str | None = None
    backend: str | None = None
    mode: int | str | None = None
    mm_encoder: dict[str, Any] | list[str] | str | None = None
    strict: bool | None = None


@dataclass
class Call:
    """One call of a command.

    Attributes:
        command: the module that runs it.
        args: its options: command line over file over default.
    """

    command: ModuleType
    args: Namespace
    _given: dict[str, Any] = field(default_factory=dict)
    _file: str | None = None

    def resolve(self) -> None:
        """Set ``args.compilation_config`` to the ``CompilationConfig`` that holds here.

        It knows the source of every field. Checking it imports every op, and with them torch.
        """
        from ..core.config import CompilationConfig

        self.args[CONFIG] = CompilationConfig.resolve(cli=self._given, file=self._file)


def parse(argv: Sequence[str]) -> Call:
    """Read the command line and the config file. Usage errors and ``--help`` end the process, as argparse does."""
    parser, commands = _parsers()
    argv = [*normalised(argv)]
    if not argv:
        parser.print_help()
        raise SystemExit(2)
    parsed = parser.parse_args(argv, defaults=False)
    name = parsed.command
    given = _strip(parsed[name])
    path = given.get("config") or os.environ.get(FILE_ENVIRONMENT)
    args = commands[name].get_defaults()
    if path:
        args.update(_from_file(Path(path), name, commands))
    on_command_line = given.pop(CONFIG, None)
    args.update(given)
    return Call(COMMANDS[name], args, on_command_line.as_dict() if on_command_line else {}, path)


def normalised(argv: Sequence[str]) -> list[str]:
    """One spelling for each option: ``--compilation_config`` for ``-cc`` and the dashed form, dashes for the others.

    A directive that begins with a minus is tied to its option, or it would be read as an option itself.
    """
    argv = list(argv)
    result: list[str] = []
    while argv:
        word = argv.pop(0)
        if word == "--":
            return [*result, word, *argv]
        config = _CONFIG_OPTION.fullmatch(word)
        if config is None:
            result.append(_dashed(word))
            continue
        option = f"--{CONFIG}{(config['field'] or '').replace('-', '_')}"
        value = config["value"]
        if value is None and config["field"] and argv and re.fullmatch(r"-\w+(,.*)?", argv[0]):
            value = f"={argv.pop(0)}"
        result.append(option + (value or ""))
    return result


def _dashed(word: str) -> str:
    if not word.startswith("--") or word.startswith("--print_"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _parsers() -> tuple[ArgumentParser, dict[str, ArgumentParser]]:
    set_parsing_settings(add_print_completion_argument=True)
    parser = ArgumentParser(
        prog="opmux",
        description="One op, every backend: run a model through fast kernels, and see what ran and why.",
        epilog=_EPILOG,
    )
    subcommands = parser.add_subcommands(required=True, dest="command", title="commands")
    commands = {}
    for name, module in COMMANDS.items():
        command = commands[name] = ArgumentParser(description=module.__doc__)
        module.add_arguments(command)
        command.add_argument("--config", metavar="FILE", help="YAML or JSON file with options of any command.")
        command.add_argument("--json", action="store_true", help="Print one JSON document and nothing else.")
        command.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
        command.add_class_arguments(CompilationOptions, CONFIG)
        subcommands.add_subcommand(name, command, help=(module.__doc__ or "").partition("\n")[0])
    return parser, commands


def _strip(namespace: Namespace) -> Namespace:
    """Without the positionals that were not given: argparse fills them in as None."""
    given = {key: value for key, value in vars(namespace).items() if value is not None}
    return Namespace(**given)  # type: ignore[no-untyped-call]


def _from_file(path: Path, command: str, commands: Mapping[str, ArgumentParser]) -> Namespace:
    """Options in a config file. One file serves every command: an option of another command is passed over."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"The config file {path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"The config file {path} cannot be parsed: {error}") from None
    if not isinstance(found, Mapping):
        raise ConfigError(f"The config file {path} holds {found!r}; it takes a mapping of options.")
    # CompilationConfig.resolve reads its own key, and keeps the source of every field.
    values = {str(key).replace("-", "_"): value for key, value in found.items() if key != CONFIG}
    known = {key for parser in commands.values() for key in vars(parser.get_defaults())} - {CONFIG}
    for key in values:
        if key not in known:
            hint = did_you_mean(key, {*known, CONFIG})
            raise ConfigError(f"The config file {path} has the option {key!r}, which no command takes. {hint}")
    own = vars(commands[command].get_defaults())
    parsed: Namespace = commands[command].parse_object({k: v for k, v in values.items() if k in own}, defaults=False)
    return parsed

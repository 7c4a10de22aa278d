"""The command line: ``opmux run``, ``list``, ``explain``, ``doctor``, ``verify``, ``bench``. One file a command.

Exit codes: 0 done, 1 the work failed (or ``doctor``, ``verify`` or ``bench`` found something wrong), 2 the call or its
input was wrong, 130 interrupted from the keyboard.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence

from ..core.errors import OpmuxError
from ..tools import ranks
from .options import parse
from .output import Output, say_error, say_nothing, say_warning


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. ``--help`` and usage errors raise ``SystemExit``, as argparse does."""
    argv = sys.argv[1:] if argv is None else list(argv)
    started = ranks.launch()
    who = f"rank {started.rank}: " if started.world_size > 1 else ""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = say_warning if started.rank == 0 else say_nothing
            call = parse(argv)
            with Output(as_json=call.args.json, speaks=started.rank == 0) as output:
                with output.progress() as progress:
                    progress("Importing torch", None)
                    call.resolve()
                code: int = call.command.run(call.args, output)
                return code
    except OpmuxError as error:
        if "--debug" in argv:
            traceback.print_exception(error, file=sys.stderr)
        say_error(f"{who}{error}")
        # Errors that are ValueErrors say that the input was wrong; the others, that the work could not be done.
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        say_error("Interrupted.")
        return 130
    except BrokenPipeError:
        # The reader (`| head`) went away: not a failure. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0

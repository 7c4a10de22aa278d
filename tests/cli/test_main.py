"""The frame of every command: start-up, streams, exit codes, completion."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from opmux.cli import run
from opmux.core.errors import CacheError, ModelError, OpmuxError

Opmux = Any


def test_help_starts_without_torch() -> None:
    code = (
        "import sys\nfrom opmux.cli import main\n"
        "try: main(['run', '--help'])\n"
        "except SystemExit: print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "--compilation_config.custom_ops" in done.stdout


def test_help_says_exit_codes_and_completion(opmux: Opmux) -> None:
    done = opmux("--help")
    assert done.code == 0
    for word in ("run", "list", "explain", "doctor", "verify", "bench", "Exit codes", "--print_completion shtab-bash"):
        assert word in done.out


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_is_printed(shell: str) -> None:
    command = [sys.executable, "-m", "opmux", "--print_completion", f"shtab-{shell}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "max-new-tokens" in done.stdout


def test_the_module_runs_and_a_closed_pipe_is_no_failure() -> None:
    command = f"{sys.executable} -m opmux list --json | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["{", "0"]
    assert "BrokenPipe" not in done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelError("the model"), 2),
        (CacheError("the disk"), 1),
        (OpmuxError("the work"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(opmux: Opmux, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int) -> None:
    def fails(*_: object) -> int:
        raise error

    monkeypatch.setattr(run, "run", fails)
    done = opmux("run", "hello", "--json")
    assert (done.code, done.out) == (code, "")
    assert f"error: {error}" in done.err or "error: Interrupted" in done.err
    assert "Traceback" not in done.err


def test_debug_shows_the_traceback(opmux: Opmux) -> None:
    done = opmux("run", " ", "--debug")
    assert done.code == 2
    assert "Traceback" in done.err
    assert "error: The prompt is empty" in done.err

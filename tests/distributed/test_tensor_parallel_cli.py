"""`torchrun -m opmux run --tensor-parallel-size N`: the same tokens as one process, one voice, and every wrong start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_model
from opmux.cli import main
from opmux.core.errors import UsageError
from opmux.tools import ranks

WORDS = ("run", "hello", "--dtype", "float32", "--device", "cpu", "--max-new-tokens", "8")

# A rank of its own mind: what each of several processes is told may differ.
ONE_RANK_FAILS = """
import os, sys
from opmux.cli import main
model = sys.argv[1] if os.environ["RANK"] == "0" else "/no/such/model"
sys.exit(main([*sys.argv[2:], "--model", model]))
"""


def torchrun(size: int, *words: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    return subprocess.run(
        [*command, *map(str, words)], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.save_folder(tmp_path_factory.mktemp("models") / "tiny")


def test_torchrun_gives_the_tokens_of_one_process(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*WORDS, "--model", str(model), "--json")
    assert main(words) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["tensor_parallel"] == {"size": 1}
    done = torchrun(2, "-m", "opmux", *words, "--tensor-parallel-size", 2)
    assert done.returncode == 0, done.stderr
    together = json.loads(done.stdout)  # one document: the other rank is silent
    assert (together["text"], together["new_tokens"]) == (alone["text"], alone["new_tokens"])
    assert together["tensor_parallel"]["size"] == 2
    assert "lm_head" in together["tensor_parallel"]["split"]
    reasons = {e["class"]: e["reason"] for e in together["report"]["entries"]}
    assert "rank 0 of 2: 2 heads, 1 of keys" in reasons["QKVParallelLinear"]
    assert done.stderr.count("Loading tiny") == 1


def test_a_rank_that_fails_ends_them_all(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "one_rank_fails.py"
    script.write_text(ONE_RANK_FAILS)
    started = time.monotonic()
    done = torchrun(2, script, model, *WORDS, "--tensor-parallel-size", 2)
    assert done.returncode != 0
    assert done.stdout == ""
    assert "error: rank 1: There is no model at /no/such/model" in done.stderr
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    ("words", "world", "message"),
    [
        (["--tensor-parallel-size", "2"], 1, "torchrun --nproc-per-node 2 -m opmux run --tensor-parallel-size 2"),
        (["--tensor-parallel-size", "3"], 2, "torchrun started 2 processes, and --tensor-parallel-size is 3"),
        ([], 2, "torchrun started 2 processes, and --tensor-parallel-size is 1"),
        (["--tensor-parallel-size", "0"], 1, "--tensor-parallel-size 0: it takes a number from 1 up"),
        (["--tensor-parallel-size", "2", "--compare"], 2, "--compare measures two models in one process"),
    ],
    ids=["by itself", "other number", "left out", "zero", "compare"],
)
def test_a_wrong_start_says_what_to_do(
    words: list[str], world: int, message: str, model: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if world > 1:
        for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", world)):
            monkeypatch.setenv(name, str(value))
    assert main([*WORDS, "--model", str(model), *words]) == 2
    assert message in capsys.readouterr().err


def test_each_process_takes_a_device_of_its_own() -> None:
    with pytest.raises(UsageError, match="Write --device cuda"), ranks.group(2, torch.device("cuda:1")):
        pass


def test_a_launcher_that_says_only_half_starts_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert ranks.launch() == ranks.Launch()

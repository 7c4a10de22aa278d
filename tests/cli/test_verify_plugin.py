"""`opmux verify --plugin NAME`: the ops of one installed plugin, in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

PLUGIN = """
from opmux import CustomOp

def register():
    from opmux.ops import ReLUSquaredActivation

    class Vendor(ReLUSquaredActivation):
        def forward_oot(self, x):
            return BODY

    CustomOp.register_oot("relu2")(Vendor)
"""
RIGHT = "self.forward_native(x)"
COMMAND = "import sys; from opmux.cli import main; sys.exit(main(sys.argv[1:]))"


def verify(run_python: Any, *words: str) -> Any:
    code = COMMAND.replace("sys.argv[1:]", repr(["verify", *words, "--quick", "--dtype", "float32", "--json"]))
    return run_python(code, fails=True)


def test_the_ops_of_a_plugin(run_python: Any, install_plugin: Callable[..., Path]) -> None:
    install_plugin("right", PLUGIN.replace("BODY", RIGHT), general_plugins="register")
    done = verify(run_python, "--plugin", "right")
    rows = json.loads(done.stdout)["rows"]
    assert done.returncode == 0
    assert {row["op"] for row in rows} == {"relu2"}
    assert any(row["method"] == "forward_oot" and row["cases"] for row in rows)
    missing = verify(run_python, "--plugin", "rihgt")
    assert missing.returncode == 1
    assert "There is no plugin 'rihgt'" in missing.stderr
    assert "Did you mean 'right'" in missing.stderr


def test_a_plugin_that_is_wrong(run_python: Any, install_plugin: Callable[..., Path]) -> None:
    install_plugin("wrong", PLUGIN.replace("BODY", "x.relu()"), general_plugins="register")
    done = verify(run_python, "--plugin", "wrong")
    failures = [f for row in json.loads(done.stdout)["rows"] for f in row["failures"]]
    assert done.returncode == 1
    assert {(f["op"], f["method"]) for f in failures} == {("relu2", "forward_oot")}

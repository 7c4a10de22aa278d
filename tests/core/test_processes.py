"""Real processes: imports (P1), ``python -O`` (R6), spawn, forkserver and torchrun workers (B01, B53, C8, P4)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

IMPORTS = """
import json, sys
def seen():
    maps = open("/proc/self/maps").read() if sys.platform == "linux" else ""
    heavy = [m for m in ("triton", "jax", "transformers", "vllm", "torch._dynamo") if m in sys.modules]
    return heavy + ["libopmux"] * ("libopmux" in maps)
steps = {}
import opmux
steps["import opmux"] = seen() + [m for m in ("torch", "numpy") if m in sys.modules]
import opmux.ops
steps["import opmux.ops"] = seen()
from opmux.ops import RMSNorm, SiluAndMul, RotaryEmbedding
steps["import classes"] = seen()
op = RMSNorm(8)
steps["build"] = seen()
import torch
steps["devices"] = [d for d in ("cuda", "xpu") if getattr(torch, d).is_initialized()]
opmux.current_platform
steps["platform"] = seen()
with torch.no_grad():
    op(torch.zeros(2, 8))
steps["loaded at the call"] = [bool(seen()) or op.routes[0].decision.method == "forward_native"]
assert not [m for m in ("triton", "jax") if m in sys.modules]
print(json.dumps(steps))
"""


def test_p1_importing_loads_no_kernel_and_touches_no_device(run_python: Any) -> None:
    steps = json.loads(run_python(IMPORTS).stdout)
    assert steps.pop("loaded at the call") == [True]
    assert steps == {step: [] for step in steps}


UNDER_O = """
import torch
import opmux
from opmux import CompilationConfig, CustomOp
from opmux.core.errors import OpmuxError
from opmux.ops import RMSNorm, SiluAndMul

assert False, "python -O drops this"

class V(RMSNorm): pass
class W(RMSNorm): pass
class Narrow(RMSNorm):
    def forward_cpu(self, x): return x
class Op(CustomOp):
    def forward_native(self, x): return x
class Op2(CustomOp):
    def forward_native(self, x): return x

CustomOp.register("o_op")(Op)
CustomOp.register_oot("RMSNorm")(V)
CustomOp.register_oot("RMSNorm")(V)
must_fail = {
    "duplicate": lambda: CustomOp.register("o_op")(Op2),
    "not a subclass": lambda: CustomOp.register_oot("RMSNorm")(SiluAndMul),
    "unknown": lambda: CustomOp.register_oot("RMSNrom")(W),
    "bare": lambda: CustomOp.register_oot(W),
    "second": lambda: CustomOp.register_oot("RMSNorm")(W),
    "narrow": lambda: CustomOp.register_oot("SiluAndMul")(Narrow),
    "narrow signature": lambda: (CustomOp.op_registry_oot.clear(), RMSNorm.register_oot(Narrow)),
    "directive": lambda: CompilationConfig(custom_ops="+rms_nrom"),
    "both": lambda: CompilationConfig(custom_ops="all,none"),
    "devices": lambda: SiluAndMul()(torch.zeros(1, 4), torch.zeros(1, device="meta")),
}
for name, attempt in must_fail.items():
    try:
        attempt()
    except OpmuxError as error:
        print("refused", name)
try:
    CustomOp()
except TypeError:
    print("refused base")
"""


def test_r6_survives_python_o(run_python: Any) -> None:
    lines = run_python(UNDER_O, options=("-O",)).stdout.split("\n")[:-1]
    assert len(lines) == 11, lines


PLUGIN = """
from opmux import CustomOp

def register():
    from opmux.ops import SiluAndMul

    class VendorSilu(SiluAndMul):
        def forward_oot(self, x):
            return x * 0

    CustomOp.register_oot("SiluAndMul")(VendorSilu)
"""

PARENT = """
import json, multiprocessing as mp, os, pickle, subprocess, sys, warnings
from concurrent.futures import ProcessPoolExecutor

import torch
import opmux
from opmux.core.config import current_config
from opmux.ops import RMSNorm, SiluAndMul


def report(config=None):
    config = config or current_config()
    with warnings.catch_warnings(record=True) as caught, opmux.use_config(config), torch.no_grad():
        warnings.simplefilter("always")
        ops = {"silu_and_mul": SiluAndMul(), "rms_norm": RMSNorm(4)}
    x = torch.ones(1, 4)
    return {
        "classes": {name: type(op).__name__ for name, op in ops.items()},
        "methods": {name: op.decision(x).method for name, op in ops.items()},
        "enabled": {name: op.decision().enabled for name, op in ops.items()},
        "source": ops["rms_norm"].decision().directive_source,
        "class_why": ops["rms_norm"].decision().class_why,
        "warnings": [str(w.message) for w in caught],
        "environment": [name for name in os.environ if name.startswith("OPMUX_")],
    }


class Worker(mp.get_context("spawn").Process):  # a second kind of worker
    def __init__(self, queue, config):
        super().__init__()
        self.queue, self.config = queue, config

    def run(self):
        self.queue.put(report(self.config))


def main():
    @RMSNorm.register_oot
    class ScriptNorm(RMSNorm):
        pass

    torch.set_num_threads(1)
    config = opmux.CompilationConfig.resolve(cli={"custom_ops": "none,+rms_norm"}, environ={})
    found = {"parent": report(config)}

    queue = mp.get_context("spawn").Queue()
    workers = [Worker(queue, config)]
    workers[0].start()
    with ProcessPoolExecutor(1, mp_context=mp.get_context("forkserver")) as pool:
        found["forkserver"] = pool.submit(report).result()
    found["spawn"] = queue.get()
    workers[0].join()

    clean = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME") if name in os.environ}
    code = "import pickle, sys, json, parent; print(json.dumps(parent.report(pickle.load(sys.stdin.buffer))))"
    child = [sys.executable, "-c", code]
    done = subprocess.run(child, input=pickle.dumps(config), env=clean, stdout=subprocess.PIPE, check=True)
    found["cleaned"] = json.loads(done.stdout)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the forkserver start method is tried on Linux only")
def test_b01_b53_workers(run_python: Any, install_plugin: Callable[..., Path], tmp_path: Path) -> None:
    install_plugin("vendor_plugin", PLUGIN, general_plugins="register")
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    found = json.loads(run_python(script).stdout)
    assert found["parent"]["classes"] == {"silu_and_mul": "VendorSilu", "rms_norm": "ScriptNorm"}

    for worker in ("spawn", "forkserver", "cleaned"):
        seen = found[worker]
        assert seen["classes"]["silu_and_mul"] == "VendorSilu", (
            f"{worker}: the plugin's entry point registers everywhere"
        )
        assert seen["classes"]["rms_norm"] == "RMSNorm"
        (warning,) = seen["warnings"]
        for text in (warning.lower(), seen["class_why"].lower()):
            assert "the parent process had the oot replacement" in text, worker
            assert "scriptnorm for rmsnorm, this process does not" in text
            assert "opmux.general_plugins" in text

    for worker in ("parent", "spawn", "cleaned"):  # these got the config
        assert found[worker]["enabled"] == {"silu_and_mul": False, "rms_norm": True}, worker
        assert found[worker]["source"] == "command line"
    assert found["forkserver"]["methods"]["silu_and_mul"] == "forward_oot"
    assert found["cleaned"]["environment"] == ["OPMUX_PARENT_REGISTRATIONS"], "left by itself, for its own children"


TORCHRUN = """
import os, pickle, sys
import torch, torch.distributed as dist
torch.set_num_threads(1)
import opmux
from opmux.ops import RMSNorm, SiluAndMul
dist.init_process_group("gloo")
rank = dist.get_rank()
box = [opmux.CompilationConfig(custom_ops="none,+silu_and_mul") if rank == 0 else None]
dist.broadcast_object_list(box, src=0)
by_environment = RMSNorm(4).decision()
with opmux.use_config(box[0]):
    by_config = [SiluAndMul().decision().enabled, RMSNorm(4).decision().enabled]
line = f"rank {rank} {by_environment.enabled} {by_environment.directive_source} {by_config}"
lines = [None, None]
dist.all_gather_object(lines, line)
if rank == 0:
    print("\\n".join(lines))
dist.destroy_process_group()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="torchrun with gloo is tried on Linux only")
def test_c8_torchrun_workers(run_python: Any, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(TORCHRUN)
    launch = "import sys; from torch.distributed.run import main; main(sys.argv[1:])"
    command = f"import sys; sys.argv[1:] = ['--standalone', '--nproc-per-node=2', {str(script)!r}]; {launch}"
    env = {"OPMUX_COMPILATION_CONFIG": '{"custom_ops": ["all", "-rms_norm"]}', "OMP_NUM_THREADS": "1"}
    lines = run_python(command, env=env).stdout.strip().split("\n")
    assert lines == [f"rank {r} False environment OPMUX_COMPILATION_CONFIG [True, False]" for r in (0, 1)]


def test_p2_installed_plugins(run_python: Any, install_plugin: Callable[..., Path]) -> None:
    """Entry points of installed distributions, one of which raises at import."""
    install_plugin("vendor_plugin", PLUGIN, general_plugins="register")
    install_plugin("broken_plugin", "raise RuntimeError('no driver')", general_plugins="register")
    install_plugin(
        "vendor_platform",
        "from opmux.platforms import Platform\n"
        "class Npu(Platform):\n"
        "    name, device_type = 'npu', 'cpu'\n"
        "    @classmethod\n"
        "    def detect(cls):\n"
        "        return 'found'\n"
        "def platform():\n"
        "    return Npu\n",
        platform_plugins="platform",
    )
    code = """
import opmux, torch
from opmux.ops import SiluAndMul
op = SiluAndMul()
print(type(op).__name__, opmux.current_platform.name, op.decision(torch.ones(1, 4)).method)
"""
    done = run_python(code)
    assert done.stdout.split() == ["VendorSilu", "npu", "forward_oot"]
    assert "The opmux plugin 'broken_plugin'" in done.stderr
    assert "RuntimeError: no driver" in done.stderr

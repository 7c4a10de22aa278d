"""Plugins in real processes: versions, two claims, and every way to start a worker (B01, P2, P3, P4)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="fork, forkserver and gloo are tried on Linux only")

PLUGIN = """
from opmux import CustomOp

OPMUX_API = 1


def register():
    from opmux.ops import SiluAndMul

    class VendorSilu(SiluAndMul):
        def forward_oot(self, x):
            return x[..., ::2] * 0 + 7

    CustomOp.register_oot("SiluAndMul")(VendorSilu)
"""

WORKER = """
import warnings
import torch
from opmux import CustomOp
from opmux.ops import RMSNorm, SiluAndMul


def look():
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        silu, norm = SiluAndMul(), RMSNorm(4)
        return {
            "values": silu(torch.ones(1, 4)).flatten().tolist(),
            "silu": type(silu).__name__,
            "norm": type(norm).__name__,
            "why": norm.decision().class_why,
            "warnings": [str(w.message) for w in caught],
        }


def register_by_hand():
    class ScriptNorm(RMSNorm):
        pass

    CustomOp.register_oot("RMSNorm")(ScriptNorm)
"""

EVERY_START = """
import json, multiprocessing as mp, os, sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
import worker

def main():
    worker.torch.set_num_threads(1)
    worker.register_by_hand()
    found = {"parent": worker.look()}
    for start in ("fork", "forkserver", "spawn"):
        with ProcessPoolExecutor(1, mp_context=mp.get_context(start)) as pool:
            found[start] = pool.submit(worker.look).result()
    with ThreadPoolExecutor(1) as pool:
        found["thread"] = pool.submit(worker.look).result()
    print(json.dumps(found))

if __name__ == "__main__":
    main()
"""

RANK = """
import json, os, sys
import torch, torch.distributed as dist
import worker
torch.set_num_threads(1)
dist.init_process_group("gloo")
found = [None] * dist.get_world_size()
dist.all_gather_object(found, worker.look())
if dist.get_rank() == 0:
    print(json.dumps(found))
dist.destroy_process_group()
"""

# As a launcher does that has registered something itself: the ranks inherit its environment.
LAUNCHER = """
import sys
import worker
worker.register_by_hand()
from torch.distributed.run import main
main(["--standalone", "--nproc-per-node=2", RANK])
"""

SERVER = """
import http.server, json, os, socket, sys
import worker

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"pid": os.getpid(), **worker.look()}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass

def serve(listener):
    server = http.server.HTTPServer(("127.0.0.1", 0), Answer, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.serve_forever()

if __name__ == "__main__":
    import multiprocessing as mp, urllib.request
    worker.torch.set_num_threads(1)
    listener = socket.create_server(("127.0.0.1", 0))
    workers = [mp.get_context("spawn").Process(target=serve, args=(listener,), daemon=True) for _ in range(2)]
    for process in workers:
        process.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    answer = json.load(urllib.request.urlopen(url, timeout=60))
    print(json.dumps({"in a worker": answer.pop("pid") in [p.pid for p in workers], "seen": answer}))
    for process in workers:
        process.terminate()
"""


@pytest.fixture
def workplace(tmp_path: Path, install_plugin: Callable[..., Path]) -> Path:
    install_plugin("vendor_plugin", PLUGIN, general_plugins="register")
    (tmp_path / "worker.py").write_text(WORKER)
    return tmp_path


def lost(seen: dict[str, Any]) -> bool:
    """Whether the process says, in a warning and in its decision, that its parent had a replacement it lacks."""
    says = [text.lower() for text in (*seen["warnings"], seen["why"])]
    return len(says) == 2 and all("scriptnorm for rmsnorm, this process does not" in text for text in says)


def test_b01_p4_every_way_to_start_a_process(run_python: Any, workplace: Path) -> None:
    script = workplace / "parent.py"
    script.write_text(EVERY_START)
    found = json.loads(run_python(script).stdout)
    for where, seen in found.items():
        assert (seen["silu"], seen["values"]) == ("VendorSilu", [7.0, 7.0]), where
    for inherits in ("parent", "fork", "thread"):
        assert (found[inherits]["norm"], found[inherits]["warnings"]) == ("ScriptNorm", []), inherits
    for fresh in ("forkserver", "spawn"):
        assert found[fresh]["norm"] == "RMSNorm"
        assert lost(found[fresh]), found[fresh]


def test_b01_p4_torchrun(run_python: Any, workplace: Path) -> None:
    script = workplace / "rank.py"
    script.write_text(RANK)
    done = run_python(LAUNCHER.replace("RANK", repr(str(script))), env={"OMP_NUM_THREADS": "1"})
    ranks = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(ranks) == 2
    for seen in ranks:
        assert (seen["silu"], seen["values"], seen["norm"]) == ("VendorSilu", [7.0, 7.0], "RMSNorm")
        assert lost(seen)


def test_b01_a_servers_workers(run_python: Any, workplace: Path) -> None:
    script = workplace / "server.py"
    script.write_text(SERVER)
    found = json.loads(run_python(script).stdout)
    assert found["in a worker"]
    assert (found["seen"]["silu"], found["seen"]["values"]) == ("VendorSilu", [7.0, 7.0])


CLAIM = """
from opmux.platforms import Platform

class Claim(Platform):
    name, device_type = "NAME", "cpu"

    @classmethod
    def detect(cls):
        return "the driver is there"

def platform():
    return Claim
"""


def test_p3_two_claims(run_python: Any, install_plugin: Callable[..., Path]) -> None:
    for name in ("first", "second"):
        install_plugin(f"{name}_vendor", CLAIM.replace("NAME", name), platform_plugins="platform")
    code = "import opmux; print(opmux.current_platform.name)"
    done = run_python(code, fails=True)
    assert done.returncode == 1
    assert "The platform plugins 'first' and 'second' both claim this machine. Set OPMUX_PLATFORM" in done.stderr
    assert run_python(code, env={"OPMUX_PLATFORM": "second"}).stdout.strip() == "second"
    assert run_python(code, env={"OPMUX_PLUGINS": "first_vendor"}).stdout.strip() == "first"
    assert run_python(code, env={"OPMUX_PLUGINS": ""}).stdout.strip() != "first"


def test_a_plugin_for_another_opmux(run_python: Any, install_plugin: Callable[..., Path], tmp_path: Path) -> None:
    """Its module no longer imports; the message still says which opmux it is for."""
    install_plugin("old_vendor", "from opmux.core.custom_op import GoneByNow\n", general_plugins="register")
    metadata = tmp_path / "old_vendor-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text() + "Requires-Dist: opmux<0.1,>=0.0.3\n")
    install_plugin("new_vendor", PLUGIN.replace("OPMUX_API = 1", "OPMUX_API = 9"), general_plugins="register")
    done = run_python("from opmux.ops import SiluAndMul; print(type(SiluAndMul()).__name__)")
    assert done.stdout.strip() == "SiluAndMul"
    assert "old_vendor 1.0 asks for opmux<0.1,>=0.0.3; this is opmux 0" in done.stderr
    assert "new_vendor declares OPMUX_API = 9, and this opmux has version 1" in done.stderr
    strict = run_python("from opmux.ops import SiluAndMul; SiluAndMul()", env={"OPMUX_STRICT_PLUGINS": "1"}, fails=True)
    assert strict.returncode == 1
    assert "PluginError" in strict.stderr

"""The aarch64 library under an emulator, where a cross compiler and qemu are installed.

Debian: ``apt-get install g++-aarch64-linux-gnu qemu-user``.
"""

from __future__ import annotations

import platform
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import opmux
from opmux.native import DTYPE_CODE, build

CXX, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
PACKAGE = Path(opmux.__file__).parent
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RTOL = {torch.float32: 3e-6, torch.bfloat16: 2**-8 * 1.01, torch.float16: 2**-11 * 1.02}

pytestmark = pytest.mark.skipif(not (shutil.which(CXX) and shutil.which(QEMU)), reason=f"needs {CXX} and {QEMU}")

Call = Callable[..., int]


@pytest.fixture(scope="module")
def call(tmp_path_factory: pytest.TempPathFactory) -> Call:
    """``call(name, *arguments)``: tensors are buffers, and hold what the kernel wrote afterwards."""
    folder = tmp_path_factory.mktemp("aarch64")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", CXX)
        patch.setattr(platform, "machine", lambda: "aarch64")
        report = build.build(PACKAGE, folder, folder / "objects")
    assert report.variants == ["neon"], report.errors
    driver = folder / "call_kernel"
    source = Path(__file__).with_name("call_kernel.cpp")
    subprocess.run([CXX, "-std=c++17", f"-I{PACKAGE / 'native'}", source, "-o", driver, "-ldl"], check=True)

    def run(name: str, *arguments: Tensor | float | bool) -> int:
        message, buffers = b"", []
        for argument in arguments:
            if isinstance(argument, Tensor):
                data = argument.contiguous().view(torch.uint8).numpy()
                buffers.append(data)
                message += b"b" + struct.pack("q", data.nbytes) + data.tobytes()
            else:
                message += (
                    struct.pack("=cd", b"f", argument)
                    if isinstance(argument, float)
                    else struct.pack("=cq", b"i", argument)
                )
        command = [
            QEMU,
            "-L",
            "/usr/aarch64-linux-gnu",
            driver,
            folder / "native" / "lib" / "libopmux_neon.so",
            f"opmux_{name}",
        ]
        output = subprocess.run(command, input=message, capture_output=True, check=True).stdout
        position = 8
        for data in buffers:
            data.reshape(-1)[:] = torch.frombuffer(
                bytearray(output[position : position + data.nbytes]), dtype=torch.uint8
            ).numpy()
            position += data.nbytes
        result: int = struct.unpack("q", output[:8])[0]
        return result

    return run


def close(out: Tensor, reference: Tensor) -> None:
    assert ((out.double() - reference).abs() <= reference.abs() * RTOL[out.dtype] + 1e-7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 769])
def test_rms_norm(call: Call, width: int, dtype: torch.dtype) -> None:
    x, weight, out = torch.randn(5, width).to(dtype), torch.randn(width).to(dtype), torch.empty(5, width, dtype=dtype)
    own = (x, width, 0, 0, False, weight, dtype == torch.float32, width, width, 1e-6, 0.0, 0, False)
    call("rms_norm", out, 0, 5, DTYPE_CODE[dtype], *own)
    v = x.double()
    close(out, v / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_gated_activation(call: Call, kind: int, dtype: torch.dtype) -> None:
    x, out = torch.randn(3, 2 * 769).to(dtype), torch.empty(3, 769, dtype=dtype)
    gate, up = x.chunk(2, -1)
    call("gated_activation", gate, 769, up, 769, out, 3, 769, DTYPE_CODE[dtype], kind, 0.0, False)
    g = gate.double()
    activated = [
        g * torch.sigmoid(g),
        0.5 * g * torch.special.erfc(-g / 2**0.5),
        g * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3)),
    ][kind]
    close(out, activated * up.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_storage_is_exact(call: Call, dtype: torch.dtype) -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values[torch.isfinite(values)]
    for factor in (1.5, 0.99609375, 3 * 2**-12):
        out, n = torch.empty_like(values), values.numel()
        call(
            "gated_activation",
            values,
            n,
            torch.full_like(values, factor),
            n,
            out,
            1,
            n,
            DTYPE_CODE[dtype],
            3,
            float("-inf"),
            False,
        )
        assert torch.equal(out, (values.float() * torch.tensor(factor, dtype=dtype).float()).to(dtype))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding(call: Call, interleaved: bool) -> None:
    query, table, out = torch.randn(5, 3, 22), torch.randn(16, 20), torch.empty(5, 3, 22)
    positions = torch.tensor([15, 0, 3, 15, 7])
    key = (0, 0, 0, 0, 0)
    common = (DTYPE_CODE[torch.float32], 20, 22, 0, interleaved, False, False)
    assert call("rotary_embedding", *common, positions, False, 5, table, 16, 20, query, 66, 22, out, 3, *key) == 0
    cos, sin = table[positions][:, None].double().chunk(2, -1)
    v = query.double()
    a, b = (v[..., 0:20:2], v[..., 1:20:2]) if interleaved else (v[..., :10], v[..., 10:20])
    turned = [a * cos - b * sin, b * cos + a * sin]
    y = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    torch.testing.assert_close(out.double(), torch.cat([y, v[..., 20:]], -1), rtol=1e-5, atol=1e-6)
    assert torch.equal(out[..., 20:], query[..., 20:])
    assert call("rotary_embedding", *common, positions, False, 5, table, 15, 20, query, 66, 22, out, 3, *key) == 1

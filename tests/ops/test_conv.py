"""The convolutions against torch's modules: the matrix form, and every argument that other systems ignore."""

from __future__ import annotations

import itertools

import pytest
import torch
from guards import LAYOUTS, expanded
from torch import Tensor, nn

from opmux.native import library
from opmux.ops import Conv2dLayer, Conv3dLayer

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CLASSES = {2: (Conv2dLayer, nn.Conv2d), 3: (Conv3dLayer, nn.Conv3d)}
needs_library = pytest.mark.skipif(not library.available, reason=f"compiled CPU library: {library.reason}")


def pair(rank: int, *args: object, dtype: torch.dtype = torch.float32, **kwargs: object) -> tuple[nn.Module, nn.Module]:
    """Our layer and torch's, with torch's parameters."""
    ours, theirs = CLASSES[rank]
    torch.manual_seed(0)
    reference = theirs(*args, **kwargs, dtype=dtype).requires_grad_(False)
    layer = ours(*args, **kwargs, params_dtype=dtype).requires_grad_(False)
    layer.load_state_dict(reference.state_dict())
    return layer, reference


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "kernel"),
    [((2, 3, 28, 42), 14), ((2, 3, 30, 45), (14, 7)), ((5, 3, 4, 4), 4), ((1, 1, 3, 5), 1), ((0, 3, 8, 8), 4),
     ((3, 3, 2, 14, 14), (2, 14, 14)), ((1, 2, 5, 9, 7), (2, 4, 3)), ((2, 2, 4, 4, 4), 2)],
)  # fmt: skip
def test_matrix_form_is_the_convolution(shape: tuple[int, ...], kernel: object, dtype: torch.dtype) -> None:
    for bias in (True, False):
        layer, reference = pair(len(shape) - 2, shape[1], 9, kernel, kernel, bias=bias, dtype=dtype)
        x = random(*shape, dtype=dtype)
        out, want = layer(x), reference.double()(x.double())
        assert layer.decision(x).method == "forward_cpu"
        assert not layer.routes[0].refusals
        assert out.is_contiguous()
        assert out.dtype == dtype
        step = 4e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
        torch.testing.assert_close(out.double(), want, rtol=step, atol=2 * step)
        for layout in LAYOUTS:
            if layout is not expanded:
                assert torch.equal(layer(layout(x)), out)
        channels_last = x.movedim(1, -1).contiguous().movedim(-1, 1)
        assert torch.equal(layer(channels_last), out)


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize(
    "arguments",
    [
        {"stride": 2, "dilation": 2},
        {"stride": 2, "groups": 2},
        {"stride": 2, "padding": 1},
        {"stride": 1},
        {"stride": 2, "padding": (1, 0, 1), "padding_mode": "reflect"},
        {"padding": "same", "dilation": 2},
        {"padding": "valid", "stride": 3},
    ],
    ids=str,
)
def test_no_argument_is_ignored(rank: int, arguments: dict[str, object]) -> None:
    if isinstance(arguments.get("padding"), tuple):
        arguments = {**arguments, "padding": arguments["padding"][:rank]}
    layer, reference = pair(rank, 4, 6, 2, **arguments)
    x = random(2, 4, *(7,) * rank)
    torch.testing.assert_close(layer(x), reference(x), rtol=1e-5, atol=1e-5)
    if library.available:
        (why,) = layer.routes[0].refusals
        assert any(word in why for word in ("dilation", "groups", "padding", "touch"))


@pytest.mark.parametrize(("mode", "kernel"), itertools.product(("zeros", "reflect", "replicate", "circular"), (3, 4)))
def test_padding_modes_and_same(mode: str, kernel: int) -> None:
    for rank in (2, 3):
        layer, reference = pair(rank, 2, 3, kernel, padding="same", padding_mode=mode)
        x = random(1, 2, *(6,) * rank)
        out = layer(x)
        assert out.shape[2:] == x.shape[2:]
        torch.testing.assert_close(out, reference(x), rtol=1e-5, atol=1e-5)


@needs_library
def test_dilation_of_one_pixel_and_valid_are_still_the_matrix_form() -> None:
    layer, reference = pair(2, 3, 4, 1, 1, dilation=2, padding="valid")
    x = random(1, 3, 5, 5)
    torch.testing.assert_close(layer(x), reference(x), rtol=1e-5, atol=1e-5)
    assert not layer.routes[0].refusals


def test_refusals() -> None:
    with pytest.raises(ValueError, match="'same' needs stride 1"):
        Conv2dLayer(3, 4, 3, 2, "same")
    with pytest.raises(ValueError, match="'same' and 'valid'"):
        Conv2dLayer(3, 4, 3, padding="full")
    with pytest.raises(ValueError, match="padding_mode is 'mirror'"):
        Conv2dLayer(3, 4, 3, padding_mode="mirror")
    with pytest.raises(ValueError, match="groups is 2"):
        Conv3dLayer(3, 4, 3, groups=2)
    with pytest.raises(ValueError, match="kernel_size is \\(2, 2\\)"):
        Conv3dLayer(3, 4, (2, 2))
    layer = Conv2dLayer(3, 4, 4, 4)
    with pytest.raises(ValueError, match=r"takes \[B, 3 channels, H, W\]"):
        layer(torch.ones(3, 8, 8))
    with pytest.raises(ValueError, match="smaller than the kernel"):
        layer(torch.ones(1, 3, 3, 8))

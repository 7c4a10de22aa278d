"""Rows of any tensor, and quick allocation."""

from __future__ import annotations

import pytest
import torch

from opmux.native.layout import as_rows, new_like, new_rows


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(3, 4),
        torch.randn(2, 3, 4),
        torch.randn(2, 3, 8)[..., :4],
        torch.randn(4, 3).t(),
        torch.randn(8)[::2],
        torch.randn(2, 3, 4).transpose(0, 1),
        torch.randn(1, 4).expand(3, 4),
        torch.randn(0, 4),
        torch.randn(3, 0),
    ],
)
def test_rows_hold_the_values_of_the_tensor(x: torch.Tensor) -> None:
    rows, count, width, stride = as_rows(x)
    assert width == x.shape[-1]
    assert count * width == x.numel()
    if x.numel():
        assert torch.equal(rows.as_strided((count, width), (stride, 1)), x.reshape(-1, width))


@pytest.mark.parametrize("shape", [(3, 4), (1, 4), (5, 1), (4,), (2, 0, 3), (0,), (2, 3, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_tensors_are_as_torch_makes_them(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.empty(shape, dtype=dtype)
    for made, wanted in (
        (new_like(x), torch.empty(shape, dtype=dtype)),
        (new_like(x, 7), torch.empty((*shape[:-1], 7), dtype=dtype)),
        (new_rows(x, 7, torch.float16), torch.empty((*shape, 7), dtype=torch.float16)),
    ):
        assert (made.shape, made.stride(), made.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
        assert made.is_contiguous()
    other = x.new_empty(3, 4).t()
    assert new_like(other).is_contiguous()

"""The decoder of DeepSeek-OCR-2 against transformers' own, its mixed mask, and what it is given."""

from __future__ import annotations

import pytest
import torch

from opmux.ops import CustomQwen2Decoder

SIZES = {
    "decoder_layer": 3,
    "hidden_dimension": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
}


@pytest.fixture
def decoder() -> CustomQwen2Decoder:
    op = CustomQwen2Decoder(**SIZES)
    g = torch.Generator().manual_seed(0)
    for name, p in op.named_parameters():
        p.data = torch.randn(p.shape, generator=g) * (0.3 if p.dim() == 1 else p.shape[-1] ** -0.5) + ("norm" in name)
    return op


def tokens(batch: int = 2, count: int = 14) -> torch.Tensor:
    return torch.randn(batch, count, 64, generator=torch.Generator().manual_seed(1))


def methods(op: CustomQwen2Decoder):
    return op, op.forward_native


def test_it_is_the_decoder_of_deepseek_ocr2(decoder) -> None:
    ocr2 = pytest.importorskip("transformers.models.deepseek_ocr2.modeling_deepseek_ocr2")
    config = ocr2.DeepseekOcr2VisionEncoderConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    theirs = ocr2.DeepseekOcr2VisionEncoder(config).eval()
    theirs.load_state_dict({name.removeprefix("model."): p for name, p in decoder.state_dict().items()}, strict=True)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 4e-2)):
        x = tokens().to(dtype)
        decoder.to(dtype)
        theirs.to(dtype)
        for image in (7, 4, 14):
            types = (torch.arange(14) >= image).long().expand(2, 14)
            with torch.no_grad():
                wanted = theirs(inputs_embeds=x, num_patches=image).last_hidden_state
            for method in methods(decoder):
                out = method(x, types)
                assert out[0] is out.last_hidden_state
                torch.testing.assert_close(out[0], wanted, rtol=0, atol=tolerance * float(wanted.abs().max()))


def test_without_types_the_first_half_is_the_image(decoder) -> None:
    for count in (14, 13, 1, 2):
        x = tokens(2, count)
        types = (torch.arange(count) >= count // 2).long().expand(2, count)
        assert torch.equal(decoder(x)[0], decoder(x, types)[0])


def test_who_sees_whom(decoder) -> None:
    """Changing one token changes exactly the rows that see it."""
    x = tokens(1, 10)
    for types in (torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1]]), torch.tensor([[0, 1, 0, 1, 1, 0, 0, 1, 1, 1]])):
        for method in methods(decoder):
            before = method(x, types)[0]
            for j in range(10):
                changed = x.clone()
                changed[0, j] += 1.0
                differs = (method(changed, types)[0] - before).abs().amax(-1)[0] > 1e-4
                image = types[0] == 0
                sees = torch.ones(10, dtype=torch.bool) if image[j] else ~image & (torch.arange(10) >= j)
                # A query's change reaches later queries only; through them, nothing else.
                assert torch.equal(differs, sees)


def test_padding_is_not_seen(decoder) -> None:
    x = tokens(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 4:6], mask[1, 0] = 0, 0
    for method in methods(decoder):
        before = method(x, None, mask)[0]
        changed = x.clone()
        changed[0, 4:6], changed[1, 0] = 9.0, -9.0
        after = method(changed, None, mask)[0]
        torch.testing.assert_close(after[mask.bool()], before[mask.bool()])
    nothing = torch.zeros(2, 12, dtype=torch.long)
    assert torch.isfinite(decoder(x, None, nothing)[0]).all()
    torch.testing.assert_close(decoder(x, None, nothing)[0], decoder.forward_native(x, None, nothing)[0])


def test_names_are_the_checkpoints(decoder) -> None:
    names = set(decoder.state_dict())
    assert "model.norm.weight" in names
    assert {n.removeprefix("model.layers.2.") for n in names if n.startswith("model.layers.2.")} == {
        *(f"self_attn.{p}_proj.{w}" for p in "qkv" for w in ("weight", "bias")), "self_attn.o_proj.weight",
        *(f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")), "input_layernorm.weight", "post_attention_layernorm.weight",
    }  # fmt: skip


def test_what_does_not_fit_is_refused(decoder) -> None:
    x = tokens()
    for bad in ((x[..., :63],), (x[0],), (x, torch.zeros(2, 13)), (x, None, torch.ones(14))):
        with pytest.raises(ValueError, match=r"was built for \[B, S, 64\]"):
            decoder(*bad)
    with pytest.raises(ValueError, match="at most 8 tokens"):
        CustomQwen2Decoder(max_position_embeddings=8, **SIZES)(x)
    with pytest.raises(ValueError, match="even multiple"):
        CustomQwen2Decoder(**{**SIZES, "num_attention_heads": 5})
    assert decoder(x[:, :0])[0].shape == (2, 0, 64)

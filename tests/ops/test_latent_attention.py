"""Multi-head latent attention: its three ways are one, its scale, its cache, what it refuses."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from opmux.native import library
from opmux.ops import LatentCache, MLAModules, MultiHeadLatentAttentionWrapper, latent_attention_scale
from opmux.ops.mla import definition, kernels_cpu

YARN = {"rope_type": "deepseek_yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale_all_dim": 1.0}

needs_kernels = pytest.mark.skipif(not library.available, reason="the compiled CPU library is not here")


def build(q_lora: int | None = None, seed: int = 0, **more: object) -> MultiHeadLatentAttentionWrapper:
    """Small, with random weights."""
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 48, "num_heads": 4, "scale": 24**-0.5, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 12, "q_lora_rank": q_lora, "kv_lora_rank": 32, **more,
    }  # fmt: skip
    op = MultiHeadLatentAttentionWrapper(**sizes)
    for p in op.parameters():
        p.data = torch.randn(p.shape) * (0.3 if p.dim() == 1 else p.shape[-1] ** -0.5) + (p.dim() == 1)
    return op


def stepwise(op: MultiHeadLatentAttentionWrapper, x: Tensor, pieces: list[int], cache: LatentCache) -> Tensor:
    """The result for x [B, S, H], fed in pieces."""
    out, start = [], 0
    for piece in pieces:
        positions = torch.arange(start, start + piece)
        out.append(op(positions, x[:, start : start + piece], **cache.arguments()))
        cache.advance(piece)
        start += piece
    return torch.cat(out, dim=1)


def paged_cache(batch: int, per: int, page: int, width: int, dtype: torch.dtype = torch.float32) -> LatentCache:
    """Full of NaN, its pages out of order."""
    table = torch.randperm(batch * per + 3)[: batch * per].view(batch, per).int()
    return LatentCache.paged(torch.full((batch * per + 3, page, width), float("nan"), dtype=dtype), table)


def dense_cache(batch: int, room: int, width: int, dtype: torch.dtype = torch.float32) -> LatentCache:
    cache = LatentCache.dense(batch, room, width, dtype)
    cache.kv_cache.fill_(float("nan"))
    return cache


@needs_kernels
@pytest.mark.parametrize("pieces", [[7], [1, 3, 3], [6, 1], [1] * 7], ids=str)
def test_absorbed_expanded_and_chunked_are_one(pieces: list[int]) -> None:  # case B23
    sizes = {"num_heads": 2, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512}
    op = build(scale=latent_attention_scale(192, YARN), rope_parameters=YARN, max_position=64, **sizes)
    x = torch.randn(2, 7, 48)
    want = op.forward_native(torch.arange(7), x)
    head, start = {}, 0
    latent = [torch.randn(2, 7, 512), torch.randn(2, 7, 64)]
    for path, workspace in itertools.product(("absorbed", "expanded"), (1, 3, 4096)):
        op._forward_method = None
        results, start = [], 0
        for piece in pieces:
            q = torch.randn(2 * piece, 2, 192, generator=torch.Generator().manual_seed(start))
            both = [t[:, : start + piece] for t in latent]
            args = (q, *both, op.kv_b_proj.weight, 128, None, None, None, None, 2, op.scale)
            results.append(kernels_cpu.latent_attention_cpu(*args, path, workspace))
            head.setdefault(start, definition.attention(*args))
            torch.testing.assert_close(results[-1], head[start], atol=1e-4, rtol=0)
            start += piece
    cache = dense_cache(2, 7, op.latent_width)
    torch.testing.assert_close(stepwise(op, x, pieces, cache), want, atol=1e-4, rtol=0)


def test_the_scale_is_that_of_the_heads_not_of_the_latents() -> None:  # case B23
    assert latent_attention_scale(192) == pytest.approx(0.0722, abs=5e-5)
    assert latent_attention_scale(192, YARN) == pytest.approx(0.1352, abs=5e-5)
    assert latent_attention_scale(192, {"rope_type": "yarn", "factor": 40}) == latent_attention_scale(192)
    assert latent_attention_scale(192, {"rope_type": "yarn", "factor": 1, "mscale_all_dim": 1}) == 192**-0.5


@pytest.mark.parametrize("native", [False, True], ids=["kernel", "native"])
@pytest.mark.parametrize("q_lora", [None, 20])
@pytest.mark.parametrize("kind", ["dense", "pages of 4", "pages of 16"])
def test_pieces_with_a_cache_give_what_the_whole_gives(kind: str, q_lora: int | None, native: bool) -> None:
    op = build(q_lora)
    x = torch.randn(3, 21, 48)
    want = op.forward_native(torch.arange(21), x)
    if native:
        op._forward_method = op.forward_native
    page = int(kind.split()[-1]) if " " in kind else 0
    for pieces in ([9, 1, 1, 10], [1] * 21, [20, 1], [2, 19]):
        cache = paged_cache(3, -(-21 // page), page, 40) if page else dense_cache(3, 22, 40)
        torch.testing.assert_close(stepwise(op, x, pieces, cache), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("native", [False, True], ids=["kernel", "native"])
def test_packed_sequences_are_those_sequences_alone(native: bool) -> None:  # case B55
    op = build()
    if native:
        op._forward_method = op.forward_native
    for counts in ([0, 2, 0, 3], [1, 1, 1], [], [0], [5], [3, 3, 0, 3]):
        bounds = torch.tensor([0, *counts]).cumsum(0)
        for dtype in (torch.int32, torch.int64):
            total = sum(counts)
            x = torch.randn(total + 2, 48)  # two rows of padding behind the last sequence
            positions = torch.cat([torch.arange(n) for n in counts] + [torch.zeros(2)]).long()
            out = op(positions, x, cu_seqlens=bounds.to(dtype))
            for begin, end in itertools.pairwise(bounds.tolist()):
                alone = op.forward_native(torch.arange(end - begin), x[begin:end])
                torch.testing.assert_close(out[begin:end], alone, atol=1e-5, rtol=0)
            assert torch.equal(out[total:], torch.zeros(2, 48))


@pytest.mark.parametrize("native", [False, True], ids=["kernel", "native"])
def test_prefill_chunks_and_decode_steps_in_one_packed_call(native: bool) -> None:
    op = build(20)
    whole = [torch.randn(n, 48) for n in (12, 7, 9, 30)]
    want = [op.forward_native(torch.arange(x.shape[0]), x) for x in whole]
    if native:
        op._forward_method = op.forward_native
    before, new = [11, 0, 9, 14], [1, 7, 0, 16]
    for cache in (paged_cache(4, 8, 4, 40), dense_cache(4, 33, 40)):
        first = torch.cat([x[:n] for x, n in zip(whole, before, strict=True)])
        for counts, x in ((before, first), (new, None)):
            starts = cache.lengths.tolist()
            if x is None:
                x = torch.cat([t[s : s + n] for t, s, n in zip(whole, starts, counts, strict=True)])
            bounds = torch.tensor([0, *counts]).cumsum(0)
            positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
            out = op(positions, x, cu_seqlens=bounds, **cache.arguments())
            for b, (s, n) in enumerate(zip(starts, counts, strict=True)):
                mine = out[bounds[b] : bounds[b + 1]]
                torch.testing.assert_close(mine, want[b][s : s + n], atol=1e-5, rtol=0)
            cache.advance(torch.tensor(counts))


@pytest.mark.parametrize("native", [False, True], ids=["kernel", "native"])
def test_only_the_new_tokens_slots_are_written(native: bool) -> None:
    op = build()
    if native:
        op._forward_method = op.forward_native
    cache = torch.full((5, 4, 40), 7.0)
    slots = torch.tensor([6, -1, 13])
    table = torch.tensor([[1, 3, 0], [3, 1, 2]])
    op(
        torch.tensor([2, 3, 1]), torch.randn(3, 48), kv_cache=cache, block_table=table, slot_mapping=slots,
        cu_seqlens=torch.tensor([0, 2, 3]), context_lens=torch.tensor([2, 1]),
    )  # fmt: skip
    written = (cache != 7.0).all(-1).nonzero().tolist()
    assert written == [[1, 2], [3, 1]]
    assert int((cache != 7.0).any(-1).sum()) == 2


@pytest.mark.parametrize("native", [False, True], ids=["kernel", "native"])
@pytest.mark.parametrize("workspace", [3, 4096])
def test_masks_of_padded_batches(native: bool, workspace: int) -> None:
    op = build(workspace=workspace)
    x = torch.randn(2, 6, 48)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 2, 3]])  # the second row is padded on the left
    mask = torch.ones(6, 6).tril().bool().expand(2, 1, 6, 6).clone()
    mask[1, ..., :2] = False
    want = torch.cat((op.forward_native(positions[0], x[0]), op.forward_native(positions[1, 2:], x[1, 2:])))
    if native:
        op._forward_method = op.forward_native
    added = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    for given in (mask, added, torch.nn.functional.pad(mask, (0, 4))):
        out = op(positions, x, attn_mask=given)
        torch.testing.assert_close(torch.cat((out[0], out[1, 2:])), want, atol=1e-5, rtol=0)
        assert torch.equal(out[1, :2], torch.zeros(2, 48))
    cache = dense_cache(2, 9, 40)
    op(positions[:, :4], x[:, :4], attn_mask=mask[:, :, :4, :4], **cache.arguments())
    cache.advance(4)
    step = op(positions[:, 4:], x[:, 4:], attn_mask=torch.nn.functional.pad(mask[:, :, 4:], (0, 3)), **cache.arguments())
    torch.testing.assert_close(step, torch.stack((want[4:6], want[8:])), atol=1e-5, rtol=0)


def test_a_cache_of_another_library() -> None:
    op = build()
    x = torch.randn(2, 5, 48)
    kept: list[Tensor] = []

    def update(latent: Tensor, rope_key: Tensor) -> tuple[Tensor, Tensor]:
        new = [latent, rope_key]
        kept[:] = [torch.cat(pair, dim=1) for pair in zip(kept, new, strict=True)] if kept else new
        return kept[0], kept[1]

    parts = [op(torch.arange(s, e), x[:, s:e], kv_cache=update) for s, e in ((0, 3), (3, 4), (4, 5))]
    torch.testing.assert_close(torch.cat(parts, 1), op.forward_native(torch.arange(5), x), atol=1e-5, rtol=0)
    assert [t.shape for t in kept] == [(2, 5, 32), (2, 5, 8)]


def test_gates_and_factors() -> None:
    plain = build()
    x, positions = torch.randn(1, 5, 48), torch.arange(5)
    for width in (4, 48):
        gate = torch.nn.Linear(48, width, bias=False)
        op = MultiHeadLatentAttentionWrapper(
            48, 4, plain.scale, 16, 8, 12, None, 32, mla_modules=MLAModules(**{**vars_of(plain), "g_proj": gate})
        )
        inner: list[Tensor] = []
        hook = plain.o_proj.register_forward_pre_hook(lambda _, args, seen=inner: seen.append(args[0]))
        plain(positions, x)
        hook.remove()
        with torch.no_grad():
            gates = torch.sigmoid(gate(x[0])).repeat_interleave(48 // width, dim=-1)
            want = plain.o_proj(inner[0] * gates)
            torch.testing.assert_close(op(positions, x)[0], want, atol=1e-5, rtol=1e-5)
    factor = torch.linspace(1, 2, 5).view(5, 1, 1)
    doubled = build(scale=2 * plain.scale)(positions, x)
    torch.testing.assert_close(plain(positions, x, torch.full((5, 1, 1), 2.0)), doubled, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(plain(positions, x, factor), plain(positions, x))


def vars_of(op: MultiHeadLatentAttentionWrapper) -> dict[str, object]:
    return {name: getattr(op, name) for name in MLAModules.__dataclass_fields__}


def test_no_rope() -> None:
    op = build()
    op.rotary_emb = None
    x = torch.randn(1, 6, 48)
    torch.testing.assert_close(
        op(torch.arange(6), x), op.forward_native(torch.arange(6).flip(0), x), atol=1e-5, rtol=0
    )


def test_weights_by_their_names() -> None:
    op = build(20)
    names = {
        "q_a_proj": (20, 48), "q_a_layernorm": (20,), "q_b_proj": (96, 20), "kv_a_proj_with_mqa": (40, 48),
        "kv_a_layernorm": (32,), "kv_b_proj": (112, 32), "o_proj": (48, 48),
    }  # fmt: skip
    weights = {f"{name}.weight": torch.randn(shape) for name, shape in names.items()}
    op.load_weights(weights)
    assert torch.equal(op.fused_qkv_a_proj.weight[:20], weights["q_a_proj.weight"])
    assert torch.equal(op.fused_qkv_a_proj.weight[20:], weights["kv_a_proj_with_mqa.weight"])
    for name in ("q_a_layernorm", "q_b_proj", "kv_a_layernorm", "kv_b_proj", "o_proj"):
        assert torch.equal(getattr(op, name).weight, weights[f"{name}.weight"])
    with pytest.raises(ValueError, match=r"has no 'q_proj\.weight'"):
        op.load_weights({**weights, "q_proj.weight": torch.ones(1)})


def test_refusals_say_what_fits() -> None:
    op, x = build(), torch.randn(2, 3, 48)
    cache = torch.zeros(2, 4, 40)
    wrong = {
        r"hidden_states \[B, S, 48\]": ((torch.randn(2, 3, 47),), {}),
        r"as many tokens of each": ((torch.randn(5, 48),), {"kv_cache": cache, "context_lens": torch.zeros(2)}),
        r"packed hidden_states": ((x,), {"cu_seqlens": torch.tensor([0, 3, 6])}),
        r"kv_cache \[sequences or pages, tokens, 40\]": ((x,), {"kv_cache": torch.zeros(2, 4, 39)}),
        r"a row of a dense kv_cache": ((x,), {"kv_cache": cache[:1]}),
        r"kv_cache, a tensor, with": ((x,), {"context_lens": torch.zeros(2)}),
        r"slot_mapping \[6\]": ((x,), {"kv_cache": cache, "slot_mapping": torch.zeros(5).long()}),
        r"attn_mask \[B or 1, 1": ((x,), {"attn_mask": torch.ones(3, 3)}),
    }
    for message, (args, more) in wrong.items():
        with pytest.raises(ValueError, match=message):
            op(torch.arange(args[0].shape[-2]), *args, **more)
    with pytest.raises(ValueError, match=r"q_lora_rank=8 needs q_a_layernorm, q_b_proj, q_a_proj in"):
        MultiHeadLatentAttentionWrapper(48, 4, 1.0, 16, 8, 12, 8, 32, MLAModules(**vars_of(op)))
    for native in (False, True):
        op._forward_method = op.forward_native if native else None
        with pytest.raises(IndexError, match="of 6 new tokens have no place in a latent cache of 2 x 4"):
            op(torch.arange(3), x, kv_cache=cache, context_lens=torch.tensor([2, 0]))
    op._forward_method = None
    table, lens = torch.tensor([[0, 9]]), torch.tensor([4])
    with pytest.raises(IndexError, match="have no place"):
        op(torch.arange(4, 5), x[:1, :1], kv_cache=cache, block_table=table, context_lens=lens)
    table = torch.tensor([[9, 0]])
    for length in (1, 3):  # absorbed, expanded
        with pytest.raises(IndexError, match="names a page that is not one of"):
            op(torch.arange(4, 4 + length), x[:1, :length], kv_cache=cache, block_table=table, context_lens=lens)


def test_a_cache_of_another_dtype_runs_native() -> None:
    op = build()
    x = torch.randn(1, 4, 48)
    cache = dense_cache(1, 4, 40, torch.bfloat16)
    out = op(torch.arange(4), x, **cache.arguments())
    if library.available:
        assert any("takes a cache of the hidden states' dtype" in why for why in op.routes[0].refusals)
    torch.testing.assert_close(out, op.forward_native(torch.arange(4), x), atol=0.05, rtol=0)


def test_merge_of_parts() -> None:
    torch.manual_seed(0)
    scores, values = torch.randn(5, 12) * 3, torch.randn(12, 4)
    scores[0, :7] = float("-inf")
    scores[1] = float("-inf")
    scores[2, 7:] = float("-inf")

    def part(at: slice) -> tuple[Tensor, Tensor]:
        lse = torch.logsumexp(scores[:, at], dim=-1)
        weights = torch.softmax(scores[:, at], dim=-1).nan_to_num(0.0)
        return weights @ values[at], lse

    out, lse = definition.merge(*part(slice(0, 7)), *part(slice(7, 12)))
    want, want_lse = part(slice(0, 12))
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)

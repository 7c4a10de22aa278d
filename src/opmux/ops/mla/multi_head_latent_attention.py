"""Multi-head latent attention (MLA)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.cases import FLOATS, Case, Cost, Inputs, Tolerance
from ...core.custom_op import CustomOp
from ...core.requires import requires
from . import definition, kernels_cpu
from .modules import MLAModules, load_weights, standard_modules

__all__ = ["MultiHeadLatentAttentionWrapper"]

Cache = Tensor | Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@CustomOp.register("multi_head_latent_attention")
class MultiHeadLatentAttentionWrapper(CustomOp):
    """Attention whose cache holds one short latent a token, from which every head's key and value are expanded.

    ``c, k_rope = split(h W_a)``; ``c = norm(c)``; per head ``q = [q_nope | rope(q_rope)]``, ``k = [c W_UK | rope(k_rope)]``,
    ``v = c W_UV``; causal softmax attention by ``scale``; output projection. A row of the cache is ``[c | rope(k_rope)]``.
    Few queries behind a long context are taken into the latents' space instead (``q_nope W_UK^T`` against ``c``, then
    ``W_UV``), which is the same sum in another order and reads the cache once for all heads.

    Shapes:  hidden_states [B, S, H], [T, H] of B equal sequences (B rows of ``context_lens``, else 1), or packed [T, H] with
             ``cu_seqlens`` [B + 1] -> the same; positions [T], [B, S] or [S]; llama_4_scaling [T, 1, 1], multiplied to q
             behind the rope. kv_cache [B, room, L + R], or [pages, tokens of a page, L + R] with block_table [B, pages of a
             sequence]; context_lens [B], tokens of each sequence in the cache before the call; slot_mapping [T], the slot
             (page * tokens of a page + place) of each new token, -1 for none; None: its sequence's next places. Without a
             cache a call is a fresh batch. attn_mask [B or 1, 1, S, >= keys], boolean (True: attend) or added, in place of
             the causal order; not with ``cu_seqlens``. max_seqlen: the most new tokens of a sequence; given, a GPU need not be
             asked.
             In place of kv_cache a function may stand that takes the new rows, latents [B, S, L] and keys [B, S, R], and
             returns those of all tokens, the new ones last: how a cache of another library is used.
    Dtypes:  fp32, fp16, bf16, one for all; the sub-modules round as they do; scores, softmax and sums are fp32. Expanded keys
             and values, absorbed queries and sums of latents are rounded by kernels, not by the definition.
    Mutates: kv_cache, in the slots of the new tokens; nothing else of it is written, and what lies behind a sequence's end
             is not read.      Grad: native only.
    A token behind the last sequence (padding), and a query without a visible key, give what ``o_proj`` makes of zeros.
    Errors:  ValueError for missing modules, or shapes that do not fit; IndexError on the CPU where the cache has no slot for a
             new token or a page does not exist. On other devices such a token is not written.
    Source:  DeepSeek-AI 2024, arXiv 2405.04434 (DeepSeek-V2); used by DeepSeek V2 and V3, GLM-4.7-Flash, Kimi K2.

    Args:
        hidden_size: H.
        num_heads: N, this rank's heads.
        scale: of the scores; ``latent_attention_scale`` gives DeepSeek's.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim: P, R, V.
        q_lora_rank: Lq, or None for a dense query projection.
        kv_lora_rank: L.
        mla_modules: the sub-modules; None builds DeepSeek's, sharded by heads over the tensor-parallel ranks in force.
        rope_parameters, max_position, rms_norm_eps: of the modules that are built here.
        workspace: latents of a context that are expanded at a time; the parts are merged by their log-sum-exp.
    """

    # The first tokens see few keys, and their sums are up to nine times the root mean square of all that errors are measured
    # against. Two ulp of such a row, for five products, a norm, a rope and attention, are sixteen of the whole.
    tolerance = Tolerance(ulp=16.0, fp32=128.0, scale=1.0)
    lead = 1
    mutates = ("kv_cache",)

    kv_a_layernorm: Any
    kv_b_proj: Any
    rotary_emb: Any
    o_proj: Any
    fused_qkv_a_proj: Any
    kv_a_proj_with_mqa: Any
    q_a_layernorm: Any
    q_b_proj: Any
    q_proj: Any
    q_a_proj: Any
    g_proj: Any

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        scale: float,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        mla_modules: MLAModules | None = None,
        *,
        rope_parameters: Mapping[str, Any] | None = None,
        max_position: int = 4096,
        rms_norm_eps: float = 1e-6,
        workspace: int = 4096,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        if mla_modules is None:
            mla_modules = standard_modules(
                hidden_size, num_heads, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, q_lora_rank, kv_lora_rank,
                rope_parameters, max_position, rms_norm_eps,
            )  # fmt: skip
        missing = mla_modules.missing(q_lora_rank)
        if missing:
            raise ValueError(
                f"multi_head_latent_attention with q_lora_rank={q_lora_rank} needs {', '.join(missing)} in mla_modules."
            )
        self.hidden_size, self.num_heads, self.scale = hidden_size, num_heads, float(scale)
        self.nope, self.rope, self.value = qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        self.q_lora_rank, self.kv_lora_rank = q_lora_rank, kv_lora_rank
        self.workspace = workspace
        for name, module in vars(mla_modules).items():
            setattr(self, name, module)

    @property
    def latent_width(self) -> int:
        """The width L + R of a row of the cache."""
        return self.kv_lora_rank + self.rope

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy this rank's part of a checkpoint's weights, by transformers' names below ``self_attn``."""
        load_weights(self._modules_record(), weights)

    def _modules_record(self) -> MLAModules:
        return MLAModules(**{name: getattr(self, name) for name in MLAModules.__dataclass_fields__})

    def forward_native(
        self, positions: Tensor, hidden_states: Tensor, llama_4_scaling: Tensor | None = None, kv_cache: Cache | None = None,
        block_table: Tensor | None = None, slot_mapping: Tensor | None = None, cu_seqlens: Tensor | None = None,
        context_lens: Tensor | None = None, max_seqlen: int | None = None, attn_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        arguments = self._before(
            definition.store, positions, hidden_states, llama_4_scaling, kv_cache, block_table, slot_mapping, cu_seqlens,
            context_lens, attn_mask,
        )  # fmt: skip
        return self._after(definition.attention(*arguments), hidden_states)

    def _refuses(
        self, positions: Tensor, hidden_states: Tensor, llama_4_scaling: Tensor | None = None, kv_cache: Cache | None = None,
        block_table: Tensor | None = None, slot_mapping: Tensor | None = None, cu_seqlens: Tensor | None = None,
        context_lens: Tensor | None = None, max_seqlen: int | None = None, attn_mask: Tensor | None = None,
    ) -> str | None:  # fmt: skip
        if self.kv_b_proj.weight.dtype is not hidden_states.dtype:
            return "multiplies by kv_b_proj's weight itself, which must have the hidden states' dtype"
        if isinstance(kv_cache, Tensor) and (kv_cache.dtype is not hidden_states.dtype or kv_cache.stride(-1) != 1):
            return "takes a cache of the hidden states' dtype with dense rows"
        return None

    @requires(dtypes=FLOATS, native_library=True, when=_refuses)
    def forward_cpu(
        self, positions: Tensor, hidden_states: Tensor, llama_4_scaling: Tensor | None = None, kv_cache: Cache | None = None,
        block_table: Tensor | None = None, slot_mapping: Tensor | None = None, cu_seqlens: Tensor | None = None,
        context_lens: Tensor | None = None, max_seqlen: int | None = None, attn_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        arguments = self._before(
            kernels_cpu.latent_store_cpu, positions, hidden_states, llama_4_scaling, kv_cache, block_table, slot_mapping,
            cu_seqlens, context_lens, attn_mask,
        )  # fmt: skip
        arguments = (*arguments, "", self.workspace)
        out = kernels_cpu.latent_attention_cpu(*arguments)
        return self._after(out, hidden_states)

    def _before(
        self, store: Callable[[Tensor, Tensor, Tensor, Tensor], None], positions: Tensor, hidden: Tensor,
        llama_4_scaling: Tensor | None, kv_cache: Cache | None, block_table: Tensor | None, slot_mapping: Tensor | None,
        cu_seqlens: Tensor | None, context_lens: Tensor | None, attn_mask: Tensor | None,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Everything up to attention: the arguments of ``definition.attention``."""
        batch = self._check(hidden, kv_cache, block_table, slot_mapping, cu_seqlens, context_lens, attn_mask)
        q, latent, rope_key = self._project(positions, hidden)
        if llama_4_scaling is not None:
            q = (q * llama_4_scaling).to(q.dtype)
        rows = (1, q.shape[0]) if cu_seqlens is not None else (batch, q.shape[0] // max(batch, 1))
        if kv_cache is None:
            latents, rope_keys = latent.unflatten(0, rows), rope_key.unflatten(0, rows)
        elif isinstance(kv_cache, Tensor):
            if context_lens is None:
                context_lens = torch.zeros(batch, dtype=torch.int32, device=hidden.device)
            if slot_mapping is None:
                slot_mapping = definition.slots_of(kv_cache, q.shape[0], batch, block_table, cu_seqlens, context_lens)
            store(kv_cache, latent, rope_key, slot_mapping)
            latents, rope_keys = kv_cache[..., : self.kv_lora_rank], kv_cache[..., self.kv_lora_rank :]
        else:
            latents, rope_keys = kv_cache(latent.unflatten(0, rows), rope_key.unflatten(0, rows))
        weight: Tensor = self.kv_b_proj.weight
        weight, latents, rope_keys = (t if t.stride(-1) == 1 else t.contiguous() for t in (weight, latents, rope_keys))
        table = block_table, cu_seqlens, context_lens, attn_mask
        return q, latents, rope_keys, weight, self.value, *table, batch, self.scale

    def _project(self, positions: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, N, P + R] and the new rows, latents [T, L] and keys [T, R], rotated."""
        hidden = hidden.flatten(0, -2)
        sizes = (self.kv_lora_rank, self.rope)
        if self.q_lora_rank is None:
            q, down = _run(self.q_proj, hidden), _run(self.kv_a_proj_with_mqa, hidden)
        else:
            if self.fused_qkv_a_proj is None:
                q, down = _run(self.q_a_proj, hidden), _run(self.kv_a_proj_with_mqa, hidden)
            else:
                q, down = _run(self.fused_qkv_a_proj, hidden).split((self.q_lora_rank, sum(sizes)), dim=-1)
            q = _run(self.q_b_proj, self.q_a_layernorm(q))
        latent, rope_key = down.split(sizes, dim=-1)
        latent, q = self.kv_a_layernorm(latent), q.unflatten(-1, (self.num_heads, self.nope + self.rope))
        if self.rotary_emb is None:
            return q, latent, rope_key
        if positions.numel() != hidden.shape[0] and positions.dim() == 1 and positions.numel():
            positions = positions.repeat(hidden.shape[0] // positions.numel())
        turned, rope_key = self.rotary_emb(positions, q[..., self.nope :], rope_key.unsqueeze(-2))
        return torch.cat((q[..., : self.nope], turned), dim=-1), latent, rope_key.squeeze(-2)

    def _after(self, out: Tensor, hidden: Tensor) -> Tensor:
        """The output projection of [T, N, V], in the shape of the hidden states."""
        if self.g_proj is not None:
            gate = torch.sigmoid(_run(self.g_proj, hidden.flatten(0, -2)).unflatten(-1, (self.num_heads, -1)).float())
            out = (out * gate).to(out.dtype)
        return _run(self.o_proj, out.flatten(1)).view(*hidden.shape[:-1], self.hidden_size)

    def _check(
        self, hidden: Tensor, kv_cache: Cache | None, block_table: Tensor | None, slot_mapping: Tensor | None,
        cu_seqlens: Tensor | None, context_lens: Tensor | None, attn_mask: Tensor | None,
    ) -> int:  # fmt: skip
        """The number of sequences; ValueError for arguments that do not fit together."""
        tokens = hidden.shape[:-1].numel()
        given = [t.shape[0] for t in (context_lens, block_table) if t is not None]
        if cu_seqlens is not None:
            given.append(cu_seqlens.shape[0] - 1)
        if hidden.dim() == 3:
            given.append(hidden.shape[0])
        batch = given[0] if given else 1
        cached = isinstance(kv_cache, Tensor)
        wrong = None
        if hidden.dim() not in (2, 3) or hidden.shape[-1] != self.hidden_size:
            wrong = f"hidden_states [B, S, {self.hidden_size}] or [T, {self.hidden_size}]"
        elif cu_seqlens is not None and hidden.dim() != 2:
            wrong = "packed hidden_states [T, H] with cu_seqlens"
        elif len(set(given)) > 1 or (cu_seqlens is None and batch and tokens % batch):
            wrong = "the same number of sequences everywhere, and without cu_seqlens as many tokens of each"
        elif cached and (kv_cache.dim() != 3 or kv_cache.shape[-1] != self.latent_width):  # type: ignore[union-attr]
            wrong = f"kv_cache [sequences or pages, tokens, {self.latent_width}]"
        elif cached and block_table is None and kv_cache.shape[0] < batch:  # type: ignore[union-attr]
            wrong = "a row of a dense kv_cache for each sequence"
        elif not cached and not (block_table is None and slot_mapping is None and context_lens is None):
            wrong = "kv_cache, a tensor, with block_table, slot_mapping or context_lens"
        elif slot_mapping is not None and slot_mapping.shape != (tokens,):
            wrong = f"slot_mapping [{tokens}]"
        elif attn_mask is not None and (cu_seqlens is not None or attn_mask.dim() != 4 or attn_mask.shape[1] != 1):
            wrong = "attn_mask [B or 1, 1, S, keys], without cu_seqlens"
        if wrong is None:
            return batch
        arguments = {
            "hidden_states": hidden, "kv_cache": kv_cache, "block_table": block_table, "slot_mapping": slot_mapping,
            "cu_seqlens": cu_seqlens, "context_lens": context_lens, "attn_mask": attn_mask,
        }  # fmt: skip
        got = ", ".join(f"{name} {tuple(t.shape)}" for name, t in arguments.items() if isinstance(t, Tensor))
        raise ValueError(f"multi_head_latent_attention takes {wrong}; it got {got}.")

    def extra_repr(self) -> str:
        return (
            f"{self.num_heads} heads of {self.nope}+{self.rope} and {self.value}, latents of {self.kv_lora_rank}, "
            f"q_lora_rank={self.q_lora_rank}"
        )

    @classmethod
    def cases(cls) -> Iterator[Case]:
        # hidden, heads, P, R, V, Lq, L, yarn
        lite, v3 = (2048, 16, 128, 64, 128, None, 512, True), (7168, 16, 128, 64, 128, 1536, 512, True)
        small, odd = (64, 4, 16, 8, 24, None, 32, False), (40, 3, 5, 6, 7, 20, 21, True)
        # sizes, new tokens of each sequence, tokens before them, tokens of a page (0: dense), a cache at all, one number a batch
        for sizes, new, before, page, bench in (
            (lite, [1], [1024], 0, True), (lite, [1] * 32, [1024] * 32, 64, True), (lite, [512], [0], 0, True),
            (v3, [1], [1024], 64, True),
            (small, [5, 5], None, 0, False), (small, [1, 1, 1], [0, 9, 40], 0, False), (small, [3, 3], [2, 17], 4, False),
            (small, [0, 2, 0, 1, 7], [3, 0, 0, 30, 5], 16, False), (small, [4, 0, 1, 6], None, 0, False),
            (odd, [2, 1, 1], [1, 12, 0], 5, False), (odd, [3], None, 0, False), (small, [], None, 0, False),
        ):  # fmt: skip
            yield _case(sizes, new, before, page, bench)

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        d = case.dims
        head = d["P"] + d["R"]
        q_rows = d["H"] * d["Lq"] + d["Lq"] * d["N"] * head if d["Lq"] else d["H"] * d["N"] * head
        weights = q_rows + d["H"] * (d["L"] + d["R"]) + d["L"] * d["N"] * (d["P"] + d["V"]) + d["N"] * d["V"] * d["H"]
        moved = weights + d["keys"] * (d["L"] + d["R"]) + 2 * d["T"] * d["H"]
        return Cost(size_bytes=moved * dtype.itemsize, flops=2 * d["T"] * weights + 2 * d["N"] * d["pairs"] * (head + d["V"]))


def _run(module: Any, x: Tensor) -> Tensor:
    """A linear layer's product, whether or not it returns its bias beside it."""
    y = module(x)
    return y[0] if isinstance(y, tuple) else y


def _case(sizes: tuple[Any, ...], new: list[int], before: list[int] | None, page: int, bench: bool) -> Case:
    hidden, heads, nope, rope, value, q_lora, latent, yarn = sizes
    equal = len(set(new)) == 1
    contexts = before or [0] * len(new)
    keys = [a + b for a, b in zip(new, contexts, strict=True)]
    tokens, batch, most = sum(new), len(new), max(keys, default=0)
    per = -(-most // page) if page else 0
    parameters = {"rope_type": "deepseek_yarn", "factor": 40, "original_max_position_embeddings": 64, "mscale_all_dim": 1.0}

    def arguments(i: Inputs) -> tuple[Any, ...]:
        positions = torch.cat([torch.arange(c, c + n) for n, c in zip(new, contexts, strict=True)] or [torch.zeros(0)])
        x = i.randn(batch, new[0], hidden) if equal else i.randn(tokens, hidden)
        cu = None if equal else torch.tensor([0, *new]).cumsum(0).int().to(i.device)
        cache = table = lens = None
        if before is not None:
            lens = torch.tensor(before, dtype=torch.int32, device=i.device)
            cache = i.randn(batch * per + 2, page, latent + rope) if page else i.randn(batch, most + 3, latent + rope)
            if page:  # pages out of order, and some that nobody has
                table = (torch.arange(batch * per).flip(0) + 1).view(batch, per).int().to(i.device)
        return positions.long().to(i.device), x, None, cache, table, None, cu, lens

    def prepare(op: Any, i: Inputs) -> None:
        for n, p in enumerate(op.parameters()):
            p.data = i.randn(*p.shape, scale=0.2, shift=1.0) if p.dim() == 1 else _weight(i, n, p)

    kind = "" if before is None else f" behind {_short(contexts)}, {f'pages of {page}' if page else 'dense'}"
    return Case(
        name=f"H={hidden} N={heads} P={nope} R={rope} V={value} Lq={q_lora or 0} L={latent}: {_short(new)} new{kind}",
        init={
            "hidden_size": hidden, "num_heads": heads, "scale": (nope + rope) ** -0.5, "qk_nope_head_dim": nope,
            "qk_rope_head_dim": rope, "v_head_dim": value, "q_lora_rank": q_lora, "kv_lora_rank": latent,
            "rope_parameters": parameters if yarn else None, "max_position": 2560 if yarn else 64,
        },
        args=arguments,
        dims={
            "T": tokens, "H": hidden, "N": heads, "P": nope, "R": rope, "V": value, "Lq": q_lora or 0, "L": latent,
            "keys": sum(keys), "pairs": sum(n * c + n * (n + 1) // 2 for n, c in zip(new, contexts, strict=True)),
        },
        bench=bench,
        prepare=prepare,
    )  # fmt: skip


def _weight(inputs: Inputs, number: int, like: Tensor) -> Tensor:
    """Another one for each parameter: two of one shape would hide that they were taken for each other."""
    seeded = Inputs(inputs.dtype, inputs.device, inputs.seed + 1000 * number)
    return seeded.randn(*like.shape, scale=like.shape[-1] ** -0.5)


def _short(counts: list[int]) -> str:
    if len(counts) > 3 and len(set(counts)) == 1:
        return f"{len(counts)}x{counts[0]}"
    return "+".join(map(str, counts)) or "0"

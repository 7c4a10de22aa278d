"""The vision decoder of DeepSeek-OCR-2: Qwen2 layers over image tokens and learned queries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core.cases import FLOATS, Case, Cost, Inputs, Tolerance
from ...core.custom_op import CustomOp
from ...core.requires import requires
from ..activation.silu_and_mul import SiluAndMul
from ..attention.attention import Attention
from ..linear.replicated_linear import ReplicatedLinear
from ..norm.rms_norm import RMSNorm
from ..rope.apply_rotary_emb import ApplyRotaryEmb

__all__ = ["CustomQwen2Decoder", "DecoderOutput"]


class DecoderOutput(NamedTuple):
    """What the decoder returns; its only element is [B, S, H]."""

    last_hidden_state: Tensor


@CustomOp.register("qwen2_decoder")
class CustomQwen2Decoder(CustomOp):
    """Qwen2 decoder layers with a mixed mask: image tokens see each other, queries see the image and earlier queries.

    Each layer is ``h = x + o(attention(rope(q, k), v))``, ``h + down(silu(gate) * up)``, with an RMS norm before both halves
    and one behind the last layer. Positions are 0 .. S - 1.

    Shapes:  inputs_embeds [B, S, H]; token_type_ids [B, S], 0 for image tokens; attention_mask [B, S], 0 for padding ->
             ``DecoderOutput`` of [B, S, H]. Without token_type_ids the first ``S // 2`` tokens are the image.
    Dtypes:  fp32, fp16, bf16, as of the parameters. Projections, norms and attention each round to it once; the sums of the
             residual do, too.
    Mutates: nothing.      Grad: native only.
    Memory:  where image tokens come first, in every row equally many, there is no mask and nothing of size S x S.
             token_type_ids are read by the host to find out; without them nothing waits for the device.
    Rows without a visible key attend to nothing: attention adds zero to them.
    Errors:  ValueError for shapes that do not fit, more tokens than ``max_position_embeddings``, heads that do not divide.
    Source:  Wei et al. 2026, DeepSeek-OCR 2: Visual Causal Flow; the layers are those of Qwen2, arXiv 2407.10671.

    Parameters have the names of the checkpoint's: ``model.layers.*.self_attn.q_proj.weight``, ..., ``model.norm.weight``.

    Args:
        decoder_layer: number of layers.
        max_position_embeddings: the most tokens.
        hidden_dimension: H.
        num_attention_heads, num_key_value_heads: heads of queries, and of keys and values.
        intermediate_size: width of the MLP.
        rms_norm_eps: of the norms.
        rope_theta: base of the rotary embedding.
    """

    # A layer rounds about eight times, the next one works on what came of it; in units of the last norm's output.
    tolerance = Tolerance(ulp=16.0, fp32=128.0, scale=1.0)

    def __init__(
        self,
        decoder_layer: int = 24,
        max_position_embeddings: int = 131072,
        hidden_dimension: int = 896,
        num_attention_heads: int = 14,
        num_key_value_heads: int = 2,
        intermediate_size: int = 4864,
        *,
        rms_norm_eps: float = 1e-6,
        rope_theta: float = 1e6,
        enforce_enable: bool = False,
    ) -> None:
        super().__init__(enforce_enable=enforce_enable)
        if hidden_dimension % num_attention_heads or hidden_dimension // num_attention_heads % 2:
            raise ValueError(
                f"qwen2_decoder got hidden_dimension {hidden_dimension} and {num_attention_heads} heads: the first must be an "
                "even multiple, since heads are rotated in pairs."
            )
        self.hidden_size, self.longest = hidden_dimension, max_position_embeddings
        self.head_size = hidden_dimension // num_attention_heads
        self.heads, self.kv_heads, self.theta = num_attention_heads, num_key_value_heads, rope_theta
        self.rope, self.gate = ApplyRotaryEmb(), SiluAndMul(round_gate=True)
        sizes = (num_attention_heads, self.head_size, None, num_key_value_heads)
        self.causal, self.full = Attention(*sizes), Attention(*sizes, causal=False)
        self.model: Any = nn.Module()
        self.model.layers = nn.ModuleList(
            _layer(hidden_dimension, num_key_value_heads * self.head_size, intermediate_size, rms_norm_eps)
            for _ in range(decoder_layer)
        )
        self.model.norm = RMSNorm(hidden_dimension, rms_norm_eps, round_sum=True)

    def forward_native(
        self, inputs_embeds: Tensor, token_type_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> DecoderOutput:
        self._check(inputs_embeds, token_type_ids, attention_mask)
        mask = _visible(inputs_embeds, token_type_ids)
        if attention_mask is not None:
            mask = mask & attention_mask.bool()[:, None, None, :]
        return self._run(inputs_embeds, "forward_native", lambda q, k, v: self.full.forward_native(q, k, v, mask))

    @requires(dtypes=FLOATS, native_library=True)
    def forward_cpu(
        self, inputs_embeds: Tensor, token_type_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> DecoderOutput:
        return self._run_kernels(inputs_embeds, token_type_ids, attention_mask, "forward_cpu")

    @requires(dtypes=FLOATS, triton=True)
    def forward_cuda(
        self, inputs_embeds: Tensor, token_type_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> DecoderOutput:
        return self._run_kernels(inputs_embeds, token_type_ids, attention_mask, "forward_cuda")

    forward_hip = forward_xpu = forward_cuda

    def _run_kernels(self, x: Tensor, token_type_ids: Tensor | None, attention_mask: Tensor | None, method: str) -> Any:
        self._check(x, token_type_ids, attention_mask)
        image = x.shape[1] // 2 if token_type_ids is None else _leading_image(token_type_ids)
        padding = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        full, causal = getattr(self.full, method), getattr(self.causal, method)
        if image is None:
            mask = _visible(x, token_type_ids)
            mask = mask if padding is None else mask & padding
            return self._run(x, method, lambda q, k, v: full(q, k, v, mask))

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # Queries are the last of all keys, which is what causal attention behind a cache is.
            seen = full(q[:, :image], k[:, :image], v[:, :image], None if padding is None else padding[..., :image])
            return torch.cat((seen, causal(q[:, image:], k, v, padding)), dim=1)

        return self._run(x, method, attend)

    def _run(self, x: Tensor, method: str, attend: Any) -> DecoderOutput:
        """The layers, each op by ``method``, attention of q [B, S, N, D], k and v [B, S, K, D] by ``attend``."""

        def call(op: Any, *args: Tensor) -> Any:
            # Products of many rows are the vendor library's on a GPU, which native calls.
            product = isinstance(op, ReplicatedLinear) and method == "forward_cuda"
            return getattr(op, "forward_native" if product else method)(*args)

        if x.numel() == 0:
            return DecoderOutput(x.clone())
        cos, sin = self._tables(x)
        heads = (-1, self.head_size)
        delta, residual = x, None
        for layer in self.model.layers:
            norm = call(layer.input_layernorm, *((delta,) if residual is None else (delta, residual)))
            normed, residual = (norm, delta) if residual is None else norm
            attention = layer.self_attn
            q, k, v = (call(p, normed).unflatten(-1, heads) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
            q, k = call(self.rope, q, cos, sin), call(self.rope, k, cos, sin)
            delta = call(attention.o_proj, attend(q, k, v).flatten(2))
            normed, residual = call(layer.post_attention_layernorm, delta, residual)
            both = torch.cat((call(layer.mlp.gate_proj, normed), call(layer.mlp.up_proj, normed)), dim=-1)
            delta = call(layer.mlp.down_proj, call(self.gate, both))
        if residual is None:
            return DecoderOutput(call(self.model.norm, delta))
        return DecoderOutput(call(self.model.norm, delta, residual)[0])

    def _tables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions 0 .. S - 1: [S, D/2] in x's dtype."""
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        halves = torch.arange(0, self.head_size, 2, dtype=torch.float32, device=x.device) / self.head_size
        # Frequencies are fp32 whatever is computed with them: they are constants of the model.
        frequencies = (1.0 / self.theta**halves).to(wide)
        angles = torch.arange(x.shape[1], dtype=wide, device=x.device).unsqueeze(1) * frequencies
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def _check(self, x: Tensor, token_type_ids: Tensor | None, attention_mask: Tensor | None) -> None:
        fits = x.dim() == 3 and x.shape[2] == self.hidden_size and x.shape[1] <= self.longest
        if fits and all(t is None or t.shape == x.shape[:2] for t in (token_type_ids, attention_mask)):
            return
        types, mask = (None if t is None else tuple(t.shape) for t in (token_type_ids, attention_mask))
        raise ValueError(
            f"qwen2_decoder was built for [B, S, {self.hidden_size}] with at most {self.longest} tokens, token_type_ids and "
            f"attention_mask [B, S]; it got {tuple(x.shape)}, {types} and {mask}."
        )

    def extra_repr(self) -> str:
        return f"{len(self.model.layers)} layers, {self.hidden_size}, {self.heads} heads, {self.kv_heads} kv heads"

    @classmethod
    def cases(cls) -> Iterator[Case]:
        # B, S, layers, H, heads, kv heads, I, image tokens (None: half), padding
        real = [(1, 288, 2, 896, 14, 2, 4864, None, False), (1, 512, 2, 896, 14, 2, 4864, None, False)]
        edges: list[tuple[int, int, int, int, int, int, int, int | None, bool]] = [
            (2, 9, 2, 32, 4, 2, 48, None, False),
            (2, 8, 1, 24, 2, 1, 32, 5, True),
            (1, 70, 1, 32, 2, 2, 40, 0, False),
            (1, 6, 1, 32, 2, 2, 40, 6, False),
            (2, 7, 1, 32, 2, 1, 40, -1, True),
            (1, 1, 1, 16, 1, 1, 8, None, False),
            (1, 0, 1, 16, 2, 1, 8, None, False),
            (0, 4, 1, 16, 2, 1, 8, None, False),
        ]
        for b, s, layers, h, n, k, inner, image, padded in [*real, *edges]:
            kind = {None: "", -1: " mixed"}.get(image, f" image={image}")
            yield Case(
                name=f"B={b} S={s}{kind}{' padded' if padded else ''} layers={layers} H={h} N={n} K={k} I={inner}",
                init={
                    "decoder_layer": layers, "hidden_dimension": h, "num_attention_heads": n, "num_key_value_heads": k,
                    "intermediate_size": inner,
                },
                args=lambda i, b=b, s=s, h=h, image=image, padded=padded: _arguments(i, b, s, h, image, padded),
                dims={"T": b * s, "B": b, "S": s, "layers": layers, "H": h, "kv": k * (h // n), "I": inner},
                bench=(b, s, layers, h, n, k, inner, image, padded) in real,
                prepare=_random_parameters,
            )  # fmt: skip

    @classmethod
    def cost(cls, case: Case, dtype: torch.dtype) -> Cost:
        c = case.dims
        weights = c["layers"] * (2 * c["H"] * (c["H"] + c["kv"]) + 3 * c["H"] * c["I"])
        half = c["S"] // 2
        pairs = half * half + (c["S"] - half) * half + (c["S"] - half) * (c["S"] - half + 1) // 2
        products = 2 * c["T"] * weights + c["layers"] * 4 * c["B"] * pairs * c["H"]
        return Cost(size_bytes=dtype.itemsize * (weights + 2 * c["T"] * c["H"]), flops=products)


def _layer(hidden: int, keys: int, inner: int, eps: float) -> nn.Module:
    layer, attention, mlp = nn.Module(), nn.Module(), nn.Module()
    for name, width in (("q_proj", hidden), ("k_proj", keys), ("v_proj", keys)):
        attention.add_module(name, ReplicatedLinear(hidden, width, return_bias=False))
    attention.o_proj = ReplicatedLinear(hidden, hidden, bias=False, return_bias=False)
    mlp.gate_proj = ReplicatedLinear(hidden, inner, bias=False, return_bias=False)
    mlp.up_proj = ReplicatedLinear(hidden, inner, bias=False, return_bias=False)
    mlp.down_proj = ReplicatedLinear(inner, hidden, bias=False, return_bias=False)
    layer.self_attn, layer.mlp = attention, mlp
    layer.input_layernorm = RMSNorm(hidden, eps, round_sum=True)
    layer.post_attention_layernorm = RMSNorm(hidden, eps, round_sum=True)
    return layer


def _visible(x: Tensor, token_type_ids: Tensor | None) -> Tensor:
    """[B or 1, 1, S, S]: an image token sees the image, a query the image and the queries up to itself."""
    at = torch.arange(x.shape[1], device=x.device)
    is_query = (at >= x.shape[1] // 2).unsqueeze(0) if token_type_ids is None else token_type_ids != 0
    rows, columns = is_query.unsqueeze(2), is_query.unsqueeze(1)
    return (~columns | (rows & (at <= at.unsqueeze(1)))).unsqueeze(1)


def _leading_image(token_type_ids: Tensor) -> int | None:
    """How many image tokens each row begins with, if all others are queries and every row has as many; else None."""
    if torch.compiler.is_compiling():  # a graph cannot depend on it
        return None
    is_query = token_type_ids != 0
    count = int((~is_query).sum()) // max(1, len(is_query))
    at = torch.arange(is_query.shape[1], device=is_query.device)
    return count if bool((is_query == (at >= count)).all()) else None


def _arguments(i: Inputs, b: int, s: int, h: int, image: int | None, padded: bool) -> tuple[Tensor | None, ...]:
    x = i.randn(b, s, h)
    if image is None:
        return (x,)
    types = i.integers(0, 2, b, s) if image < 0 else (torch.arange(s) >= image).long().expand(b, s).to(i.device)
    mask = (torch.arange(s) < s - torch.arange(b).unsqueeze(1) - 1).long().to(i.device) if padded else None
    return x, types, mask


def _random_parameters(op: CustomQwen2Decoder, inputs: Inputs) -> None:
    for name, p in op.named_parameters():
        shift = 1.0 if "norm" in name else 0.0
        p.data = inputs.randn(*p.shape, scale=0.2 if p.dim() == 1 else p.shape[-1] ** -0.5, shift=shift)

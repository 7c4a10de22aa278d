"""Tiny random models of the transformers types that apply is tested on, and what apply must reach in each."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}

EVERYWHERE = {"replicated_linear", "attention", "parallel_lm_head", "logits_processor", "vocab_parallel_embedding"}


@dataclass(frozen=True)
class Kind:
    """A type of model.

    Attributes:
        ops: every op that is in place, beside ``EVERYWHERE``.
        whole: what runs as one: "model", "layers", or nothing.
        left: modules that keep their own forward though there is an op for their kind, with the reason.
        settings: of the config, beside ``COMMON``.
        without: ops of ``EVERYWHERE`` that are not in place.
    """

    ops: str
    whole: str = ""
    left: dict[str, str] = field(default_factory=dict)
    settings: dict[str, object] = field(default_factory=dict)
    without: str = ""


_LLAMA = "rms_norm silu_and_mul apply_rotary_emb"
_SLIDING = {"model": "its cache has layers with a sliding window"}
TYPES: dict[str, Kind] = {
    "apertus": Kind("rms_norm apply_rotary_emb", "model"),
    "arcee": Kind("rms_norm relu2 apply_rotary_emb", "model"),
    "biogpt": Kind(
        "layer_norm gelu", left={"self_attn": "through AttentionInterface", "embed_positions": "takes a mask, not ids"}
    ),
    "bloom": Kind(
        "layer_norm gelu_new", left={"mlp": "adds the residual itself"}, settings={"n_head": 4}, without="attention"
    ),
    "cohere": Kind("layer_norm silu_and_mul apply_rotary_emb", "model", settings={"logit_scale": 0.5}),
    "cohere2": Kind(
        "layer_norm silu_and_mul apply_rotary_emb", "layers", _SLIDING, {"sliding_window": 8, "logit_scale": 0.5}
    ),
    "ernie4_5": Kind(_LLAMA, "model"),
    "exaone": Kind(_LLAMA, "model"),
    "exaone4": Kind(_LLAMA, "layers", _SLIDING, {"sliding_window": 8, "sliding_window_pattern": 3}),
    "falcon": Kind("layer_norm gelu", left={"linear": "is a FalconLinear"}, without="replicated_linear"),
    "gemma": Kind("gemma_rms_norm gelu_and_mul apply_rotary_emb", "model", settings={"head_dim": 16}),
    "gemma2": Kind(
        "gemma_rms_norm gelu_and_mul apply_rotary_emb", "layers", _SLIDING,
        {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    ),
    "gemma3_text": Kind(
        "gemma_rms_norm gelu_and_mul apply_rotary_emb", "layers", _SLIDING,
        {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    ),
    "glm": Kind(_LLAMA, "model", settings={"head_dim": 16, "partial_rotary_factor": 0.5}),
    "glm4": Kind(_LLAMA, "model", settings={"head_dim": 16, "partial_rotary_factor": 0.5}),
    "glm4_moe": Kind(_LLAMA, "model", settings={"head_dim": 16, "partial_rotary_factor": 0.5}),
    "gpt2": Kind("layer_norm gelu_new", settings={"n_inner": 96}, without="replicated_linear"),
    "gpt_bigcode": Kind("layer_norm gelu_new", settings={"n_inner": 96}),
    "gpt_neox": Kind("layer_norm gelu", settings={"num_key_value_heads": None}),
    "gpt_oss": Kind("rms_norm", left={"self_attn": "has sinks"}, settings={"head_dim": 16}, without="attention"),
    "granite": Kind(
        _LLAMA, "model",
        settings={
            "residual_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "attention_multiplier": 0.3,
        },
    ),
    "jais2": Kind("layer_norm relu2 apply_rotary_emb", "model"),
    "llama": Kind(_LLAMA, "model"),
    "ministral3": Kind(
        "rms_norm silu_and_mul", left={"self_attn": "scales queries by position; through AttentionInterface"}
    ),
    "mistral": Kind(_LLAMA, "layers", _SLIDING, {"sliding_window": 8}),
    "mixtral": Kind("rms_norm apply_rotary_emb", "model", settings={"num_local_experts": 4}),
    "nemotron": Kind("layer_norm relu2 apply_rotary_emb", "model"),
    "olmo": Kind("layer_norm silu_and_mul apply_rotary_emb", "model"),
    "olmo2": Kind(_LLAMA, "model"),
    "olmo3": Kind(_LLAMA, "layers", _SLIDING, {"sliding_window": 8}),
    "opt": Kind(
        "layer_norm",
        left={"self_attn": "through AttentionInterface", "embed_positions": "takes a mask, not ids"},
        settings={"ffn_dim": 96, "word_embed_proj_dim": 64},
    ),
    "phi": Kind("layer_norm gelu_new apply_rotary_emb", "model", settings={"partial_rotary_factor": 0.5}),
    "phi3": Kind(_LLAMA, "model"),
    "qwen2": Kind(_LLAMA, "model"),
    "qwen2_moe": Kind(
        _LLAMA, "model", settings={"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
    ),
    "qwen3": Kind(_LLAMA, "model", settings={"head_dim": 16}),
    "qwen3_moe": Kind(
        "rms_norm apply_rotary_emb", "model",
        settings={"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "seed_oss": Kind(_LLAMA, "model", settings={"head_dim": 16}),
    "smollm3": Kind(_LLAMA, "model", settings={"no_rope_layers": [1, 1, 0]}),
    "stablelm": Kind("layer_norm silu_and_mul apply_rotary_emb", "model"),
    "starcoder2": Kind("layer_norm gelu_new apply_rotary_emb", "layers", _SLIDING, {"sliding_window": 8}),
    "vaultgemma": Kind(
        "gemma_rms_norm gelu_and_mul apply_rotary_emb", "layers", _SLIDING,
        {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    ),
}  # fmt: skip


def tiny(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0, **more: object) -> PreTrainedModel:
    """A model of this type with random weights, norms and biases included."""
    settings = {**COMMON, **TYPES[kind].settings, **more}
    settings = {k: v for k, v in settings.items() if v is not None or k == "eos_token_id"}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
            elif "embed" not in name:
                parameter *= 4.0
    return model.to(dtype)


def ids(batch: int = 2, length: int = 7, seed: int = 1) -> torch.Tensor:
    """Random tokens."""
    return torch.randint(2, 128, (batch, length), generator=torch.Generator().manual_seed(seed))

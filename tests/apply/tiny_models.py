"""Tiny random models of the transformers types that apply is tested on."""

from __future__ import annotations

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
TYPES: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "phi3": {},
    "granite": {
        "residual_multiplier": 0.5,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.3,
    },
    "olmo2": {},
    "cohere": {"logit_scale": 0.5},
    "starcoder2": {"sliding_window": 8},
    "gpt_neox": {"num_key_value_heads": None},
    "smollm3": {"no_rope_layers": [1, 1, 0]},
    "glm4": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "exaone4": {"sliding_window": 8, "sliding_window_pattern": 3},
}


def tiny(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0, **more: object) -> PreTrainedModel:
    """A model of this type with random weights, norms and biases included."""
    settings = {k: v for k, v in {**COMMON, **TYPES[kind], **more}.items() if v is not None or k == "eos_token_id"}
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

"""A llama-type model of 60 kB with its tokenizer, as a transformers folder and as a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

START, END = "<|im_start|>", "<|im_end|>"
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 128


def tokens() -> list[str]:
    """One token a byte, one merged pair, and the two that mark turns."""
    return [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", START, END]


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with a single merge."""
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens())}, merges=[("h", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([START, END])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=START, eos_token=END, pad_token=END)
    made.chat_template = CHAT
    return made


def model(tied: bool = True, seed: int = 0) -> LlamaForCausalLM:
    """Random weights; the end token is the tokenizer's."""
    torch.manual_seed(seed)
    vocabulary = tokens()
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, tie_word_embeddings=tied, rms_norm_eps=1e-5,
        bos_token_id=vocabulary.index(START), eos_token_id=vocabulary.index(END), pad_token_id=vocabulary.index(END),
        initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def save_folder(folder: Path, **how: Any) -> Path:
    """The model as ``save_pretrained`` leaves it."""
    model(**how).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def save_gguf(path: Path, source: LlamaForCausalLM, architecture: str = "llama") -> Path:
    """The model in llama.cpp's names and layout, weights as fp32."""
    import gguf

    config = source.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    vocabulary = tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_merges(["h e"])
    writer.add_token_types([3 if token in (START, END) else 1 for token in vocabulary])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT)
    for name, tensor in _gguf_tensors(source).items():
        writer.add_tensor(name, np.ascontiguousarray(tensor.float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_tensors(source: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    config = source.config
    names = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    state = source.state_dict()
    tensors = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        tensors["output.weight"] = state["lm_head.weight"]
    for layer in range(config.num_hidden_layers):
        for theirs, ggml in names.items():
            tensor = state[f"model.layers.{layer}.{theirs}.weight"]
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(ggml)
            if heads is not None:  # llama.cpp rotates neighbours, transformers halves
                halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, tensor.shape[1])
                tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
            tensors[f"blk.{layer}.{ggml}.weight"] = tensor
    return tensors

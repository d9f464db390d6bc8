"""A tiny random Llama as a GGUF file, with a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from tokenizers.pre_tokenizers import ByteLevel


def write_gguf(path: Path, layers: int = 1, size: int = 16, heads: int = 2, words: int = 259) -> None:
    dice = np.random.default_rng(0)
    writer = GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(size)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_rope_dimension_count(size // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(words)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<end>", *sorted(ByteLevel.alphabet()), "ab", "cd"])
    writer.add_token_types([3] + [1] * (words - 1))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)

    def weight(name: str, *shape: int) -> None:
        writer.add_tensor(name, dice.normal(0, 0.1, shape).astype(np.float32))

    weight("token_embd.weight", words, size)
    weight("output.weight", words, size)
    weight("output_norm.weight", size)
    for layer in range(layers):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            weight(f"blk.{layer}.{part}.weight", size, size)
        for part in ("attn_norm", "ffn_norm"):
            weight(f"blk.{layer}.{part}.weight", size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

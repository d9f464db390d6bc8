"""A GGUF file that asks for BOS gets it before every text, which transformers forgets."""

import gguf
import numpy as np
import pytest

from msrnn.hf.load import load

PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab"]


def write_gguf(path, add_bos: bool | None) -> str:
    """A llama of one layer with a SentencePiece vocabulary."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(PIECES))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(PIECES)
    writer.add_token_scores([-float(at) for at in range(len(PIECES))])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * 5)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    shapes = {"token_embd.weight": (len(PIECES), 16), "output_norm.weight": (16,), "output.weight": (len(PIECES), 16)}
    shapes |= {f"blk.0.{name}_norm.weight": (16,) for name in ("attn", "ffn")}
    shapes |= {f"blk.0.attn_{name}.weight": (size, 16) for name, size in zip("qkv", (16, 8, 8), strict=True)}
    shapes |= {f"blk.0.{name}.weight": (16, 16) for name in ("attn_output", "ffn_gate", "ffn_up", "ffn_down")}
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(name, random.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@pytest.mark.parametrize("add_bos, first", [(None, True), (True, True), (False, False)])
def test_texts_start_with_bos_where_the_file_says_so(tmp_path, add_bos, first):
    _, tokenizer = load(write_gguf(tmp_path / "tiny.gguf", add_bos))
    ids = tokenizer("ab a")["input_ids"]
    assert (ids[0] == tokenizer.bos_token_id == 1) == first
    assert ids.count(1) == first
    assert tokenizer("ab a", add_special_tokens=False)["input_ids"] == ids[first:]

"""SentencePiece's BPE from a GGUF file's tokens, which transformers reads as Unigram: words joined by rank of merge."""

import pytest
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import Unigram
from transformers import PreTrainedTokenizerFast

from msrnn.hf.gguf_tokenizer import is_unigram, merges, restore_bpe

SPECIAL = ["<unk>", "<bos>", "\n\n", "▁▁"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
NORMAL = ["he", "▁t", "▁the", "ll", "hell", "▁", "t", "h", "e", "l", "o", "\n"]  # in the order of their merges
TOKENS = [*SPECIAL, *BYTES, *NORMAL]
SCORES = [-1000.0] * 4 + [0.0] * 256 + [-float(rank) for rank in range(len(NORMAL))]
TYPES = [2, 3, 4, 4] + [6] * 256 + [1] * len(NORMAL)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """As transformers makes it of Gemma's GGUF file."""
    backend = Tokenizer(Unigram(list(zip(TOKENS, SCORES, strict=True)), unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<bos>")


def test_merges_follow_the_scores():
    assert merges({"ab": -1.0, "abc": -0.0, "a": -2.0, "b": -3.0, "c": -4.0}) == [("ab", "c"), ("a", "b")]
    assert merges({"aaa": -0.0, "aa": -1.0, "a": -2.0}) == [("aa", "a"), ("a", "aa"), ("a", "a")]


@pytest.mark.parametrize(
    "text, pieces",
    [
        (" the", ["▁the"]),  # he first, then ▁t, then both
        ("hello", ["hell", "o"]),
        ("the  he", ["t", "he", "▁▁", "he"]),  # two spaces are one token of the file's own
        ("he\n\nhe\n", ["he", "\n\n", "he", "\n"]),
        ("hé", ["h", "<0xC3>", "<0xA9>"]),
    ],
)
def test_words_are_joined_as_bpe_does(tokenizer, text, pieces):
    restore_bpe(tokenizer, TOKENS, SCORES, TYPES)
    assert tokenizer.tokenize(text) == pieces
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_only_unigram_is_replaced(tokenizer, tmp_path):
    assert is_unigram(tokenizer)
    assert tokenizer.tokenize("hello") != ["hell", "o"]
    restore_bpe(tokenizer, TOKENS, SCORES, TYPES)
    assert not is_unigram(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path).tokenize("hello") == ["hell", "o"]

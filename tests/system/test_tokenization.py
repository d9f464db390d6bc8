"""Streaming tokenization gives the ids of the whole text, whatever the tokenizer, the text and the blocks."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, trainers
from tokenizers import models as kinds
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from msrnn.hf import load as models
from msrnn.system import tokenization
from msrnn.system.tokenization import stream_tokens

BYTES = [f"<0x{i:02X}>" for i in range(256)]
WORDS = "the cat sat on a mat and read , then it did n't sleep : 12 345 == ( x ) \n\n\t . don't we're"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NASTY = (
    *("the ", "word", "\n", "\r\n", "\n\n\n", "  ", "    ", "\t", "12", "3456789", "é", "e\u0301", "日本語", "🙂"),
    *(
        "👩‍👩‍👧",
        "'re",
        "don't",
        "<|im_start|>",
        "<|im_",
        "<s>",
        "...",
        "===",
        "\u00a0",
        "\u3000",
        "ﬁ",
        "Ω",
        "\x00",
        "\x85",
        "a",
    ),
)


def corpus() -> list[str]:
    rng = random.Random(0)
    lines = [" ".join(rng.choices(WORDS.split(" "), k=30)) for _ in range(300)]
    return lines + ["a" * n for n in range(1, 33)] * 5 + [" " * n + "x" for n in range(33)] * 5


def sentencepiece(kind: str) -> PreTrainedTokenizerFast:
    """What SentencePiece models become in transformers: spaces are ▁, one stands before the text, <s> before all."""
    tokenizer = Tokenizer(kinds.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    scheme = "never" if kind == "normalizer" else "always"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=kind == "words")
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", "<s>", *BYTES], show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    if kind == "normalizer":  # Llama 2: no splitting at all, merges may cross words
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = None
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


def unigram() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(kinds.Unigram())
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=300, unk_token="<unk>", special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def bundled() -> Any:
    return AutoTokenizer.from_pretrained(models.bundled())


def llama3() -> Any:
    """Words split as Llama 3 does, where a newline may belong to what stands before it; accents are composed."""
    tokenizer = bundled()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splits = [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), byte_level]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer


MAKERS = {
    "bundled": bundled,
    "llama3": llama3,
    "words": lambda: sentencepiece("words"),
    "no words": lambda: sentencepiece("no words"),
    "normalizer": lambda: sentencepiece("normalizer"),
    "unigram": unigram,
}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    return {name: make() for name, make in MAKERS.items()}


def whole(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    return ids


def blocks(text: str, size: int) -> Iterator[str]:
    return (text[i : i + size] for i in range(0, len(text), size))


def nasty(seed: int, runs: int) -> str:
    """A text of a few thousand characters, of bits that go wrong at cuts, some of them repeated up to `runs` times."""
    rng, parts = random.Random(seed), []
    while sum(map(len, parts)) < 4000:
        repeats = rng.choice([1, 1, 1, 1, 1, 1, 40, runs])
        parts.append(rng.choice(NASTY) * rng.randint(1, repeats))
    return "".join(parts)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("seed", range(3))
def test_nasty_texts(tokenizers, name, seed):
    text = nasty(seed, runs=100 if name == "unigram" else 2500)
    expected = whole(tokenizers[name], text)
    for size, segment in ((100, 300), (5000, 2000)):
        assert list(stream_tokens(tokenizers[name], blocks(text, size), segment=segment)) == expected


@given(st.lists(st.tuples(st.sampled_from(NASTY), st.integers(1, 30)), min_size=30, max_size=120), st.integers(1, 900))
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_with_tight_margins(tokenizers, tight, parts, size):
    text = "".join(bit * repeats for bit, repeats in parts)
    for name in ("bundled", "words"):
        assert list(stream_tokens(tokenizers[name], blocks(text, size), segment=40)) == whole(tokenizers[name], text)


@pytest.fixture
def tight(monkeypatch):
    monkeypatch.setattr(tokenization, "MARGIN", 256)


@pytest.mark.parametrize("name", ["bundled", "normalizer"])
@pytest.mark.parametrize("unit", ["a", " ", "\n", "日本語", "0123456789", "xyzzy"])
def test_one_enormous_line(tokenizers, name, unit):
    text = unit * (40_000 // len(unit))
    assert list(stream_tokens(tokenizers[name], [text])) == whole(tokenizers[name], text)


def test_an_ordinary_text_as_it_is_used(tokenizers):
    text = "".join(f"{file.read_text()}\r\n" for file in sorted(Path(tokenization.__file__).parents[1].glob("*/*.py")))[
        :70_000
    ]
    for name in ("bundled", "words"):
        assert list(stream_tokens(tokenizers[name], blocks(text, 1 << 16))) == whole(tokenizers[name], text)


def test_special_tokens_stand_at_the_ends_only(tokenizers):
    text = "the cat sat on a mat\n" * 300
    ids = list(stream_tokens(tokenizers["unigram"], [text], segment=500))
    assert (ids[0], ids[-1]) == (1, 2)
    assert not {1, 2} & set(ids[1:-1])
    plain = list(stream_tokens(tokenizers["unigram"], [text], segment=500, special=False))
    assert plain == ids[1:-1]
    assert list(stream_tokens(tokenizers["unigram"], [])) == whole(tokenizers["unigram"], "") == [1, 2]


def test_ids_come_before_the_text_has_ended(tokenizers):
    def endless() -> Iterator[str]:
        while True:
            yield "and so on, and so on\n" * 50

    ids = stream_tokens(tokenizers["bundled"], endless())
    assert len([next(ids) for _ in range(20_000)]) == 20_000


def test_memory_is_that_of_a_piece(tokenizers):
    def line() -> Iterator[str]:
        rng = random.Random(0)
        for _ in range(10):
            yield "".join(rng.choices("abcdefgh", k=1 << 16))

    tracemalloc.start()
    count = sum(1 for _ in stream_tokens(tokenizers["words"], line()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count > 200_000
    assert peak < 5_000_000  # the ids alone of the whole line take more

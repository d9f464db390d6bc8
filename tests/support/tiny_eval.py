"""For the tests of the evaluation: a tiny random model with a tokenizer of bytes, and texts laid out as data."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.support.models import tiny_llama

SHARED = Path(__file__).parents[3] / "shared" / "data"
WORDS = ["river", "stone", "lantern", "walked", "slowly", "never", "said", "the", "old", "captain", "and", "wept"]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and one for the end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer_object = Tokenizer(models.BPE({letter: number for number, letter in enumerate(["<end>", *alphabet])}, []))
    tokenizer_object.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer_object.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_object, eos_token="<end>", pad_token="<end>", padding_side="left"
    )
    fast.clean_up_tokenization_spaces = False
    return fast


def model() -> LlamaForCausalLM:
    special = {"eos_token_id": 0, "pad_token_id": 0, "bos_token_id": None}
    return tiny_llama(vocab_size=257, num_hidden_layers=2, max_position_embeddings=512, **special)


def save(folder: Path) -> Path:
    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def prose(count: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) + ("." if rng.random() < 0.1 else "") for _ in range(count))


def texts(folder: Path, books: int = 3, words: int = 120) -> Path:
    """A folder laid out as `--data` needs it."""
    for name in ("pg19", "squality", "qasper"):
        (folder / name).mkdir(parents=True)
    for number in range(books):
        (folder / "pg19" / f"{number}.txt").write_text(prose(words + 7 * number, number))
    responses = [{"response_text": prose(12, 50 + i)} for i in range(4)]
    questions = [{"question_text": f"What of the {word}?", "responses": responses} for word in ("captain", "river")]
    stories = [{"metadata": {"passage_id": str(n)}, "document": prose(80, n), "questions": questions} for n in (7, 8)]
    (folder / "squality" / "dev.jsonl").write_text("".join(json.dumps(one) + "\n" for one in stories))
    paper = {"input": prose(90, 3), "instructions": ["Why?", "Who?", "Why?"], "outputs": ["the river", "yes", "stone"]}
    (folder / "qasper" / "some.jsonl").write_text(json.dumps(paper) + "\n")
    return folder

"""What `make demo` measures under one policy: time, memory and perplexity of a text, and the answer to a question."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from ..core.heads import parts_of
from ..core.trace import Trace
from ..eval.perplexity import Progress, new_cache, score
from ..hf.cache import BoundedCache
from ..hf.chat_template import split_template
from ..plan import Plan
from ..rnn import PIECE, RNN
from ..system.console import progress
from ..system.memory import Peak
from ..system.tokenization import stream_tokens

ANSWER = 64  # tokens of an answer at most


@dataclass(frozen=True)
class Turn:
    """A user's message as token ids: what the chat template puts before it, a text, and a question about the text."""

    prefix: list[int]
    text: list[int]
    question: list[int]

    @classmethod
    def tokenize(cls, tokenizer: Any, blocks: Iterable[str], length: int, question: str) -> Turn:
        """Prefix and text together have `length` tokens, or fewer where the text is short."""
        before, after = split_template(tokenizer, default=("", "\nAnswer:"))
        prefix = tokenizer(before, add_special_tokens=not before).input_ids
        text = list(islice(stream_tokens(tokenizer, blocks, special=False), max(length - len(prefix), 0)))
        if len(text) < 2:
            raise ValueError(f"there are {len(text)} tokens of text to read; give more text or a greater --length")
        return cls(prefix, text, tokenizer(f"\n\n{question}{after}", add_special_tokens=False).input_ids)

    @property
    def context(self) -> list[int]:
        """All that is read before the question."""
        return self.prefix + self.text


@dataclass(frozen=True)
class Row:
    """One policy's measurements and its answer."""

    policy: str
    read: int
    held: int
    bytes: int
    peak: int
    seconds: float
    perplexity: float
    answer: str


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, turn: Turn, policy: str, plan: Plan
) -> tuple[Row, Trace | None]:
    """Read once for time and memory, once more for perplexity and a trace of a bounded state, and ask the question.

    `full` is the model as transformers runs it, not our policy of that name: the baseline.
    """
    bounded = None if policy == "full" else plan
    cache, seconds, peak = _time(model, turn.context, policy, bounded)
    held, size = _held(cache), nbytes(cache)
    state = None if bounded is None else RNN(model, bounded).start(trace=True)
    cache = new_cache(model) if state is None else state.cache
    with progress(len(turn.context), f"{policy}: perplexity", "tok") as bar:
        if turn.prefix:
            _read(model, turn.prefix, cache, bar.update)
        result = score(model, turn.text, cache, progress=bar.update)
    trace = None if state is None else state.trace
    if trace is not None:
        trace.tokens = torch.tensor([turn.context])
    answer = _answer(model, tokenizer, turn, cache)
    return Row(policy, len(turn.context), held, size, peak, seconds, result.perplexity, answer), trace


def _time(model: PreTrainedModel, ids: list[int], policy: str, plan: Plan | None) -> tuple[Cache, float, int]:
    """The cache after reading `ids`, the seconds that took, and how far memory rose."""
    with ThreadPoolExecutor(1) as warm_up:  # a thread frees its scratch memory at its end
        warm_up.submit(_read, model, ids[: 2 * PIECE], new_cache(model, plan)).result()  # compiles kernels
    cache = new_cache(model, plan)
    _release_memory()
    with progress(len(ids), f"{policy}: prefill", "tok") as bar, Peak(model.device) as peak:
        start = time.perf_counter()
        _read(model, ids, cache, bar.update)
        seconds = time.perf_counter() - start
    return cache, seconds, peak.bytes


@torch.no_grad()
def _read(model: PreTrainedModel, ids: list[int], cache: Cache, on_tokens: Progress | None = None) -> None:
    """Prefill in pieces, with the logits of the last token only: the same way for every policy."""
    for piece in torch.split(torch.tensor([ids], device=model.device), PIECE, 1):
        logits = model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        logits[0, 0, 0].item()  # waits for the GPU
        if on_tokens is not None:
            on_tokens(piece.shape[1])


def _held(cache: Cache) -> int:
    """Tokens per layer, on average where layers or their KV heads differ."""
    if not isinstance(cache, BoundedCache):
        return int(cache.get_seq_length())
    slots = [part for layer in cache.bounded if layer.slots is not None for part in parts_of(layer.slots)]
    return round(sum(int(part.held.max()) for part in slots) / len(slots))


def nbytes(cache: Cache) -> int:
    """Bytes of the keys and values in a cache (and of a bounded one's positions and scores)."""
    if isinstance(cache, BoundedCache):
        return cache.nbytes
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values) if tensor is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _release_memory() -> None:
    """Give freed memory back to the system, so that every policy starts from the same level."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
        if trim is not None:
            trim(0)


def _answer(model: Any, tokenizer: Any, turn: Turn, cache: Cache) -> str:
    """The answer to the question, up to its last whole sentence."""
    prompt = torch.tensor([turn.context + turn.question], device=model.device)
    options = {"max_new_tokens": ANSWER, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    tokens = model.generate(prompt, past_key_values=cache, **options)[0, prompt.shape[1] :]
    answer = " ".join(tokenizer.decode(tokens, skip_special_tokens=True).split())
    sentences = re.match(r".*[.!?](?=\s|$)", answer)
    return sentences[0] if sentences else answer

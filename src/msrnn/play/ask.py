"""A question about what was read: every lane answers from a fork of its state, and the answer's sources are located.

Sources are the passages that full attention looked at while it answered, where it has read the whole text; otherwise
the passages that share the rarest words with question and answers. Which of them are still held, the page knows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..rnn import RNN, RNNState
from .observe import fork, observe
from .reading import PIECE, Lane, Message

ANSWER = 96  # tokens at most
PASSAGE = 24  # tokens
PASSAGES = 4
_WORD = re.compile(r"\w{3,}")


@dataclass
class Answer:
    """What a lane says, token by token; `attention` [T] is where its heads looked in the text."""

    rnn: RNN
    state: RNNState
    ends: frozenset[int]
    attention: Tensor | None = None

    @classmethod
    def of(cls, lane: Lane, ends: frozenset[int], *, attention: bool = False) -> Answer:
        """From a fork, so that the lane itself goes on as if nothing had been asked."""
        answer = cls(lane.rnn, fork(lane.state), ends)
        if attention:
            answer.attention = torch.zeros(lane.seen, device=lane.rnn.device)
        return answer

    @torch.no_grad()
    def tokens(self, question: Sequence[int], limit: int = ANSWER) -> Iterator[int]:
        for start in range(0, len(question) - 1, PIECE):
            part = question[start : min(start + PIECE, len(question) - 1)]
            _, self.state = self.rnn.step(torch.tensor([part]), self.state)
        observers = [] if self.attention is None else observe(self.state)
        for observer in observers:
            observer.attention = None if self.attention is None else torch.zeros_like(self.attention)
        token = question[-1]
        for _ in range(limit):
            logits, self.state = self.rnn.step(torch.tensor([[token]]), self.state)
            token = int(logits.argmax())
            if token in self.ends:
                break
            yield token
        if observers:
            self.attention = torch.stack([o.attention for o in observers if o.attention is not None]).mean(0)


def by_attention(attention: Tensor, readable: Sequence[bool]) -> list[Message]:
    """Passages with the most attention. `readable`: which positions are text, and no template or attention sink."""
    weights = attention.cpu() * torch.tensor(readable, dtype=torch.float32)
    return _passages(weights.tolist())


def by_words(texts: Sequence[str], words: str) -> list[Message]:
    """Passages that share words with `words`, rare words first."""
    wanted = {word.lower() for word in _WORD.findall(words)}
    starts, whole = [], ""
    for text in texts:
        starts.append(len(whole))
        whole += text
    places = [(match.start(), match[0].lower()) for match in _WORD.finditer(whole)]
    counts = Counter(word for _, word in places)
    weights, token = [0.0] * len(texts), 0
    for place, word in places:
        while token + 1 < len(starts) and starts[token + 1] <= place:
            token += 1
        if word in wanted:
            weights[token] += 1 / counts[word] ** 2
    return _passages(weights)


def _passages(weights: Sequence[float]) -> list[Message]:
    """The heaviest stretches that do not overlap, in the order of their weight."""
    size = min(PASSAGE, len(weights))
    sums, total = [], sum(weights[:size])
    for start in range(len(weights) - size + 1):
        sums.append((total, start))
        if start + size < len(weights):
            total += weights[start + size] - weights[start]
    chosen: list[Message] = []
    for weight, start in sorted(sums, key=lambda pair: (-pair[0], pair[1])):
        if weight <= 1e-12 or len(chosen) == PASSAGES:
            break
        if all(abs(start - other["start"]) >= size for other in chosen):
            chosen.append({"start": start, "end": start + size, "weight": weight})
    return chosen

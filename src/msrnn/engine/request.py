"""What the engine is asked for, and what comes of it."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Literal

MOST_STOPS = 16  # end tokens a request may have


@dataclass(frozen=True)
class Request:
    """A prompt's token ids and how to continue it. `stops`: end tokens, the model's own if None.

    With a `temperature` above 0 tokens are sampled, reproducibly for a `seed`, from the `top_k` most likely (None: all)
    and of these from the most likely of total `top_p`. `on_token` is called with each new token, `on_read` with the
    number of prompt tokens that have just been read.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    stops: Sequence[int] | None = None
    on_token: Callable[[int], None] | None = None
    on_read: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        if not _are_ids(self.prompt):
            shown = reprlib.repr(self.prompt)
            raise ValueError(f"a prompt is a list of token ids, not {shown}; e.g. tokenizer(text).input_ids")
        if not len(self.prompt):
            raise ValueError("the prompt is empty; give at least one token")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (the likeliest token) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must lie above 0 and at most at 1")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 1, or None for all tokens")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must be a whole number from 0 up, below 2**63")
        if len(self.stops or ()) > MOST_STOPS:
            raise ValueError(f"{len(self.stops or ())} end tokens were given; the engine takes {MOST_STOPS} at most")


def _are_ids(prompt: Any) -> bool:
    """Whether it is a sequence of whole numbers; a tensor or an array of one dimension is, too."""
    try:
        return all(index(one) is not None for one in prompt)
    except TypeError:
        return False


@dataclass(frozen=True)
class Finished:
    """A request's new tokens, the end token among them; `index` is its place among the requests."""

    index: int
    request: Request
    tokens: list[int]
    reason: Literal["stop", "length"]

"""What the tasks of one run share: model, tokenizer, data, and how texts become prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from .task import Output


@dataclass
class Tools:
    """`data` is a folder, or None for the `datasets` library."""

    model: PreTrainedModel
    tokenizer: Any
    data: str | None = None
    seed: int = 0
    told: Callable[[str, str], Output | None] = lambda policy, sample: None  # what a policy wrote, once it did

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.get_input_embeddings().weight.device)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def opening(self) -> list[int]:
        """What the tokenizer puts before every text: BOS, or nothing."""
        whole = list(self.tokenizer("a", verbose=False)["input_ids"])
        first = self.encode("a")[0]
        return whole[: whole.index(first)] if first in whole else []

    def chat(self, before: str, document: str, after: str, context: int) -> list[int]:
        """The prompt `before + document + after` in at most `context` tokens: the end of the document is cut to fit.

        Where the model has a chat template, the whole is one message in it.
        """
        opening, closing = self.frame()
        head, tail = self.begin(opening + before), self.encode(after + closing)
        room = context - len(head) - len(tail)
        if room < 0:
            raise ValueError(f"the prompt around the document has {len(head) + len(tail)} tokens, more than {context}")
        return head + self.encode(document)[:room] + tail

    def begin(self, text: str) -> list[int]:
        """The ids of a prompt's beginning; a chat template brings its own opening token."""
        return self.encode(text) if self.frame()[0] else self.opening() + self.encode(text)

    def frame(self) -> tuple[str, str]:
        """What the chat template puts before and after one message; nothing where there is none."""
        if not getattr(self.tokenizer, "chat_template", None):
            return "", ""
        mark = "msrnn-message"
        said = [{"role": "user", "content": mark}]
        text: str = self.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        before, found, after = text.partition(mark)
        if not found:
            raise ValueError(f"the chat template of {self.tokenizer.name_or_path} does not keep messages as they are")
        return before, after

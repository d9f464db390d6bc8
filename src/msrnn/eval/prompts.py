"""What the tasks of one run share: model, tokenizer, data, and how texts become prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..hf.chat_template import split_template
from .task import Output


@dataclass
class Resources:
    """`data` is a folder, or None for the `datasets` library.

    `earlier_output(policy, sample)` is what a policy generated for a sample, None where it has not done so yet.
    """

    model: PreTrainedModel
    tokenizer: Any
    data: str | None = None
    seed: int = 0
    earlier_output: Callable[[str, str], Output | None] = lambda policy, sample: None

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.get_input_embeddings().weight.device)

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def bos_ids(self) -> list[int]:
        """What the tokenizer puts before every text: BOS, or nothing."""
        whole = list(self.tokenizer("a", verbose=False)["input_ids"])
        first = self.encode("a")[0]
        return whole[: whole.index(first)] if first in whole else []

    def prompt(self, before: str, document: str, after: str, context: int) -> list[int]:
        """The prompt `before + document + after` in at most `context` tokens: the end of the document is cut to fit.

        Where the model has a chat template, the whole is one user message in it.
        """
        prefix, suffix = self.template()
        head, tail = self.encode_start(prefix + before), self.encode(after + suffix)
        room = context - len(head) - len(tail)
        if room < 0:
            raise ValueError(f"the prompt around the document has {len(head) + len(tail)} tokens, more than {context}")
        return head + self.encode(document)[:room] + tail

    def encode_start(self, text: str) -> list[int]:
        """The ids of a prompt's beginning; a chat template brings its own BOS."""
        return self.encode(text) if self.template()[0] else self.bos_ids() + self.encode(text)

    def template(self) -> tuple[str, str]:
        """The chat template's text before and after one user message; empty where there is no template."""
        return split_template(self.tokenizer, default=("", ""))

"""Token ids as the text that each one adds, and texts as token ids with a chat template around them."""

from __future__ import annotations

from typing import Any

from ..hf.chat_template import Turns, split_turns


class TokenText:
    """Called with each id in turn: the text it adds, empty while a character is incomplete."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0  # ids whose text has been returned

    def __call__(self, token: int) -> str:
        self._ids.append(token)
        before, now = self._decode(self._ids[: self._shown]), self._decode(self._ids)
        if now.endswith("\ufffd") and len(self._ids) - self._shown < 8:
            return ""
        # what stands before a token decides about spaces, so the last ones stay
        self._ids, self._shown = self._ids[self._shown :], len(self._ids) - self._shown
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def template(tokenizer: Any) -> Turns | None:
    """The chat template's parts, None for a tokenizer without one."""
    return split_turns(tokenizer) if getattr(tokenizer, "chat_template", None) else None


def encode_text(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return ids

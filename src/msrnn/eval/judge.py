"""An LLM judge behind any OpenAI-compatible endpoint: which of two stories is better; asked twice, sides swapped."""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple

from ..system.extras import install

VERDICTS = ("wins", "ties", "losses")
_BOTH_SIDES: dict[tuple[str | None, ...], str] = {
    ("A", "B"): "wins",
    ("B", "A"): "losses",
    ("tie", "tie"): "ties",
}
QUESTION = """\
Two stories were written to this request:
{request}

Story A:
{a}

Story B:
{b}

Which story is better: more coherent, more interesting, closer to the request? Answer with one word: A, B or tie."""


class Judgement(NamedTuple):
    """`agrees`: the judge says the same whichever story comes first; `answered`: the share of its replies that say it.

    Two replies that say nothing of the kind do not agree.
    """

    verdict: str
    agrees: bool
    answered: float


class Judge:
    """The key is taken from $OPENAI_API_KEY; local servers need none."""

    def __init__(self, url: str, model: str) -> None:
        try:
            from openai import OpenAI
        except ImportError as error:
            raise ValueError(f"a judge needs the package openai; {install('judge')}") from error
        self.model = model
        self.client: Any = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"))

    def compare(self, request: str, story: str, rival: str) -> Judgement:
        """A win or a loss only if the judge says so on both sides."""
        sides = self.prefers(request, story, rival), self.prefers(request, rival, story)
        answered = sum(side is not None for side in sides) / len(sides)
        return Judgement(_BOTH_SIDES.get(sides, "ties"), sides in _BOTH_SIDES, answered)

    def prefers(self, request: str, a: str, b: str) -> str | None:
        """`A`, `B` or `tie`; None for a reply that says none of them."""
        from openai import OpenAIError

        question = QUESTION.format(request=request, a=a, b=b)
        try:
            reply = self.client.chat.completions.create(
                model=self.model, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=8
            )
        except OpenAIError as error:
            raise ValueError(f"the judge at {self.client.base_url} does not answer: {error}") from error
        return verdict(reply.choices[0].message.content or "")


def verdict(answer: str) -> str | None:
    """`A`, `B` or `tie`, from the first words of the judge."""
    match = re.match(r"\W*(?:story\s+)?(a|b|tie)\b", answer.strip(), re.IGNORECASE)
    return {"a": "A", "b": "B", "tie": "tie"}[match[1].lower()] if match else None

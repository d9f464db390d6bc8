"""An LLM judge behind any OpenAI-compatible endpoint: which of two stories is better; asked twice, sides swapped."""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple

VERDICTS = ("wins", "ties", "losses")
QUESTION = """\
Two stories were written to this request:
{request}

Story A:
{a}

Story B:
{b}

Which story is better: more coherent, more interesting, closer to the request? Answer with one word: A, B or tie."""


class Judgement(NamedTuple):
    """`agrees`: the judge says the same whichever story comes first."""

    verdict: str
    agrees: bool


class Judge:
    """The key is taken from $OPENAI_API_KEY; local servers need none."""

    def __init__(self, url: str, model: str) -> None:
        try:
            from openai import OpenAI
        except ImportError as error:
            raise ValueError("a judge needs the package openai; pip install 'msrnn[judge]'") from error
        self.model = model
        self.client: Any = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"))

    def compare(self, request: str, story: str, rival: str) -> Judgement:
        """A win or a loss only if the judge says so on both sides."""
        sides = self.prefers(request, story, rival), self.prefers(request, rival, story)
        verdicts = {("A", "B"): "wins", ("B", "A"): "losses"}
        return Judgement(verdicts.get(sides, "ties"), sides in verdicts or sides == ("tie", "tie"))

    def prefers(self, request: str, a: str, b: str) -> str:
        """`A`, `B` or `tie`; an answer that is none of them is a tie."""
        from openai import OpenAIError

        question = QUESTION.format(request=request, a=a, b=b)
        try:
            reply = self.client.chat.completions.create(
                model=self.model, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=8
            )
        except OpenAIError as error:
            raise ValueError(f"the judge at {self.client.base_url} does not answer: {error}") from error
        return verdict(reply.choices[0].message.content or "")


def verdict(answer: str) -> str:
    """`A`, `B` or `tie`, from the words of the judge."""
    match = re.match(r"\W*(?:story\s+)?(a|b)\b", answer.strip(), re.IGNORECASE)
    return match[1].upper() if match else "tie"

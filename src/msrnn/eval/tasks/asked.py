"""Questions about documents: what SQuALITY and QASPER share. The document's end is cut so that all fits the context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..data import Question
from ..prompts import Tools
from ..task import Output, Row, Sample


@dataclass(frozen=True)
class Settings:
    """`context` is the whole prompt, template included; what is written comes on top of it."""

    context: int = 4096
    new_tokens: int = 512

    def __post_init__(self) -> None:
        for name in ("context", "new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


def samples(questions: Iterator[Question]) -> Iterator[Sample]:
    for number, question in enumerate(questions):
        yield Sample(f"{question.document_name}/{number}", question.document_name, question)


def prompt(tools: Tools, settings: Settings, instruction: str) -> Callable[[Sample, int | None], list[int]]:
    """Document, instruction, question; for a shorter context the document is cut further."""

    def made(sample: Sample, context: int | None) -> list[int]:
        asked: Question = sample.content
        after = f"\n\n{instruction}\n\nQuestion:\n{asked.question.strip()}\n\nAnswer:\n"
        return tools.chat("", asked.document.strip(), after, min(context or settings.context, settings.context))

    return made


def scored(by: Callable[[str, list[str]], dict[str, float]]) -> Callable[[Sample, Output], list[Row]]:
    def score(sample: Sample, output: Output) -> list[Row]:
        asked: Question = sample.content
        return [Row(by(output.text.strip(), asked.answers) | {"words": len(output.text.split()), "count": 1.0})]

    return score

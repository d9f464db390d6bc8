"""Questions about documents: what SQuALITY and QASPER share. The document's end is cut to fit the context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..data import Question
from ..prompts import Resources
from ..task import Output, Row, Sample


@dataclass(frozen=True)
class Settings:
    """`context` is the length of the whole prompt, template included; the new tokens come on top of it."""

    context: int = 4096
    new_tokens: int = 512

    def __post_init__(self) -> None:
        for name in ("context", "new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


def samples(questions: Iterator[Question]) -> Iterator[Sample]:
    for number, question in enumerate(questions):
        yield Sample(f"{question.document_name}/{number}", question.document_name, question)


def prompt_builder(
    resources: Resources, settings: Settings, instruction: str
) -> Callable[[Sample, int | None], list[int]]:
    """Document, instruction, question; for a shorter context the document is cut further."""

    def prompt(sample: Sample, context: int | None) -> list[int]:
        question: Question = sample.content
        after = f"\n\n{instruction}\n\nQuestion:\n{question.question.strip()}\n\nAnswer:\n"
        length = min(context or settings.context, settings.context)
        return resources.prompt("", question.document.strip(), after, length)

    return prompt


def scorer(columns: Callable[[str, list[str]], dict[str, float]]) -> Callable[[Sample, Output], list[Row]]:
    """`columns(answer, references)`, the number of words beside them."""

    def score(sample: Sample, output: Output) -> list[Row]:
        question: Question = sample.content
        scores = columns(output.text.strip(), question.answers)
        return [Row(scores | {"words": len(output.text.split()), "count": 1.0})]

    return score

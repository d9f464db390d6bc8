"""SQuALITY: a paragraph that answers a question about a story; the geometric mean of ROUGE-1, -2 and -L."""

from __future__ import annotations

from dataclasses import dataclass

from .. import data, metrics
from ..prompts import Resources
from ..task import Task
from . import document_questions

INSTRUCTION = "Answer the question about the story above in a paragraph."


@dataclass(frozen=True)
class Settings(document_questions.Settings):
    new_tokens: int = 512


def task(settings: Settings, resources: Resources) -> Task:
    return Task(
        "squality",
        lambda: document_questions.samples(data.squality(resources.data)),
        document_questions.prompt_builder(resources, settings, INSTRUCTION),
        document_questions.scorer(metrics.rouge),
        (metrics.geometric_rouge(), *(metrics.mean(name) for name in metrics.ROUGE), metrics.mean("words")),
        new_tokens=settings.new_tokens,
    )

"""QASPER: a short answer to a question about a scientific article; token F1 with the best of the right answers."""

from __future__ import annotations

from dataclasses import dataclass

from .. import data, metrics
from ..prompts import Resources
from ..task import Task
from . import document_questions

INSTRUCTION = (
    "Answer the question about the article above as concisely as you can, with a phrase or a sentence. If the article "
    'does not say, write "unanswerable". If it is a yes/no question, write "yes", "no" or "unanswerable". Do not '
    "explain."
)


@dataclass(frozen=True)
class Settings(document_questions.Settings):
    new_tokens: int = 128


def task(settings: Settings, resources: Resources) -> Task:
    return Task(
        "qasper",
        lambda: document_questions.samples(data.qasper(resources.data)),
        document_questions.prompt_builder(resources, settings, INSTRUCTION),
        document_questions.scorer(lambda answer, references: {"f1": metrics.f1(answer, references)}),
        (metrics.mean("f1"), metrics.mean("words")),
        new_tokens=settings.new_tokens,
    )

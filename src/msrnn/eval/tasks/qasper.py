"""QASPER: a short answer to a question about a scientific article; token F1 with the best of the right answers."""

from __future__ import annotations

from dataclasses import dataclass

from .. import data, metrics
from ..prompts import Tools
from ..task import Task
from . import asked

INSTRUCTION = (
    "Answer the question about the article above as concisely as you can, with a phrase or a sentence. If the article "
    'does not say, write "unanswerable". If it is a yes/no question, write "yes", "no" or "unanswerable". Do not '
    "explain."
)


@dataclass(frozen=True)
class Settings(asked.Settings):
    new_tokens: int = 128


def task(settings: Settings, tools: Tools) -> Task:
    return Task(
        "qasper",
        lambda: asked.samples(data.qasper(tools.data)),
        asked.prompt(tools, settings, INSTRUCTION),
        asked.scored(lambda answer, right: {"f1": metrics.f1(answer, right)}),
        (metrics.mean("f1"), metrics.mean("words")),
        writes=settings.new_tokens,
    )

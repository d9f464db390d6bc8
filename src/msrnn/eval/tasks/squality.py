"""SQuALITY: a paragraph that answers a question about a story; the geometric mean of ROUGE-1, -2 and -L."""

from __future__ import annotations

from dataclasses import dataclass

from .. import data, metrics
from ..prompts import Tools
from ..task import Task
from . import asked

INSTRUCTION = "Answer the question about the story above in a paragraph."


@dataclass(frozen=True)
class Settings(asked.Settings):
    new_tokens: int = 512


def task(settings: Settings, tools: Tools) -> Task:
    return Task(
        "squality",
        lambda: asked.samples(data.squality(tools.data)),
        asked.prompt(tools, settings, INSTRUCTION),
        asked.scored(metrics.rouge),
        (metrics.geometric_rouge(), *(metrics.mean(name) for name in metrics.ROUGE), metrics.mean("words")),
        writes=settings.new_tokens,
    )

"""Story generation: the paper's prompt, stories sampled by seed, each compared with the full model's of the same seed.

The judge is any OpenAI-compatible endpoint (`judge_url`, `judge_model`); each pair is shown twice with the sides
swapped, and a win counts only if it was preferred both times; `agreement` is how often the judge says the same in both
orders, `answered` the share of its replies that are a verdict at all. A story that ends before `new_tokens` is left out
of the judgement, as is its pair. Without a judge: the plain model's perplexity of the story (given the prompt), the
share of repeated 4-grams of words, its length in tokens, and how many ended by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .. import metrics
from ..judge import VERDICTS, Judge
from ..perplexity import token_nll
from ..prompts import Resources
from ..task import Metric, Output, Row, Sample, Task

PROMPT = (
    "Write a very long story (at least 4,000 words). The story should include at least 20 named characters, spans 3 "
    "countries and 9 cities, at least 10 chapters and should have a lot of plot twists."
)


@dataclass(frozen=True)
class Settings:
    stories: int = 100
    new_tokens: int = 2048
    temperature: float = 0.7
    judge_url: str | None = None
    judge_model: str = "gpt-4o"

    def __post_init__(self) -> None:
        for name in ("stories", "new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.temperature <= 0 and self.stories > 1:
            raise ValueError("temperature is 0, so all stories would be the same; give e.g. 0.7, or stories = 1")


def task(settings: Settings, resources: Resources) -> Task:
    judge = Judge(settings.judge_url, settings.judge_model) if settings.judge_url else None
    ids = resources.prompt("", PROMPT, "", 1 << 30)

    def score(sample: Sample, output: Output) -> list[Row]:
        columns = measure(resources, ids, output)
        full = resources.earlier_output("full", sample.id)
        if judge and full and not full.ended and not output.ended:
            judgement = judge.compare(PROMPT, output.text, full.text)
            columns |= {name: float(name == judgement.verdict) for name in VERDICTS}
            columns |= {"agreement": float(judgement.agrees), "answered": judgement.answered, "judged": 1.0}
        return [Row(columns)]

    judged = (*VERDICTS, "agreement", "answered")
    shares = tuple(Metric(name, metrics.mean(name, name, "judged").value, ("judged",)) for name in judged)
    measures = (metrics.mean("repetition"), metrics.mean("tokens"), metrics.mean("ended"))
    return Task(
        "story",
        lambda: _samples(settings),
        lambda sample, _: ids,
        score,
        (Metric("full perplexity", metrics.perplexity().value, ("nll",)), *measures, *shares),
        new_tokens=settings.new_tokens,
        temperature=settings.temperature,
    )


def _samples(settings: Settings) -> Iterator[Sample]:
    yield from (Sample(str(number), str(number), number) for number in range(settings.stories))


def measure(resources: Resources, prompt: list[int], output: Output) -> dict[str, float]:
    """The columns that need no judge."""
    nll = 0.0
    if output.ids:
        whole = torch.tensor([prompt + output.ids])
        nll = float(token_nll(resources.model, whole)[0, len(prompt) - 1 :].double().sum())
    return {
        "nll": nll,
        "tokens": float(len(output.ids)),
        "repetition": repetition(output.text),
        "ended": float(output.ended),
        "count": 1.0,
    }


def repetition(text: str, size: int = 4) -> float:
    """The share of n-grams of `size` words that the text had before."""
    words = text.split()
    ngrams = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0

"""Facts all over a chunk, questions at its end, and a profile that spends slots on the answers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import msrnn
from msrnn.budgets.calibrate import Meter, Settings, calibrate
from msrnn.budgets.recall import FACTS, goal_chunks, hide_facts, second_half
from msrnn.eval.perplexity import token_nll
from msrnn.policy import full, tova

pytestmark = pytest.mark.usefixtures("one_thread")


class Characters:
    """A tokenizer of 8-bit characters, each a token."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": list(text.encode())}

    def decode(self, ids: Tensor) -> str:
        return bytes(ids.tolist()).decode()


@pytest.fixture
def chunks() -> Tensor:
    return torch.full((2, 1200), ord("."))


def test_facts_stand_all_over_a_chunk_and_answers_at_the_end(chunks: Tensor) -> None:
    ids, counted = hide_facts(Characters(), chunks)
    assert ids.shape == chunks.shape
    assert counted.shape == (2, 1199)
    places_of_facts: list[float] = []
    for row, places in zip(ids, counted, strict=True):
        text = Characters().decode(row)
        answers = "".join(Characters().decode(row[1:][places])).split()
        hidden = [fact for fact in FACTS if fact.question in text]
        assert len(hidden) == len(answers) == 4
        assert text.endswith(answers[-1])
        for fact in hidden:
            statement = next(
                fact.statement.format(answer) for answer in answers if fact.statement.format(answer) in text
            )
            assert text.index(statement) < text.index(fact.question)
        places_of_facts += [text.index(f" {answer}") / len(row) for answer in answers]
    assert min(places_of_facts) < 1 / 3
    assert 1 / 2 < max(places_of_facts) < 7 / 8, "so that every size loses some of them"
    assert not torch.equal(ids[0], ids[1]), "each chunk has facts of its own"
    assert torch.equal(ids, hide_facts(Characters(), chunks)[0])


def test_every_question_leads_to_its_answer() -> None:
    """The question ends in the words before the value of the statement, so a copy of them continues with the value."""
    for fact in FACTS:
        before = fact.statement.split(" {}")[0].split()[-1]
        assert fact.question.split()[-1] == before
        assert fact.value(random.Random(0)) in (fact.values or [fact.value(random.Random(0))])


def test_goals_are_rows(chunks: Tensor) -> None:
    text, counted = goal_chunks("perplexity", Characters(), chunks)
    assert torch.equal(text, chunks)
    assert counted.sum(1).tolist() == [600, 600]
    assert torch.equal(counted, second_half(chunks))
    both, places = goal_chunks("both", Characters(), chunks)
    recall, answers = goal_chunks("recall", Characters(), chunks)
    assert torch.equal(both, torch.cat([text, recall]))
    assert torch.equal(places, torch.cat([counted, answers]))
    with pytest.raises(ValueError, match="unknown goal 'speed'; allowed: perplexity, recall, both"):
        goal_chunks("speed", Characters(), chunks)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chunks of 100 tokens have no room for facts; use --length"):
        goal_chunks("recall", Characters(), chunks[:, :100])


def test_only_answers_count(llama: Any, tmp_path: Path) -> None:
    ids = torch.randint(0, 64, (2, 64), generator=torch.Generator().manual_seed(0))
    counted = torch.zeros(2, 63, dtype=torch.bool)
    counted[0, 60:], counted[1, 50:52] = True, True
    meter = Meter(llama(), ids, Settings(grid=(4, 32), rounds=0), tmp_path / "m", "recall", counted)
    nll = token_nll(meter.model, ids, msrnn.Plan((tova(4), full(), full())))
    want = (nll[0, 60:].mean() + nll[1, 50:52].mean()) / 2
    assert meter.loss((4, None, None)) == pytest.approx(float(want), abs=1e-6)
    assert calibrate(meter, [8], {}, "0")["for"] == "recall"
    with pytest.raises(ValueError, match="another for, counted"):
        Meter(llama(), ids, Settings(grid=(4, 32), rounds=0), tmp_path / "m", "both", counted[:, [*range(1, 63), 0]])

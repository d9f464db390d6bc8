"""The open questions: every file of experiments/questions runs on a tiny model, and what they share is right."""

from __future__ import annotations

import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from msrnn.core.trace import ALIVE
from msrnn.eval.experiment import make_experiment
from msrnn.eval.perplexity import perplexity
from msrnn.eval.record import read_records
from msrnn.eval.run import run
from msrnn.eval.tasks import settings

FOLDER = Path(__file__).parents[2] / "experiments" / "questions"
SHARED = {"common", "evictions"}  # imported by the scripts
SCRIPTS = sorted(file for file in FOLDER.glob("*.py") if file.stem not in SHARED)
TABLES = sorted(FOLDER.glob("*.toml"))
TEXT = 'The keeper of the lamp went up. "Come in," said Ann to Bob\'s dog.\nThe ships lay, all of them, for $5 a day. '

# as small as they go
SHORT = {
    "arithmetic": ["--tokens", "40", "--capacity", "24", "--sums", "2"],
    "domains": ["--tokens", "40", "--capacity", "16"],
    "encoder_decoder": ["--tokens", "24", "--capacity", "8", "--new-tokens", "6"],
    "frozen_positions": ["--tokens", "40", "--capacity", "16", "--rows", "2", "--pieces", "8"],
    "other_rules": ["--tokens", "40", "--capacity", "16"],
    "passes": ["--tokens", "30", "--capacity", "16", "--passes", "2"],
    "scoring_layer": ["--tokens", "40", "--capacity", "16", "--layers", "2"],
    "word_classes": ["--tokens", "60", "--capacities", "16,24"],
}
SMALL = {
    "pg19": {"chunk": 40, "chunks_per_book": 1, "capacities": [16]},
    "extrapolation": {"length": 60, "bin": 20},
    "needle": {"lengths": [160], "depths": [0.5], "repeats": 1, "new_tokens": 2, "kinds": ["passkey"]},
}


@pytest.fixture(autouse=True)
def _shared_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python experiments/questions/x.py` has it."""
    monkeypatch.syspath_prepend(FOLDER)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    from msrnn.hf import load as models

    return AutoTokenizer.from_pretrained(models.bundled())


@pytest.fixture
def tiny(llama: Any, tokenizer: Any, tmp_path: Path) -> str:
    model = llama(vocab_size=len(tokenizer), max_position_embeddings=512, num_hidden_layers=2)
    model.save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "pg19").mkdir()
    file = tmp_path / "pg19" / "text.txt"
    file.write_text(TEXT * 12)
    return str(file)


def test_every_question_of_the_paper_has_its_file() -> None:
    index = (FOLDER / "README.md").read_text()
    assert all(f"]({file.name})" in index for file in [*SCRIPTS, *TABLES])
    assert {script.stem for script in SCRIPTS} == set(SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_starts_and_finishes(
    script: Path, tiny: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], one_thread: None
) -> None:
    about = (script.read_text().split('"""')[1]).split()
    assert {"Question:", "Method:", "python"} <= set(about)
    model = [] if script.stem == "encoder_decoder" else ["--model", tiny]
    out = tmp_path / "out.jsonl"
    main = runpy.run_path(str(script))["main"]
    main([*model, "--text", text, "-o", str(out), *SHORT[script.stem]])
    assert capsys.readouterr().out.strip()
    records = read_records(out)
    assert len(records) >= 2
    assert all(record.value == record.value for record in records)


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.stem)
def test_an_experiment_starts_and_finishes(
    table: Path, llama: Any, tokenizer: Any, text: str, tmp_path: Path, one_thread: None
) -> None:
    settings_table = tomllib.loads(table.read_text())
    make_experiment(settings_table, settings(), str(table))  # as it stands
    small = {
        name: value
        for name, value in SMALL[settings_table["task"]].items()
        if name in settings_table or name != "capacities"
    }
    policies = [policy.replace(":256", ":16").replace(":512", ":16") for policy in settings_table["policies"]]
    policies = [policy for policy in policies if ",last=" not in policy or policy.endswith(("=1", "=16"))]
    policies = [policy.replace("last=16", "last=8") for policy in dict.fromkeys(policies)]
    experiment = make_experiment(
        settings_table | small | {"policies": policies, "data": str(tmp_path)}, settings(), str(table)
    )
    model = llama(vocab_size=len(tokenizer), max_position_embeddings=512, num_hidden_layers=2)
    records = run(experiment, model, tokenizer, tmp_path / "out.jsonl", quiet=True)
    assert {record.policy for record in records} == {entry.label for entry in experiment.entries()}


@pytest.mark.parametrize("policy", ["window:12", "full"])
def test_a_scheduled_window_is_the_window(llama: Any, policy: str) -> None:
    from evictions import expiry_by_priority, scheduled_nll

    ids = torch.randint(2, 64, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    everything = torch.full((50,), ALIVE, dtype=torch.int32)
    expiry = everything if policy == "full" else expiry_by_priority(range(50), 12)
    model = llama("eager")
    losses = scheduled_nll(model, ids, expiry, piece=16)
    assert float(losses.sum()) == pytest.approx(perplexity(model, ids, policy).nll, rel=1e-5)


def test_the_lowest_priority_is_evicted() -> None:
    from evictions import expiry_by_priority, scheduled_nll

    assert expiry_by_priority([5, 1, 3, 2, 4, 9], 2).tolist() == [ALIVE, 2, 4, 3, 5, ALIVE]
    assert expiry_by_priority([1, 1, 1, 1], 2).tolist() == [2, 3, ALIVE, ALIVE]  # the older of equals
    assert expiry_by_priority([9, 8, 1, 1, 1, 1], 3, last=2).tolist() == [ALIVE, 3, 4, 5, ALIVE, ALIVE]
    with pytest.raises(ValueError, match="last is 3"):
        expiry_by_priority([1, 2], 3, last=3)
    with pytest.raises(ValueError, match="3 tokens need as many expiries"):
        scheduled_nll(None, [1, 2, 3], torch.zeros(2))  # type: ignore[arg-type]

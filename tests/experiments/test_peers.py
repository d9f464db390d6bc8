"""benchmarks/peers.py on a tiny model: the same command finds its results, and another one measures its own."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msrnn.eval.record import read_records

ROOT = Path(__file__).parents[2]
JOBS = [{"id": "8", "rows": [[1, 2, 3]], "memory": True}]
SETTINGS: dict[str, Any] = {
    "model": "tiny",
    "gguf": None,
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "capacity": 8,
}


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import peers

    return peers


@pytest.mark.parametrize(
    "other",
    [
        {"model": "large"},
        {"gguf": "tiny.gguf"},
        {"device": "cuda"},
        {"dtype": "bfloat16"},
        {"threads": 2},
        {"capacity": 16},
    ],
)
def test_other_settings_have_results_of_their_own(peers: Any, tmp_path: Path, other: dict[str, Any]) -> None:
    plain, changed = Namespace(work=tmp_path, **SETTINGS), Namespace(work=tmp_path, **(SETTINGS | other))
    files = peers.write_jobs("memory", plain, JOBS)
    assert peers.write_jobs("memory", plain, JOBS) == files
    assert not {*files} & {*peers.write_jobs("memory", changed, JOBS)}
    assert not {*files} & {*peers.write_jobs("memory", plain, [JOBS[0] | {"rows": [[4, 5, 6]]}])}


@pytest.mark.slow
def test_another_dtype_is_measured(
    peers: Any, model: str, books: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    work, out = tmp_path / "work", tmp_path / "peers.jsonl"
    options = ["--data", str(books(50)), "--model", model, "--parts", "memory", "--lengths", "40", "--threads", "1"]
    options += ["--runs", "transformers full", "--work", str(work), "--out", str(out)]

    def results(*more: str) -> dict[str, str]:
        monkeypatch.setattr(sys, "argv", ["peers.py", *options, *more])
        peers.main()
        return {file.name: file.read_text() for file in work.glob("*.results.jsonl")}

    first = results()
    both = results("--dtype", "bfloat16")
    assert len(both) == 2
    assert first.items() <= both.items()
    values = {one.dtype: one.value for one in read_records(out) if one.metric == "prefill seconds"}
    assert values.keys() == {"float32", "bfloat16"}
    assert values["float32"] != values["bfloat16"]

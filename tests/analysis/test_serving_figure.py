"""Rows of benchmarks/vllm_cpu.py as records, and the figure of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msrnn.analysis.benchmarks import SERVED, from_benchmark
from msrnn.analysis.figures import RECORD_FIGURES, draw
from msrnn.analysis.records import newest


def row(policy: str, megabytes: int, rate: float, date: str = "2026-01-01") -> dict[str, Any]:
    """As the benchmark writes them."""
    return {
        "what": "serving", "policy": policy, "model": "tiny", "dtype": "float32", "date": date, "machine": "here",
        "memory": megabytes * 10**6, "requests": 2, "prompt": 8, "new": 4, "at_once": 2, "seconds": 8 / rate,
        "new_tokens_per_s": rate, "first_token_s": {"first": 0.5, "median": 1.0, "last": 2.0},
        "over_time": [[0.5, 1, 0], [1.0, 2, 4], [8 / rate, 0, 8]],
    }  # fmt: skip


def test_a_row_is_a_record_of_what_was_served() -> None:
    (record,) = from_benchmark(row("tova:256", 160, 4.0))
    assert (record.metric, record.value, record.capacity) == (SERVED, 4.0, 256)
    assert record.cell == {"memory": 160_000_000}
    assert record.parts["running"] == {"0.5": 1, "1.0": 2, "2.0": 0}
    assert record.parts["written"]["2.0"] == 8


def test_the_newest_of_two_runs_counts() -> None:
    rows = [row("stock", 160, 2.0), row("stock", 160, 3.0, "2026-01-02"), row("stock", 300, 2.5)]
    records = newest([record for one in rows for record in from_benchmark(one)])
    assert sorted(record.value for record in records) == [2.5, 3.0]


def test_it_is_drawn_and_speed_is_not(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [row("stock", 160, 2.0), row("tova:256", 160, 4.0), row("stock", 300, 3.0)]
    records = [record for one in rows for record in from_benchmark(one)]
    drawn = list(draw(records, tmp_path))
    assert [name for name, _, _ in drawn] == ["serving"]
    assert drawn[0][2].stat().st_size > 5000
    assert not any(RECORD_FIGURES["throughput"].uses(record) for record in records)

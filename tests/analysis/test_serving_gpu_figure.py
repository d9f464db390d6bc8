"""Rows of benchmarks/vllm_gpu.py as records, and the figure of their ratios."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from msrnn.analysis.benchmarks import VLLM_FIRST, VLLM_RATE, VLLM_START, VLLM_STEP, from_benchmark
from msrnn.analysis.figures import RECORD_FIGURES, draw
from msrnn.analysis.records import newest
from msrnn.analysis.serving_gpu import Pair, pairs
from msrnn.analysis.style import conditions


def row(policy: str, seconds: float, new: int = 1, **fields: Any) -> dict[str, Any]:
    """As the benchmark writes them: a load of two requests of 8 tokens."""
    return {
        "kind": "vllm load", "policy": policy, "shape": "tiny", "small": False, "date": "2026-01-01", "machine": "here",
        "commit": "one", "command": "first", "requests": 2, "prompt": 8, "new": new, "attention": "steady", "round": 0,
        "max_num_seqs": 4, "threshold": 0, "seconds": seconds, "new_tokens_per_s": 2 * new / seconds, "start_s": 9.0,
        "step_ms": None if new == 1 else 1e3 * seconds / new,
    } | fields  # fmt: skip


def records(*rows: dict[str, Any]):
    return [record for one in rows for record in from_benchmark(one)]


def test_a_load_is_what_it_measures() -> None:
    assert {one.metric: one.value for one in records(row("full", 2.0))} == {VLLM_FIRST: 2.0}
    assert {one.metric: one.value for one in records(row("full", 2.0, new=4))} == {VLLM_RATE: 4.0, VLLM_STEP: 500.0}
    assert {one.metric: one.value for one in records(row("full", 2.0, kind="vllm start"))} == {VLLM_START: 9.0}
    assert not records(row("full", 2.0, small=True)), "a trial on a CPU says nothing"
    assert not records(row("full", 2.0, kv_cache_dtype="fp8")), "another stock engine"


def test_pairs_are_medians_of_the_newest_run_of_each_engine() -> None:
    later = {"date": "2026-01-02", "command": "second"}
    rows = [
        row("full", 2.0),
        row("tova:4", 50.0),
        *(row("tova:4", s, round=i, **later) for i, s in enumerate((1, 9, 3))),
    ]
    found = pairs(records(*rows, row("tova:4", 1.0, new=4)), (VLLM_FIRST, VLLM_RATE))
    assert found == {"first tokens, 2 x 8": Pair("one", 2.0, 3.0)}
    assert found["first tokens, 2 x 8"].ratio == 1.5


def test_kinds_of_attention_are_loads_of_their_own() -> None:
    kinds = {"steady": 2.0, "trained": 4.0, "flat": 8.0}
    runs = product(("full", "tova:4"), kinds.items(), (1, 4))
    rows = [row(policy, seconds, new, attention=kind) for policy, (kind, seconds), new in runs]
    found = pairs(records(*rows), (VLLM_FIRST, VLLM_RATE, VLLM_STEP))
    assert {name: pair.ours for name, pair in found.items() if name.startswith("first")} == {
        "first tokens, 2 x 8": 2.0, "first tokens, 2 x 8, trained attention": 4.0,
        "first tokens, 2 x 8, flat attention": 8.0,
    }  # fmt: skip
    assert len(found) == 9


def test_both_engines_of_a_pair_ran_at_one_commit() -> None:
    """The newest at which both did, whatever one of them did later."""
    rows = [
        *(row(policy, s, commit="old") for policy, s in (("full", 2.0), ("tova:4", 5.0))),
        *(row(policy, s, commit="new", date="2026-01-02") for policy, s in (("full", 4.0), ("tova:4", 6.0))),
        row("tova:4", 1.0, commit="newest", date="2026-01-03"),
    ]
    assert pairs(records(*rows), (VLLM_FIRST,)) == {"first tokens, 2 x 8": Pair("new", 4.0, 6.0)}
    assert pairs(newest(records(*rows)), (VLLM_FIRST,))["first tokens, 2 x 8"].commit == "new", "read from files"
    assert not pairs(records(rows[0], rows[3]), (VLLM_FIRST,))


def test_a_machine_is_named_once() -> None:
    """Older records of a GPU do not name the CPU that is with it."""
    named = records(row("full", 2.0, machine="A GPU"), row("full", 2.0, machine="A GPU, a CPU"))
    assert conditions(named).endswith("· A GPU, a CPU")


def test_it_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [row(policy, 2.0, new) for policy in ("full", "tova:4") for new in (1, 4)]
    drawn = list(draw(records(*rows), tmp_path))
    assert [name for name, _, _ in drawn] == ["vllm"]
    assert drawn[0][2].stat().st_size > 5000
    assert not any(RECORD_FIGURES["throughput"].uses(record) for record in records(*rows))

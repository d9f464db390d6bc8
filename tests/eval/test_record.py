"""Records and sample logs: added, never edited, whole after a crash; intervals."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from msrnn.eval import metrics
from msrnn.eval.record import Record, append_lines, read_lines, read_records, write_records
from msrnn.eval.sample_log import Done, Log, alone, run_key
from msrnn.eval.task import Row

RECORD = Record(
    "pg19", "tiny", "tova:8", 8, "perplexity", 12.5, 12.0, 13.0, 4, 2, 0, "float32", "a machine", {"torch": "2"},
    "abc", "2026-01-01", 1.5, 1000, "run1", parts={"book": {"nll": 1.0, "tokens": 2.0}},
)  # fmt: skip


def test_records_are_added_once(tmp_path):
    path = tmp_path / "deep" / "r.jsonl"
    assert write_records(path, [RECORD]) == [RECORD]
    other = replace(RECORD, policy="tova:16")
    assert write_records(path, [RECORD, other]) == [other]
    assert read_records(path) == [RECORD, other]


def test_a_line_cut_short_is_dropped_and_what_stood_before_kept(tmp_path):
    path = tmp_path / "r.jsonl"
    write_records(path, [RECORD])
    with path.open("ab") as file:
        file.write(b'{"task": "pg')
    assert read_records(path) == [RECORD]
    append_lines(path, [{"a": 1}])
    assert path.read_text().splitlines() == [json.dumps(asdict(RECORD)), '{"a": 1}']


def test_a_long_cut_line_is_dropped_whole(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'{"a": 0}\n' + b"x" * 200_000)
    append_lines(path, [{"a": 1}])
    assert [line["a"] for _, line in read_lines(path)] == [0, 1]


@pytest.mark.parametrize(
    "line, said", [("{", "not JSON"), ("3", "a JSON object"), ('{"task": "x"}', "not a whole record")]
)
def test_a_bad_line_is_named(tmp_path, line, said):
    path = tmp_path / "r.jsonl"
    path.write_text(f"{json.dumps(asdict(RECORD))}\n{line}\n")
    with pytest.raises(ValueError, match=f"r.jsonl:2: {said}"):
        read_records(path)


def test_an_unknown_field_is_named(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(asdict(RECORD) | {"colour": "red"}) + "\n")
    with pytest.raises(ValueError, match=r"r.jsonl:1: .*'colour'"):
        read_records(path)


def test_a_log_gives_back_what_a_run_did_and_nothing_of_another(tmp_path):
    path = tmp_path / "s.jsonl"
    done = Done("tova:8", "b:0", "b", "d1", [Row({"nll": 2.0}, {"position": 5})], 0.5, 10)
    log = Log.open(path, "run1")
    log.begin({"machine": "m"})
    log.add([done])
    again = Log.open(path, "run1")
    assert again.done == {("tova:8", "b:0"): done}
    assert again.sessions == {1: {"machine": "m"}}
    assert again.has("tova:8", "b:0", "d1")
    assert not again.has("tova:8", "b:0", "another prompt")
    assert not Log.open(path, "run2").done


def test_a_strange_log_is_named(tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_text('{"run": "run1"}\n')
    with pytest.raises(ValueError, match=r"s.jsonl:1: not a line of a sample log"):
        Log.open(path, "run1")


def test_two_processes_do_not_write_to_one_log(tmp_path):
    with alone(tmp_path / "s.jsonl"), pytest.raises(ValueError, match="another process"), alone(tmp_path / "s.jsonl"):
        pass


def test_the_key_is_that_of_the_settings_whatever_their_order():
    assert run_key({"a": 1, "b": 2}) == run_key({"b": 2, "a": 1}) != run_key({"a": 1, "b": 3})


def test_perplexity_is_of_all_tokens_together():
    parts = {"a": {"nll": 10.0, "tokens": 5.0}, "b": {"nll": 2.0, "tokens": 1.0}}
    value, low, high = metrics.interval(parts, metrics.perplexity(), 0)
    assert value == pytest.approx(np.exp(2.0))
    assert low == high == pytest.approx(np.exp(2.0))


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    source, hits = np.random.default_rng(1), 0
    for seed in range(200):
        parts = {str(i): {"x": float(v), "count": 1.0} for i, v in enumerate(source.normal(3, 1, 30))}
        _, low, high = metrics.interval(parts, metrics.mean("x"), seed, draws=400)
        hits += low <= 3 <= high
    assert 0.88 <= hits / 200 <= 0.99


def test_the_interval_is_the_seeds_and_not_the_orders():
    parts = {str(i): {"x": i**0.5, "count": 1.0} for i in range(12)}
    turned = dict(reversed(parts.items()))
    same = [metrics.interval(p, metrics.mean("x"), 3) for p in (parts, turned)]
    assert same[0] == same[1] != metrics.interval(parts, metrics.mean("x"), 4)


def test_one_group_has_no_interval():
    assert metrics.interval({"a": {"x": 3.0, "count": 2.0}}, metrics.mean("x"), 0) == (1.5, None, None)


def test_rouge_takes_the_best_reference_and_the_geometric_mean_of_means():
    pytest.importorskip("rouge_score", reason="the extra 'eval' is not installed")
    found = metrics.rouge("the cat sat on the mat", ["a dog", "the cat sat on the mat"])
    assert found == {"rouge1": 100.0, "rouge2": 100.0, "rougeL": 100.0}
    half = metrics.rouge("the cat", ["the dog"])
    assert half["rouge1"] == pytest.approx(50)
    assert half["rouge2"] == 0
    sums = {"rouge1": 80.0, "rouge2": 20.0, "rougeL": 40.0, "count": 2.0}
    assert metrics.interval({"a": sums}, metrics.geometric_rouge(), 0)[0] == pytest.approx((40 * 10 * 20) ** (1 / 3))


@pytest.mark.parametrize(
    "answer, right, f1",
    [
        ("The Cat.", ["cat"], 100),
        ("unanswerable", ["Unanswerable"], 100),
        ("yes", ["no"], 0),
        ("", ["."], 0),
        ("blue cat", ["red cat", "a blue cat indeed"], 80),
    ],
)
def test_f1_is_qaspers(answer, right, f1):
    assert metrics.f1(answer, right) == pytest.approx(f1)

"""Records and sample logs: appended, never edited, complete after a crash."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace

import pytest

from msrnn.eval.record import Record, append_lines, check_record_file, read_lines, read_records, write_records
from msrnn.eval.sample_log import SampleLog, SampleResult, exclusive, run_key
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
    path.write_bytes(b'{"a": 0}\n{"a": "' + b"x" * 200_000)
    append_lines(path, [{"a": 1}])
    assert [line["a"] for _, line in read_lines(path)] == [0, 1]


def test_a_line_cut_anywhere_costs_that_line_alone(tmp_path):
    path, lines = tmp_path / "r.jsonl", [{"a": "é"}, {"b": [{"c": 2}]}, {"d": 3}]
    append_lines(path, lines[:2])
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in range(first, len(whole)):
        path.write_bytes(whole[:end])
        kept = lines[: 2 if end == len(whole) - 1 else 1]  # nothing but the newline is missing: the line is whole
        assert [line for _, line in read_lines(path)] == kept
        append_lines(path, lines[2:])
        assert [line for _, line in read_lines(path)] == [*kept, lines[2]]


@pytest.mark.parametrize(
    "content", [b"one precious line", b"A book.\nIts end", b"[1, 2]", b"3", b"\xff", b"{ precious"]
)
def test_a_file_of_something_else_is_left_alone(tmp_path, content):
    path = tmp_path / "r.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"r.jsonl is no file of records; give another name"):
        append_lines(path, [{"a": 1}])
    for refuse in (check_record_file, lambda path: write_records(path, [RECORD])):
        with pytest.raises(ValueError, match=r"r.jsonl:1: (not JSON|a JSON object)"):
            refuse(path)
    assert path.read_bytes() == content


def test_a_json_file_without_a_newline_keeps_its_line(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"mine": 1}')
    with pytest.raises(ValueError, match=r"no file of records \(.*has the field 'mine'\); give another name"):
        check_record_file(path)
    with pytest.raises(ValueError, match="has the field 'mine'"):
        write_records(path, [RECORD])
    assert path.read_text() == '{"mine": 1}'


def test_a_pipe_is_not_replaced(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    for write in (lambda: append_lines(path, [{"a": 1}]), lambda: check_record_file(path)):
        with pytest.raises(ValueError, match="pipe is a device or a pipe; give the name of a file"):
            write()
    assert path.is_fifo()


@pytest.mark.parametrize(
    "line, said",
    [
        ("{", "not JSON"),
        ("3", "a JSON object"),
        ("\udcff", "not JSON: this is no UTF-8 text"),
        ('{"task": "x"}', "not a whole record"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, said):
    path = tmp_path / "r.jsonl"
    path.write_text(f"{json.dumps(asdict(RECORD))}\n{line}\n", errors="surrogateescape")
    with pytest.raises(ValueError, match=f"r.jsonl:2: {said}"):
        read_records(path)


def test_an_unknown_field_is_named(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(asdict(RECORD) | {"colour": "red"}) + "\n")
    with pytest.raises(ValueError, match=r"r.jsonl:1: .*'colour'"):
        read_records(path)


def test_a_log_gives_back_what_a_run_did_and_nothing_of_another(tmp_path):
    path = tmp_path / "s.jsonl"
    done = SampleResult("tova:8", "b:0", "b", "d1", [Row({"nll": 2.0}, {"position": 5})], 0.5, 10)
    log = SampleLog.open(path, "run1")
    log.start_session({"machine": "m"})
    log.add([done])
    again = SampleLog.open(path, "run1")
    assert again.results == {("tova:8", "b:0"): done}
    assert again.sessions == {1: {"machine": "m"}}
    assert again.has("tova:8", "b:0", "d1")
    assert not again.has("tova:8", "b:0", "another prompt")
    assert not SampleLog.open(path, "run2").results


def test_a_strange_log_is_named(tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_text('{"run": "run1"}\n')
    with pytest.raises(ValueError, match=r"s.jsonl:1: not a line of a sample log"):
        SampleLog.open(path, "run1")


def test_two_processes_do_not_write_to_one_log(tmp_path):
    path = tmp_path / "s.jsonl"
    with exclusive(path), pytest.raises(ValueError, match="another process"), exclusive(path):
        pass


def test_the_key_is_that_of_the_settings_whatever_their_order():
    assert run_key({"a": 1, "b": 2}) == run_key({"b": 2, "a": 1}) != run_key({"a": 1, "b": 3})

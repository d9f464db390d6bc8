"""What a command writes never replaces what it reads, or the other file that it writes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from msrnn.cli import main
from msrnn.cli.retention import read_texts
from msrnn.eval.record import write_records
from tests.support.records import everything

COMMANDS = {
    "trace": ["trace", "-f", "IN", "-o", "IN", "--policy", "tova:64"],
    "trace --html": ["trace", "-f", "IN", "--html", "IN", "--policy", "tova:64"],
    "trace to one file twice": ["trace", "-f", "IN", "-o", "OUT", "--html", "OUT"],
    "report": ["report", "IN", "-o", "IN"],
    "state build": ["state", "build", "--text", "IN", "-o", "IN", "--policy", "tova:64"],
    "retention": ["retention", "IN", "-o", "IN"],
    "by another name": ["trace", "-f", "IN", "-o", "FOLDER/../in.txt"],
}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    path = tmp_path / "results" / "all.jsonl"
    write_records(path, everything())
    return path


@pytest.mark.parametrize("case", COMMANDS)
def test_an_input_is_not_replaced(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, folder = tmp_path / "in.txt", tmp_path / "folder"
    text.write_text("A text that somebody needs.\n")
    folder.mkdir()
    line = refusal(capsys, COMMANDS[case], IN=text, OUT=tmp_path / "out", FOLDER=folder)
    assert re.search(
        r"would replace the file that (--file|--text|--output|TEXT|RESULTS) names; give another name", line
    )
    assert text.read_text() == "A text that somebody needs.\n"
    assert not (tmp_path / "out").exists()


def refusal(capsys: pytest.CaptureFixture[str], command: list[str], **places: Path) -> str:
    """Run a command, in which places stand for files, and return the one line of its refusal."""
    for name, place in places.items():
        command = [word.replace(name, str(place)) for word in command]
    assert main(command) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


TRACE = ["trace", "-f", "IN"]
BUILD = ["state", "build", "--text", "IN"]
NAMED = {  # a file that an option names; the argument that the refusal tells
    "profile of trace": ([*TRACE, "--policy", "tova:4", "--profile", "GIVEN", "-o", "GIVEN"], "--profile"),
    "profile of state": ([*BUILD, "--policy", "tova:4", "--profile", "GIVEN", "-o", "GIVEN"], "--profile"),
    "profile in a policy": ([*TRACE, "--policy", "tova:4,profile=GIVEN", "-o", "GIVEN"], "--policy"),
    "profile of several": (
        ["retention", "IN", "--policy", "tova:8", "--policy", "tova:4,profile=GIVEN", "-o", "GIVEN"],
        "--policy",
    ),
    "model": ([*BUILD, "GIVEN", "-o", "GIVEN"], "MODEL"),
    "model of trace": ([*TRACE, "--model", "GIVEN", "-o", "GIVEN"], "MODEL"),
    "by a hard link": ([*TRACE, "--model", "GIVEN", "-o", "HARD"], "MODEL"),
    "by a symbolic link": ([*TRACE, "--model", "GIVEN", "-o", "SOFT"], "MODEL"),
}


@pytest.mark.parametrize("case", NAMED)
def test_a_file_that_an_option_names_is_not_replaced(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.txt").write_text("A text.\n")
    given, command = tmp_path / "given", NAMED[case][0]
    given.write_text('{"capacities": [4, 4]}')
    (tmp_path / "link").hardlink_to(given)
    (tmp_path / "soft").symlink_to(given)
    places = {"GIVEN": given, "HARD": tmp_path / "link", "SOFT": tmp_path / "soft"}
    line = refusal(capsys, command, IN=tmp_path / "in.txt", **places)
    assert f"would replace the file that {NAMED[case][1]} names; give another name" in line
    assert given.read_text() == '{"capacities": [4, 4]}'


@pytest.mark.parametrize("policy", ["RULE:8", "RULE-head+2:8,momentum=0.5"])
def test_a_rule_is_not_replaced(policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rule = tmp_path / "rule.py"
    rule.write_text("def score(view):\n    return view.positions\n")
    line = refusal(capsys, ["trace", "x", "--policy", policy, "-o", "RULE"], RULE=rule)
    assert "would replace the file that --policy names; give another name" in line
    assert rule.read_text().startswith("def score")


IN_A_FOLDER = {
    "records": ["report", "DIR", "-o", "DIR/pg19.jsonl"],
    "a trace": ["report", "DIR", "-o", "DIR/t.safetensors"],
    "records that are new": ["report", "DIR", "-o", "DIR/new.jsonl"],
    "by another name": ["report", "DIR", "-o", "DIR/../DIRNAME/pg19.jsonl"],
    "a text": ["retention", "DIR", "-o", "DIR/in.txt"],
    "weights": ["trace", "x", "--model", "DIR", "-o", "DIR/t.safetensors"],
    "a configuration": ["state", "build", "DIR", "--text", "x", "-o", "DIR/config.json"],
}


@pytest.mark.parametrize("case", IN_A_FOLDER)
def test_a_file_of_a_folder_that_is_read_is_not_replaced(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("pg19.jsonl", "t.safetensors", "in.txt", "config.json"):
        (tmp_path / name).write_text("needed")
    line = refusal(capsys, IN_A_FOLDER[case], DIRNAME=Path(tmp_path.name), DIR=tmp_path)
    assert re.search(r"one of the files that (MODEL|RESULTS|TEXT) reads, \*\.\w+ in .*; give another name", line)
    assert {path.read_text() for path in tmp_path.iterdir()} == {"needed"}
    assert len(list(tmp_path.iterdir())) == 4


def test_a_page_may_lie_beside_the_records(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["report", str(results.parent), "-o", str(results.parent / "report.html")]) == 0


def test_what_is_printed_replaces_nothing(
    results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(results.parent)
    (results.parent / "report.html").mkdir()  # where a page would go
    assert main(["report", str(results), "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("**PG-19")


@pytest.mark.parametrize(
    "command",
    [
        ["trace", "x"],
        ["trace", "x", "--html", "page.html"],
        [*BUILD],
        ["calibrate", "--average", "8"],
        ["retention", "IN"],
        ["report", "IN"],
        ["bench"],
    ],
)
def test_a_pipe_is_no_output_and_neither_is_a_dash(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.txt").write_text("A text.\n")
    os.mkfifo(tmp_path / "pipe")
    line = refusal(capsys, [*command, "-o", "PIPE"], IN=tmp_path / "in.txt", PIPE=tmp_path / "pipe")
    assert "pipe is a device or a pipe; give the name of a file" in line
    line = refusal(capsys, [*command, "-o", "-"], IN=tmp_path / "in.txt")
    assert "--output - would be standard output, but a file is written; give its name" in line
    assert (tmp_path / "pipe").is_fifo()


def test_a_link_to_nowhere_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone" / "file")
    line = refusal(capsys, ["trace", "x", "-o", "LINK"], LINK=tmp_path / "link")
    assert f"{tmp_path}/link: there is no folder {tmp_path}/gone; make it first" in line


ADDED = {  # commands that add records to a file
    "retention": (["retention", "IN", "-o", "FILE"], "--output"),
    "bench": (["bench", "-o", "FILE"], "--output"),
    "eval": (["eval", "EXPERIMENT", "--out", "FILE"], "--out"),
}


@pytest.mark.parametrize("content", ["one precious line", "A book.\n", "{'mine': 1}", None])
@pytest.mark.parametrize("case", ADDED)
def test_records_are_added_to_records_only(
    case: str, content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a file of something else is refused before anything is measured: there is no model here."""
    text, experiment, file = tmp_path / "in.txt", tmp_path / "e.toml", tmp_path / "mine.jsonl"
    text.write_text("A text.\n")
    experiment.write_text('task = "pg19"\npolicies = ["full"]\nmodel = "./nothing"\n')
    if content is None:
        file.mkdir()
    else:
        file.write_text(content)
    command, option = ADDED[case]
    line = refusal(capsys, command, IN=text, EXPERIMENT=experiment, FILE=file)
    reason = "is a folder; give the name of a file" if content is None else "is no file of records ("
    assert f"{option} {file} {reason}" in line
    assert file.is_dir() if content is None else file.read_text() == content


def test_a_log_of_something_else_is_refused_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment, log = tmp_path / "e.toml", tmp_path / "r.samples.jsonl"
    experiment.write_text('task = "pg19"\npolicies = ["full"]\nmodel = "./nothing"\n')
    log.write_text('{"mine": 1}\n')
    line = refusal(capsys, ["eval", str(experiment), "--out", str(tmp_path / "r.jsonl")])
    assert "r.samples.jsonl:1: not a line of a sample log" in line


def test_texts_of_one_name_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("d1", "d2"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text(f"A text in {folder}.\n")
    line = refusal(capsys, ["retention", "D/d1/x.txt", "D/d2/x.txt", "-o", "D/r.jsonl"], D=tmp_path)
    assert f"{tmp_path}/d1/x.txt and {tmp_path}/d2/x.txt are both called x in records; rename one of them" in line
    assert len(read_texts([str(tmp_path / "d1"), str(tmp_path / "d1" / "x.txt")])) == 1

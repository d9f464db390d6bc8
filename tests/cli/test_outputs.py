"""What a command writes never replaces what it reads, or the other file that it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from msrnn.cli import main

COMMANDS = {
    "trace": ["trace", "-f", "IN", "-o", "IN", "--policy", "tova:64"],
    "trace --html": ["trace", "-f", "IN", "--html", "IN", "--policy", "tova:64"],
    "trace to one file twice": ["trace", "-f", "IN", "-o", "OUT", "--html", "OUT"],
    "report": ["report", "IN", "-o", "IN"],
    "state build": ["state", "build", "--text", "IN", "-o", "IN", "--policy", "tova:64"],
    "calibrate": ["calibrate", "--text", "IN", "-o", "IN", "--average", "16"],
    "retention": ["retention", "IN", "-o", "IN"],
    "by another name": ["trace", "-f", "IN", "-o", "FOLDER/../in.txt"],
}


@pytest.mark.parametrize("case", COMMANDS)
def test_an_input_is_not_replaced(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, folder = tmp_path / "in.txt", tmp_path / "folder"
    text.write_text("A text that somebody needs.\n")
    folder.mkdir()
    places = {"IN": str(text), "OUT": str(tmp_path / "out"), "FOLDER": str(folder)}
    command = [COMMANDS[case][0]]
    for word in COMMANDS[case][1:]:
        for name, place in places.items():
            word = word.replace(name, place)
        command.append(word)
    assert main(command) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "would replace a file that this command reads or writes; give another name" in line
    assert text.read_text() == "A text that somebody needs.\n"
    assert not (tmp_path / "out").exists()

"""The README says what is true: its Python runs, its commands and links exist."""

import re
import shlex
from pathlib import Path

import pytest

from msrnn.cli import parser

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)
PYTHON = [text for kind, text in BLOCKS if kind == "python"]
COMMANDS = [line for kind, text in BLOCKS if not kind for line in text.splitlines() if line.startswith("msrnn ")]


def test_there_is_something_to_check() -> None:
    assert len(PYTHON) >= 2
    assert len(COMMANDS) >= 5


def test_python_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in PYTHON:
        exec(compile(block, "README.md", "exec"), names)
    assert "Once upon a time" in capsys.readouterr().out
    assert (tmp_path / "state.safetensors").exists()


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_are_understood(line: str) -> None:
    _, *words = shlex.split(line, comments=True)
    parser().parse_args(words)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).exists()

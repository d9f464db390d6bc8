"""The command line, as tests call it: in a process of its own, or in this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import msrnn
from msrnn.cli import main

STORY = "The lighthouse keeper counted the ships each evening and wrote their names into a green book.\n"
HERE = os.environ | {"PYTHONPATH": str(Path(msrnn.__file__).parent.parent)}


def msrnn_command(*arguments: str, text: str | bytes = b"", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own; standard input is a pipe."""
    raw = text.encode() if isinstance(text, str) else text
    settings = HERE | {"HF_HUB_OFFLINE": "1"} | environment
    command = [sys.executable, "-m", "msrnn", *arguments]
    process = subprocess.run(command, input=raw, capture_output=True, env=settings, timeout=300)
    return subprocess.CompletedProcess(command, process.returncode, process.stdout.decode(), process.stderr.decode())


def stdout_of(process: subprocess.CompletedProcess[str]) -> str:
    assert process.returncode == 0, process.stderr
    assert "Traceback" not in process.stderr
    return process.stdout


def save(path: Path, model: Any, tokenizer: Any) -> str:
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """main() in this process: the same code, without seconds of imports."""
    code = main(list(arguments))
    output = capsys.readouterr()
    return code, output.out, output.err


def assert_refused(code: int, out: str, err: str, reason: str) -> None:
    assert code == 2
    assert out == ""
    assert err.startswith("msrnn: error: ")
    assert err.count("\n") == 1, err
    assert reason in err

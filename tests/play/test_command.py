"""`msrnn play` itself: a process that serves, refuses and ends."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from msrnn.cli import main
from tests.support import tiny_eval


@pytest.mark.parametrize(
    "options, words",
    [
        (["--policy", "tovva:9"], "did you mean 'tova:9'"),
        (["--policy", "full"], "full forgets nothing; give a bounded policy, e.g. tova:256"),
        (["--policy", "tova:9,profile=nowhere.json"], "unknown profile"),
        (["--profile", "nowhere.json", "--policy", "tova:9,profile=nowhere.json"], "nowhere.json"),
        (["--port", "99999"], "ports end at 65535"),
        (["--port", "x"], "not a whole number"),
        (["--host", "256.1.1.1", "--port", "0"], "cannot listen"),
    ],
)
def test_refusals_are_one_line(capsys, options, words):
    assert main(["play", "--no-browser", *options]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert words in lines[0]


def test_a_port_in_use_is_said(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["play", "--no-browser", "--port", str(port)]) == 2
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


def test_the_command_serves_with_the_model_asked_for_and_ends_with_ctrl_c(tmp_path):
    model = str(tiny_eval.save(tmp_path / "tiny"))
    options = ["--no-browser", "--port", "0", "--model", model, "--policy", "h2o:16"]
    command = [sys.executable, "-m", "msrnn", "play", *options]
    # a shell's background jobs ignore SIGINT, and their children inherit that
    heed = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **heed)
    try:
        url = re.search(r"http://\S+", process.stderr.readline())[0]
        with urllib.request.urlopen(f"{url}api/info", timeout=60) as answer:
            info = json.load(answer)
        assert info["policy"] == "h2o:16"
        assert info["model"] == model
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.stderr.close()


def test_a_rule_of_ones_own_may_be_named_on_the_command_line_only(tmp_path, playground):
    rule = tmp_path / "rule.py"
    rule.write_text("def score(view):\n    return view.positions.float()\n")
    policy = f"{rule}:8"
    client = playground(rules=(str(rule),))
    assert client("/api/runs", {"text": "some words", "policies": [policy]})[0] == 201
    status, answer = playground()("/api/runs", {"text": "some words", "policies": [policy]})
    assert status == 422
    assert "names a file" in answer["error"]

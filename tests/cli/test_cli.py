"""The command line itself: help at once, and every refusal in one line."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

import msrnn
from msrnn.cli import main, parser
from tests.support.commands import HERE, STORY, assert_refused, call, msrnn_command, save, stdout_of

COMMANDS = (
    "generate",
    "chat",
    "play",
    "trace",
    "info",
    "eval",
    "advise",
    "calibrate",
    "plot",
    "report",
    "retention",
    "bench",
    "serve",
    "state",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_instant_and_whole(command):
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    text = stdout_of(msrnn_command(command, "--help"))
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 1.5  # the machine may be busy otherwise
    assert "examples:" in text
    commands = next(action for action in parser()._actions if action.dest == "COMMAND" or action.choices)
    for action in commands.choices[command]._actions:
        assert all(option in text for option in action.option_strings)
        assert action.help


def test_help_of_the_whole():
    text = stdout_of(msrnn_command("--help"))
    assert all(command in text for command in (*COMMANDS, "exit codes: 0"))
    assert stdout_of(msrnn_command("--version")).strip() == f"msrnn {msrnn.__version__}"


def test_help_of_info_names_all_policies_and_profiles():
    text = stdout_of(msrnn_command("info", "--help"))
    assert "\npolicies: best, tova, h2o, fade, blend, window, full (docs/budgets.md)\n" in text
    profiles = "SmolLM2-135M-Instruct, SmolLM2-135M-Instruct-heads, SmolLM2-135M-Instruct-recall"
    assert f"\nprofiles that ship: {profiles}\n" in text


def test_nothing_heavy_is_imported_before_a_command_runs():
    code = "import sys, msrnn.cli; msrnn.cli.parser(); assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=HERE)


BAD = {
    "unknown command": (["sing"], "invalid choice: 'sing'"),
    "no command": ([], "required: COMMAND"),
    "unknown option": (["generate", "x", "--loud"], "unrecognized arguments: --loud"),
    "cut option": (["generate", "x", "--temp", "1"], "unrecognized arguments: --temp"),
    "temperature": (["generate", "x", "--temperature", "-1"], "at least 0"),
    "temperature nan": (["generate", "x", "--temperature", "nan"], "at least 0"),
    "top-p": (["generate", "x", "--temperature", "1", "--top-p", "1.5"], "above 0 and at most 1"),
    "top-k": (["chat", "--temperature", "1", "--top-k", "0"], "at least 1"),
    "top-p alone": (["generate", "x", "--top-p", "0.9"], "add e.g. --temperature 0.7"),
    "no tokens": (["generate", "x", "--max-new-tokens", "0"], "at least 1"),
    "half a token": (["generate", "x", "--max-new-tokens", "0.5"], "not a whole number"),
    "empty prompt": (["generate", ""], "the prompt is empty"),
    "empty input": (["generate"], "standard input is empty"),
    "missing file": (["generate", "-f", "/no/such/file"], "there is no file /no/such/file"),
    "folder": (["trace", "-f", "/tmp", "-o", "x"], "is a folder"),
    "both": (["generate", "x", "-f", "/dev/null"], "both given"),
    "beams and stream": (["generate", "x", "--num-beams", "2", "--stream"], "cannot print beams"),
    "json and stream": (["generate", "x", "--json", "--stream"], "leave out --stream"),
    "empty question": (["generate", "x", "--question", " "], "question is empty"),
    "policy": (["generate", "x", "--policy", "tovar:512"], "did you mean 'tova:512'"),
    "capacity": (["chat", "--policy", "tova:0"], "at least 1"),
    "no capacity": (["trace", "x", "-o", "y", "--policy", "tova"], "no valid capacity"),
    "profile": (["generate", "x", "--profile", "/no/such"], "profile /no/such cannot be read"),
    "prompt mode": (["generate", "x", "--prompt-mode", "fast"], "choose from"),
    "dtype": (["info", "tova:4", "--dtype", "int8"], "choose from"),
    "no output": (["trace", "x"], "required: -o/--output"),
    "output folder": (["trace", "x", "-o", "/tmp"], "is a folder"),
    "output nowhere": (
        ["trace", "x", "-o", "/no/such/folder/trace"],
        "--output /no/such/folder/trace: there is no folder",
    ),
    "page nowhere": (
        ["trace", "x", "--html", "/no/such/folder/page"],
        "--html /no/such/folder/page: there is no folder",
    ),
    "no policy": (["info"], "required: POLICY"),
}
BAD_FOR_A_MODEL = {  # these need torch
    "device": (["generate", "x", "--device", "toaster"], "use cpu, cuda, cuda:0 or mps"),
    "cuda": (["generate", "x", "--device", "cuda:99"], "CUDA devices here"),
    "no such model": (["generate", "x", "--model", "./nothing"], "there is no file or folder './nothing'"),
    "no such hub model": (["info", "nobody/nothing", "tova:4"], "nobody/nothing"),
    "not a model": (["generate", "x", "--model", "/tmp"], "has no config.json"),
    "memory": (["info", "tova:4", "--memory", "plenty"], "argument --memory: 'plenty' is not a size; write e.g. 16GiB"),
    "revision": (
        ["generate", "x", "--revision", "nope"],
        "revision 'nope' is for models on the hub, and the default model is not; leave the revision out",
    ),
    "revision of a folder": (["info", "/tmp", "tova:4", "--revision", "nope"], "and '/tmp' is not; leave the revision"),
    "state of no model": (["state", "build", "nobody/nothing", "--text", "PROFILE", "-o", "x"], "check the name, the"),
    "residual at once": (
        ["generate", "x", "--policy", "blend:16", "--prompt-mode", "oneshot"],
        "blend:16: a residual needs every eviction in its turn; use --prompt-mode recurrent",
    ),
    "binary profile": (["generate", "x", "--profile", "BINARY"], "is not JSON: it is no UTF-8 text; give a file of"),
    "binary records": (["report", "BINARY", "-o", "x"], "BINARY:1: not JSON: this is no UTF-8 text"),
    "few bytes": (["info", "tova:1KiB"], "hold no state"),
    "few bytes for best": (["info", "best:1KiB"], "1,024 bytes hold no state"),
    "best with a setting": (["info", "best:64,last=4"], "best takes kv= and profile= only, not last=4"),
    "best without a size": (["info", "best"], "write slots (best:512)"),
    "profile of another model": (["info", "tova", "--profile", "PROFILE"], "2 layers, the model 30"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_line(case):
    arguments, reason = BAD[case]
    process = msrnn_command(*arguments)
    assert_refused(process.returncode, process.stdout, process.stderr, reason)


@pytest.mark.parametrize("case", BAD_FOR_A_MODEL)
def test_bad_input_for_a_model_gets_one_line(capsys, monkeypatch, tmp_path, case):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "PROFILE").write_text('{"capacities": [3, 4]}')
    (tmp_path / "BINARY").write_bytes(b"\x80\x81\n")
    arguments, reason = BAD_FOR_A_MODEL[case]
    assert_refused(*call(capsys, *arguments), reason)
    assert sorted(os.listdir()) == ["BINARY", "PROFILE"]


EMPTY = (  # what an unset variable of the shell leaves of an option
    ["generate", "x", "--policy", ""],
    ["generate", "x", "--profile", ""],
    ["generate", "-f", ""],
    ["info", ""],
    ["info", "", "tova:4"],
    ["eval", "e.toml", "--policy", ""],
    ["trace", "x", "-o", " "],
    ["advise", "--text", "", "--within", "1"],
    ["plot", "", "-o", "figures"],
    ["bench", "--policy", "tova:8", ""],
)


@pytest.mark.parametrize("arguments", EMPTY)
def test_an_empty_value_is_refused(capsys, arguments):
    code, out, err = call(capsys, *arguments)
    assert_refused(code, out, err, "is empty; give a value, or leave it out")
    assert re.search(r"argument (-\S*(/--\S+)?|[A-Z]+): ", err)


def test_an_empty_value_of_serve_is_refused(capsys):
    """Its options are parsed apart from vLLM's, which may be empty."""
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "model", "--policy", ""])
    assert "argument --policy: '' is empty; give a value" in capsys.readouterr().err


def test_texts_may_be_empty():
    parsed = parser().parse_args(["chat", "--system", ""])
    assert parsed.system == ""
    assert parser().parse_args(["report", "--title", ""]).title == ""


def test_a_file_that_is_not_text_is_refused_before_anything_is_written(capsys, tiny, tmp_path):
    (tmp_path / "bad.txt").write_bytes(STORY.encode() * 700 + b"\xff")
    options = ("-f", str(tmp_path / "bad.txt"), "--model", tiny, "-q", "-o", str(tmp_path / "trace"))
    assert_refused(*call(capsys, "trace", *options), f"byte {len(STORY) * 700} is 0xff")
    assert os.listdir(tmp_path) == ["bad.txt"]


def test_a_text_longer_than_learned_positions_is_refused(capsys, tmp_path, tokenizer, story):
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, vocab_size=len(tokenizer))
    path = save(tmp_path / "gpt2", GPT2LMHeadModel(config), tokenizer)
    code, out, err = call(capsys, "generate", "-f", story, "--model", path, "-q", "--policy", "tova:8")
    assert_refused(code, out, err, "64 positions")


def test_a_traceback_only_when_asked_for(monkeypatch):
    monkeypatch.setenv("MSRNN_TRACEBACK", "1")
    with pytest.raises(ValueError, match="the prompt is empty"):
        main(["generate", ""])


def test_the_reader_may_go_away():
    command = [sys.executable, "-m", "msrnn", "chat", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=HERE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() in (0, 141)  # argparse itself keeps quiet about it where output is not buffered

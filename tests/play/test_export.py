"""The self-contained file: everything inside, nothing outside, and no text that becomes markup."""

import json
import re

import pytest
import torch

import msrnn
from msrnn.cli import main
from msrnn.plan import per_layer
from msrnn.play.export import from_trace, page_html
from msrnn.play.reading import record
from tests.support import tiny_eval

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)> <!-- & ]]> \u2028 end"


@pytest.fixture(scope="module")
def evil_page():
    model, tokenizer = tiny_eval.model(), tiny_eval.tokenizer()
    recording, _ = record(msrnn.RNN(model, "tova:16"), tokenizer, tokenizer(EVIL).input_ids, "tova:16")
    return page_html(recording)


def test_the_file_names_no_other_file_and_no_host(evil_page):
    head, _, _ = evil_page.partition("<body>")
    assert not re.search(r"<(?:script|img|iframe)[^>]+src=", evil_page)
    assert "<link" not in head
    assert not re.search(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", re.sub(r"http://www\.w3\.org/\S+", "", evil_page))
    assert "default-src 'none'" in head


def test_text_cannot_leave_the_data(evil_page):
    assert evil_page.count("<script") == 2
    assert evil_page.count("</script>") == 2
    data = re.search(r'<script type="application/json" id="recording">(.*?)</script>', evil_page, re.S)[1]
    assert "<" not in data
    tokens = [token for piece in json.loads(data)["pieces"] for token in piece["tokens"]]
    assert "".join(tokens) == EVIL


@pytest.mark.parametrize("policy", ["tova:8", per_layer("fade", [[2, 8], [5, 4]])], ids=str)
def test_a_trace_without_scores_becomes_a_page_too(policy):
    model, tokenizer = tiny_eval.model(), tiny_eval.tokenizer()
    rnn = msrnn.RNN(model, policy, prompt="oneshot")
    ids = torch.tensor([tokenizer("a text that is read at once").input_ids])
    _, state = rnn.step(ids, rnn.start(trace=True))
    trace = state.trace
    with pytest.raises(ValueError, match="does not know its tokens"):
        from_trace(trace, tokenizer)
    trace.tokens = ids
    assert "deaths" in page_html(from_trace(trace, tokenizer))


@pytest.mark.parametrize("mode", ["recurrent", "oneshot"])
def test_the_command_writes_page_and_trace(tmp_path, capsys, mode):
    model = str(tiny_eval.save(tmp_path / "model"))
    files = ["-o", str(tmp_path / "trace.safetensors"), "--html", str(tmp_path / "run.html")]
    text = tiny_eval.prose(30, 1)
    assert main(["trace", text, "--model", model, "--policy", "tova:16", "--prompt-mode", mode, "-q", *files]) == 0
    assert "layer" in capsys.readouterr().out
    trace = msrnn.Trace.load(tmp_path / "trace.safetensors")
    assert trace.length == len(text)
    assert trace.held(0, trace.length - 1).sum() == 16
    page = (tmp_path / "run.html").read_text("utf-8")
    assert page.startswith("<!doctype html>")
    assert '"policy":"tova:16"' in page


def test_the_command_needs_one_of_the_two_files(capsys):
    assert main(["trace", "x"]) == 2
    assert "--html" in capsys.readouterr().err

"""`msrnn serve` as a user meets it: over HTTP, with the openai client, until it is stopped."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.in_vllm.belongings import Belongings
from tests.in_vllm.engines import NEW

CAPACITY = 64
CLOSE = {"atol": 1e-3, "rtol": 1e-4}  # float32, added up in another order


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    log = tmp_path_factory.mktemp("serve") / "log"
    options = ("--max-model-len", "1024", "--kv-cache-memory-bytes", str(64 << 20))
    with serve(model, f"tova:{CAPACITY}", log, *options) as started:
        yield started


@contextmanager
def serve(model: str, policy: str, log: Path, *options: str) -> Iterator[tuple[subprocess.Popen, str, Path]]:
    """`msrnn serve` in float32 under the name "smol": its process, its address and its log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "msrnn", "serve", model, "--policy", policy, "--dtype", "float32"]
    common = ["--enforce-eager", "--port", str(port), "--served-model-name", "smol"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_ENABLE_V1")}
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *common, *options],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment | {"VLLM_LOGGING_LEVEL": "INFO"},
        )
    try:
        wait_for_server(process, port, log)
        yield process, f"http://127.0.0.1:{port}", log
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()  # of no effect on one that has ended


def wait_for_server(process, port: int, log, patience: int = 400) -> None:
    for _ in range(patience):
        if process.poll() is not None:
            break
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
            return
        except OSError:
            time.sleep(1)
    pytest.fail(f"the server did not start:\n{log.read_text()[-3000:]}")


@pytest.fixture(scope="module")
def client(server):
    from openai import OpenAI

    return OpenAI(base_url=f"{server[1]}/v1", api_key="none", max_retries=0)


def metric(url: str, name: str, label: str = "") -> float:
    """A number of /metrics; label: what must be among its labels."""
    text = urllib.request.urlopen(f"{url}/metrics", timeout=60).read().decode()
    labels = f"{{[^}}]*{re.escape(label)}[^}}]*}}" if label else "(?:{[^}]*})?"
    match = re.search(rf"^{name}{labels} ([0-9.e+]+)$", text, re.MULTILINE)
    assert match, f"{name} {label} is not among the metrics"
    return float(match[1])


def test_it_says_what_fits_before_it_starts(server):
    log = server[2].read_text()
    assert "tova:64: a request takes 2.9 MiB, whatever its length" in log
    assert re.search(r"64.0 MiB of KV memory holds 2\d requests at once; a full cache 1 of that length", log)


def test_completions_equal_each_text_alone_and_metrics_show_the_bound(server, client, prompts, alone):
    """Streamed, one after the other; then /metrics has more tokens read than were ever held."""
    expected = alone(f"tova:{CAPACITY}")
    tokenizer = _tokenizer(server)
    for ids, tokens in zip(prompts, expected, strict=True):
        stream = client.completions.create(
            model="smol", prompt=ids, max_tokens=NEW, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        text = "".join(part.choices[0].text for part in stream if part.choices)
        assert text == tokenizer.decode(tokens, skip_special_tokens=True)
    url = server[1]
    assert metric(url, "msrnn_capacity") == CAPACITY
    assert metric(url, "msrnn_request_tokens_seen_max") > max(map(len, prompts))
    assert metric(url, "msrnn_request_tokens_held_max") == CAPACITY
    assert metric(url, "msrnn_tokens_seen_total") == sum(len(ids) + NEW - 1 for ids in prompts)
    assert metric(url, "msrnn_evictions_total") == sum(max(0, len(ids) + NEW - 2 - CAPACITY) for ids in prompts)
    lengths = [len(ids) + NEW - 2 for ids in prompts[:-1]]  # the last one's end is counted with the next batch
    assert metric(url, "msrnn_request_tokens_seen_sum") == sum(lengths)
    assert metric(url, "msrnn_request_tokens_held_sum") == sum(min(CAPACITY, seen) for seen in lengths)
    for label in (f'le="{CAPACITY}.0"', 'le="+Inf"'):
        assert metric(url, "msrnn_request_tokens_held_bucket", label) == len(lengths), "no request ever held more"
    assert metric(url, "msrnn_state_bytes") == metric(url, "msrnn_request_state_bytes")
    assert metric(url, "vllm:num_preemptions_total") == 0


def _tokenizer(server):
    from transformers import AutoTokenizer

    from msrnn.hf.load import bundled

    return AutoTokenizer.from_pretrained(bundled())


def test_logprobs_are_those_of_the_bounded_model(client, prompts, hf_model):
    """A prompt twice as long as the capacity: evicted tokens do not contribute."""
    import torch

    import msrnn

    ids = prompts[3]
    request = {"model": "smol", "prompt": ids, "max_tokens": NEW, "temperature": 0, "logprobs": 1}
    answer = client.completions.create(**request, extra_body={"ignore_eos": True, "return_token_ids": True})
    tokens = answer.choices[0].model_extra["token_ids"]
    rnn = msrnn.RNN(hf_model, f"tova:{CAPACITY}")
    state, expected = rnn.start(), []
    text = [*ids, *tokens[:-1]]
    for start, end in ((0, len(ids)), *((at, at + 1) for at in range(len(ids), len(text)))):
        logits, state = rnn.read(text[start:end], state)
        expected.append(torch.log_softmax(logits[0], -1)[tokens[len(expected)]])
    torch.testing.assert_close(torch.tensor(answer.choices[0].logprobs.token_logprobs), torch.stack(expected), **CLOSE)


def test_chat_template_streams_seeds_and_stops_are_vllms(server, client):
    messages = [{"role": "user", "content": "Count from 1 to 9."}]
    request = {"model": "smol", "messages": messages, "max_tokens": 8, "temperature": 1.0, "seed": 7}
    one, two = (client.chat.completions.create(**request, logprobs=True) for _ in range(2))
    text = one.choices[0].message.content
    assert two.choices[0].message.content == text
    assert len(one.choices[0].logprobs.content) == one.usage.completion_tokens
    template = _tokenizer(server).apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert one.usage.prompt_tokens == len(template["input_ids"])
    stream = client.chat.completions.create(**request, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in stream if part.choices) == text
    stopped = client.completions.create(model="smol", prompt="1, 2, 3, 4,", max_tokens=8, temperature=0, stop=[" 6"])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text.strip() == "5,"


def test_bad_requests_are_answered_and_the_server_lives_on(server, client, prompts):
    import openai

    with pytest.raises(openai.BadRequestError, match="1024"):
        client.completions.create(model="smol", prompt=prompts[-1] * 4, max_tokens=4)
    request = urllib.request.Request(f"{server[1]}/v1/completions", b"{not json", {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=10)
    assert 400 <= refused.value.code < 500
    stream = client.completions.create(model="smol", prompt=prompts[-1], max_tokens=600, temperature=0, stream=True)
    next(iter(stream))
    stream.close()  # the client disconnects in the middle of an answer
    answer = client.completions.create(model="smol", prompt="Hello", max_tokens=2, temperature=0)
    assert answer.usage.completion_tokens == 2
    for _ in range(50):
        if metric(server[1], "vllm:num_requests_running") == 0:
            break
        time.sleep(0.2)
    assert metric(server[1], "vllm:num_requests_running") == 0, "the request of a closed connection still runs"


def test_killed_it_leaves_nothing(server):
    """SIGKILL of `msrnn serve` itself: its processes, folder and shared memory go. The last test of this server."""
    belongings = Belongings(server[0])
    server[0].kill()
    server[0].wait()
    assert belongings.gone_within(30), belongings.remaining

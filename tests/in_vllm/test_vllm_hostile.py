"""`msrnn serve` and clients that mean no good: each gets an answer or a closed door, and the next one is served."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

from tests.in_vllm.belongings import Belongings
from tests.in_vllm.test_vllm_server import metric, wait_for_server

KEY = "a secret"
HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
REQUEST = {"model": "smol", "prompt": "Hello", "max_tokens": 2, "temperature": 0}
MESSAGES = {"model": "smol", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
DEEP = 100_000


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    """The process, its port and its log."""
    log = tmp_path_factory.mktemp("hostile") / "log"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "msrnn", "serve", model, "--policy", "tova:64", "--dtype", "float32"]
    options = ["--enforce-eager", "--max-model-len", "1024", "--kv-cache-memory-bytes", str(64 << 20)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_ENABLE_V1")}
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *options, "--port", str(port), "--served-model-name", "smol", "--api-key", KEY],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        wait_for_server(process, port, log)
        yield process, port, log
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()


def post(port: int, path: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", path, body, HEADERS | headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def answers(port: int) -> bool:
    status, body = post(port, TEXT, json.dumps(REQUEST).encode())
    return status == 200 and json.loads(body)["usage"]["completion_tokens"] == 2


def idle(port: int, seconds: float = 180.0) -> bool:
    """Whether no request runs or waits, now or soon."""
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + seconds
    while time.monotonic() < end:
        if metric(url, "vllm:num_requests_running") == metric(url, "vllm:num_requests_waiting") == 0:
            return True
        time.sleep(0.2)
    return False


def test_only_this_machine_can_reach_it(server):
    _, port, log = server
    assert f"msrnn: listens on 127.0.0.1:{port}: only this machine can reach it" in log.read_text()
    listening = subprocess.run(["cat", "/proc/net/tcp", "/proc/net/tcp6"], capture_output=True, text=True).stdout
    addresses = [line.split()[1] for line in listening.splitlines() if " 0A " in line]
    assert [one for one in addresses if one.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]


@pytest.mark.parametrize("given", [None, "Bearer", "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer {KEY}x"])
def test_a_wrong_key_gets_401(server, given):
    headers = {} if given is None else {"Authorization": given}
    for path in (TEXT, CHAT, "/v1/models"):
        request = urllib.request.Request(f"http://127.0.0.1:{server[1]}{path}", headers=headers)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=20)
        assert refused.value.code == 401


BODIES = {
    "not JSON": b"{not json",
    "nothing": b"",
    "a list": b"[]",
    "null": b"null",
    "a string": b'"Hello"',
    "not text": bytes(range(256)),
    "invalid UTF-8": b'{"model": "smol", "prompt": "\xff\xfe\xfa", "max_tokens": 2}',
    "half a surrogate pair": b'{"model": "smol", "prompt": "\\ud800", "max_tokens": 2}',
    "brackets that never close": b"[" * DEEP,
    "deep lists": b'{"model": "smol", "prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
}
FIELDS = [
    *(("model", value) for value in (5, "other", ["smol"])),
    *(("prompt", value) for value in (None, True, 5, {"a": 1}, "", [], [[]], [-1], [10**9], [10**30], [[1], "a"])),
    *(("max_tokens", value) for value in (-1, 0, 1.5, "many", 10**6, 10**12, 10**30)),
    *(("temperature", value) for value in ("hot", -1, float("nan"), float("inf"))),
    *(("n", value) for value in (-1, 0, 10**9)),
    *(("stop", value) for value in (5, [""])),
    *(("logprobs", value) for value in (-3, 10**6)),
    *(("seed", value) for value in ("x", 10**30)),
    *(("logit_bias", value) for value in ({"a": 1}, {"999999999": 1}, {"-5": 1})),
    *(("structured_outputs", value) for value in ({"regex": "(("}, {"json": "{{"}, {"grammar": "root ::= ("})),
    *(("vllm_xargs", value) for value in (5, {"prefix_id": [[]]})),
    *(("stop_token_ids", value) for value in (["a"], [10**30])),
    ("stream", "perhaps"),
    ("top_p", 2),
    ("min_tokens", 100),
    ("allowed_token_ids", [10**9]),
    ("repetition_penalty", -1),
]
CHATS = [
    *(("messages", value) for value in ([], 5, [5], [{"role": "user", "content": 5}])),
    *(("messages", [{"role": "user", "content": [part]}]) for part in ({"type": "nope"}, {"type": "image_url"})),
    ("messages", [{"role": "user", "content": "word " * 50_000}]),
    ("tools", 5),
    ("chat_template", "{{ 1 / 0 }}"),
    ("top_logprobs", -1),
    ("max_completion_tokens", -4),
]


def test_malformed_bodies_get_an_error_of_the_client(server):
    """4xx for each, with one line of JSON; the server writes no traceback and answers afterwards."""
    _, port, log = server
    bodies = {name: (TEXT, body) for name, body in BODIES.items()}
    bodies |= {f"{name}: {value!r:.40}": (TEXT, json.dumps(REQUEST | {name: value}).encode()) for name, value in FIELDS}
    bodies |= {f"{name}: {value!r:.40}": (CHAT, json.dumps(MESSAGES | {name: value}).encode()) for name, value in CHATS}
    wrong = {}
    for name, (path, body) in bodies.items():
        status, answer = post(port, path, body)
        if not (400 <= status < 500 and {"error", "detail"} & json.loads(answer).keys()):
            wrong[name] = status, answer[:200]
    assert not wrong
    assert len(bodies) > 60
    assert "Traceback" not in log.read_text()
    assert answers(port)
    assert idle(port)


def test_unknown_fields_are_passed_over(server):
    """As OpenAI's clients expect; a prefix that nobody knows is none."""
    status, answer = post(server[1], TEXT, json.dumps(REQUEST).encode())
    for extra in ({"nonsense": {"a": [1]}}, {"vllm_xargs": {"prefix_id": "nobody"}}, {"request_id": "../../x"}):
        other = post(server[1], TEXT, json.dumps(REQUEST | extra).encode())
        assert other[0] == status == 200
        assert json.loads(other[1])["choices"][0]["text"] == json.loads(answer)["choices"][0]["text"]


def head(length: str) -> bytes:
    lines = (f"POST {TEXT} HTTP/1.1", "Host: x", *(f"{name}: {value}" for name, value in HEADERS.items()), length)
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        head("Content-Length: 1") + b"{}{}{}",
        head("Content-Length: -1") + b"{}",
        head("Content-Length: many") + b"{}",
        head("Content-Length: 2\r\nContent-Length: 3") + b"{}",
        head("Transfer-Encoding: chunked") + b"zz\r\n{}",
        head("Content-Length: 2\r\nContent-Type: text/plain") + b"{}",
        b"\x00\x01\x02\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64) + b"\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["short", "negative", "a word", "two", "chunks", "type", "garbage", "TLS", "long path"],
)
def test_malformed_http_gets_an_error_of_the_client(server, data):
    with socket.create_connection(("127.0.0.1", server[1]), timeout=20) as client:
        client.sendall(data)
        assert client.recv(64).startswith(b"HTTP/1.1 4")


def test_a_body_that_never_comes_holds_nobody_up(server):
    """The client promises 500 bytes, sends two and waits, ten times; then hangs up."""
    clients = [socket.create_connection(("127.0.0.1", server[1]), timeout=20) for _ in range(10)]
    for client in clients:
        client.sendall(head("Content-Length: 500") + b"{}")
    assert answers(server[1])
    for client in clients:
        client.close()
    assert answers(server[1])
    assert "Traceback" not in server[2].read_text()


def open_stream(port: int, tokens: int, receive_buffer: int | None = None) -> http.client.HTTPResponse:
    """A streamed answer whose first bytes have come."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.sock = socket.socket()
    if receive_buffer:
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.sock.settimeout(300)
    connection.sock.connect(("127.0.0.1", port))
    body = REQUEST | {"max_tokens": tokens, "stream": True, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True}
    connection.request("POST", TEXT, json.dumps(body).encode(), HEADERS | {"Connection": "close"})
    response = connection.getresponse()
    assert response.status == 200
    assert response.readline().startswith(b"data: ")
    return response


def test_fifty_clients_that_disconnect_in_mid_stream(server):
    """More than fit at once; of each the first token has come. None of them is left running."""
    _, port, log = server
    errors = []

    def disconnect() -> None:
        try:
            open_stream(port, 900).close()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=disconnect) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert idle(port)
    assert answers(port)
    assert metric(f"http://127.0.0.1:{port}", "msrnn_request_tokens_seen_max") < 900, "nobody was read to the end"
    assert "Traceback" not in log.read_text()


def test_slow_readers_get_their_text_and_hold_nobody_up(server):
    port = server[1]
    slow = [open_stream(port, 40, receive_buffer=2048) for _ in range(5)]
    assert answers(port)
    assert idle(port), "what they have not read yet is no longer computed"
    for response in slow:
        lines = []
        while line := response.readline():
            lines.append(line)
            time.sleep(0.001)
        assert b'"completion_tokens":40' in b"".join(lines)
        assert b"data: [DONE]\n" in lines
    assert answers(port)


def test_sigterm_ends_it_within_seconds_and_nothing_is_left(server):
    """A client is connected and reads on: it gets the end of its stream, and vLLM does not wait for it."""
    process, port, _ = server
    belongings = Belongings(process)
    response = open_stream(port, 900)
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.wait(40)
    assert time.monotonic() - begin < 30
    assert belongings.gone_within(1.0), belongings.remaining
    response.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=5)

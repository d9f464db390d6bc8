"""The server: who may speak to it, what it refuses and with which words, and the queue behind it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time

import pytest

from msrnn.play import runs
from msrnn.play.server import Bucket
from msrnn.play.settings import Limits
from tests.play.conftest import finished


def ask(client, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> int:
    """A status, with exactly these headers."""
    connection = http.client.HTTPConnection("127.0.0.1", client.server.server_address[1], timeout=20)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders(body or None)
    status = connection.getresponse().status
    connection.close()
    return status


def test_only_its_own_names_and_its_own_pages_are_answered(client):
    port = client.server.server_address[1]
    good = f"127.0.0.1:{port}"
    assert ask(client, "GET", "/", {"Host": good}) == 200
    assert ask(client, "GET", "/", {"Host": f"localhost:{port}"}) == 200
    for host in ("evil.example", f"evil.example:{port}", f"127.0.0.1:{port + 1}", "127.0.0.1.evil.example", ""):
        assert ask(client, "GET", "/", {"Host": host}) == 403, host
    assert ask(client, "GET", "/", {}) == 403
    assert ask(client, "GET", "/api/info", {"Host": good, "Origin": f"http://{good}"}) == 200
    for origin in ("http://evil.example", "null", f"https://{good}", f"http://localhost:{port}"):
        assert ask(client, "GET", "/api/info", {"Host": good, "Origin": origin}) == 403, origin
    assert ask(client, "GET", "/api/info", {"Host": good, "Sec-Fetch-Site": "cross-site"}) == 403
    assert ask(client, "GET", "/api/info", {"Host": good, "Sec-Fetch-Site": "same-site"}) == 403
    assert ask(client, "OPTIONS", "/api/runs", {"Host": good, "Origin": "http://evil.example"}) in (403, 501)


def test_a_server_for_all_addresses_takes_addresses_but_no_foreign_names(playground):
    client = playground(host="0.0.0.0", allowed=("gpu-box.lan",))
    port = client.server.server_address[1]
    assert ask(client, "GET", "/", {"Host": f"192.168.1.7:{port}"}) == 200
    assert ask(client, "GET", "/", {"Host": f"gpu-box.lan:{port}"}) == 200
    assert ask(client, "GET", "/", {"Host": f"evil.example:{port}"}) == 403
    status, answer = client("/api/runs", {"text": "abc", "policies": ["tova:8"], "model": "other"})
    assert status == 422
    assert "own model" in answer["error"]


def test_every_answer_has_a_policy_that_allows_nothing_foreign(client):
    connection = http.client.HTTPConnection("127.0.0.1", client.server.server_address[1])
    for path in ("/", "/app.js", "/api/info", "/nothing"):
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy
        assert "http" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("path", ["/../pyproject.toml", "/page/app.js", "/example.txt", "/%2e%2e/server.py", "/api/x"])
def test_nothing_but_the_page_is_served(client, path):
    assert client(path)[0] == 404


@pytest.mark.parametrize(
    "change, words",
    [
        ({"text": ""}, "no text to read"),
        ({"text": " \n\t"}, "no text to read"),
        ({"text": 7}, "no text to read"),
        ({"text": "x" * 1_000_001}, "1,000,001 characters"),
        ({"text": "GIF89a\x00\x01\x02"}, "binary"),
        ({"text": "\x01\x02\x03\x04 words"}, "binary"),
        ({"text": "a \ud800 b"}, "surrogates"),
        ({"policies": ["tovva:8"]}, "did you mean 'tova:8'"),
        ({"policies": ["tova"]}, "capacity"),
        ({"policies": ["tova:0"]}, "at least 1"),
        ({"policies": ["tova:999999"]}, "16,384"),
        ({"policies": ["tova:3GiB"]}, "a state of 3.0 GiB is more than the 2.0 GiB allowed here"),
        ({"policies": ["best:3GiB"]}, "a state of 3.0 GiB is more than the 2.0 GiB allowed here"),
        ({"policies": ["tovva:3KiB"]}, "did you mean 'tova"),
        ({"policies": ["full"]}, "full forgets nothing; give a bounded policy, e.g. tova:256"),
        ({"policies": ["./rule.py:8"]}, "names a file"),
        ({"policies": ["tova:8,profile=/etc/passwd"]}, "unknown profile"),
        ({"policies": []}, "one or 2"),
        ({"policies": ["tova:8"] * 3}, "one or 2"),
        ({"kind": "dance"}, "unknown kind"),
        ({"speed": -1}, "speed"),
    ],
)
def test_input_that_cannot_be_used_is_refused_with_the_reason(client, change, words):
    request = {"text": "some words", "policies": ["tova:8"]} | change
    status, answer = client("/api/runs", json.dumps(request).encode())
    assert status == 422
    assert words in answer["error"]


def test_bad_requests(client):
    assert client("/api/runs", b"{nonsense")[0] == 400
    assert client("/api/runs", b"[1]")[0] == 422
    assert client("/api/runs", b"x=1", {"Content-Type": "application/x-www-form-urlencoded"})[0] == 415
    assert client("/api/runs/unknown/slots?lane=0&layer=0")[0] == 404
    host = {"Host": f"127.0.0.1:{client.server.server_address[1]}", "Content-Type": "application/json"}
    assert client("/api/runs", json.dumps({"text": "x" * (5 << 20)}).encode())[0] == 413
    assert ask(client, "POST", "/api/runs", host | {"Transfer-Encoding": "chunked"}) == 411


def test_a_run_reads_all_tokens_and_a_latecomer_gets_the_same_messages(client):
    id = client.start(text="the river " * 12, policies=["tova:16", "window+4:16"], full=True)
    first = client.events(id, finished)
    again = client.events(id, finished)
    log = [[event for event in events if event[0] != "status"] for events in (first, again)]
    assert log[0] == log[1]
    meta = log[0][0][1]
    assert [lane["policy"] for lane in meta["lanes"]] == ["tova:16", "window+4:16"]
    assert sum(len(piece["tokens"]) for event, piece in log[0] if event == "piece") == meta["total"]
    status, slots = client(f"/api/runs/{id}/slots?lane=0&layer=1")
    assert status == 200
    assert len(slots["units"][0]["positions"]) == 16
    assert client(f"/api/runs/{id}/slots?lane=2&layer=0")[0] == 404
    assert client(f"/api/runs/{id}/slots?lane=x&layer=0")[0] == 400


def test_a_profile_by_kv_head(playground, profile_by_head):
    client = playground(profiles=(profile_by_head,))
    id = client.start(text="the river " * 12, policies=[f"fade:16,profile={profile_by_head}"])
    meta = next(data for event, data in client.events(id, finished) if event == "meta")
    assert meta["lanes"][0]["capacities"] == [[5, 27], [20, 12]]
    for layer, sizes in enumerate(meta["lanes"][0]["capacities"]):
        units = client(f"/api/runs/{id}/slots?lane=0&layer={layer}")[1]["units"]
        assert [len(unit["positions"]) for unit in units] == sizes
    status, answer = client("/api/runs", {"text": "the river", "policies": [f"tova:16,profile={profile_by_head}"]})
    assert status == 422
    assert "under tova they decide together; use fade, h2o or tova-head, or a profile by layer" in answer["error"]


def test_pause_step_and_play(client):
    id = client.start(text="x" * 400, speed=20)
    client.events(id, lambda event, data: event == "piece" and data["start"] > 10)
    assert client(f"/api/runs/{id}/control", {"action": "pause"})[0] == 200
    before = client.events(id, lambda event, data: event == "status" and data["state"] == "paused")[-1][1]["seen"]
    time.sleep(0.4)
    client(f"/api/runs/{id}/control", {"action": "step"})
    after = client.events(
        id, lambda event, data: event == "status" and data["state"] == "paused" and data["seen"] > before
    )
    assert after[-1][1]["seen"] == before + 1
    client(f"/api/runs/{id}/control", {"action": "speed", "speed": None})
    client(f"/api/runs/{id}/control", {"action": "play"})
    assert client.events(id, finished)[-1][1]["state"] == "done"
    assert client(f"/api/runs/{id}/control", {"action": "dance"})[0] == 422


def test_runs_queue_and_each_knows_its_place(playground):
    client = playground(Limits(runs=3))
    ids = [client.start(text="y" * 20_000) for _ in range(3)]
    places = [client.events(id, lambda event, _: event == "status")[-1][1]["place"] for id in ids[1:]]
    assert places == [1, 2]
    status, answer = client("/api/runs", {"text": "z", "policies": ["tova:8"]})
    assert status == 422
    assert "3 runs are open" in answer["error"]
    client(f"/api/runs/{ids[0]}/stop", {})
    assert client.events(ids[2], lambda event, data: event == "status" and data["place"] == 1)


def test_a_run_that_nobody_watches_stops(playground, monkeypatch):
    monkeypatch.setattr(runs, "GRACE", 0.3)
    client = playground()
    id = client.start(text="y" * 30_000)
    client.events(id, lambda event, data: event == "piece" and data["start"] > 100)
    run = client.server.scheduler.get(id)
    deadline = time.monotonic() + 15
    while client.server.scheduler.get(id) is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert client.server.scheduler.get(id) is None
    seen = run.reading.seen
    time.sleep(0.3)
    assert run.reading.seen == seen < 30_000
    assert client(f"/api/runs/{id}/control", {"action": "play"})[0] == 404


def test_a_page_in_the_background_keeps_its_run(playground, monkeypatch):
    monkeypatch.setattr(runs, "GRACE", 0.2)
    client = playground()
    id = client.start(text="y" * 3000, speed=50)
    client(f"/api/runs/{id}/control", {"action": "hold"})
    time.sleep(1)
    assert client.server.scheduler.get(id) is not None
    client(f"/api/runs/{id}/control", {"action": "leave"})
    time.sleep(1.5)
    assert client.server.scheduler.get(id) is None


def test_too_many_tokens_and_unknown_models_fail_with_a_message_and_harm_no_other_run(playground):
    client = playground(Limits(tokens=500))
    good = client.start(text="good " * 20)
    long, unknown = client.start(text="y" * 600), client.start(model="no/such/model")
    failure = client.events(long, finished)[-1][1]
    assert failure["state"] == "failed"
    assert "reads 500 at most" in failure["error"]
    failure = client.events(unknown, finished)[-1][1]
    assert failure["state"] == "failed"
    assert "no/such/model" in failure["error"]
    assert client.events(good, finished)[-1][1]["state"] == "done"


def test_a_question_is_answered_by_every_lane_and_changes_none(client):
    id = client.start(text="the old captain walked slowly " * 4, policies=["tova:24"], full=True)
    client.events(id, finished)
    slots = client(f"/api/runs/{id}/slots?lane=0&layer=0")[1]
    assert client(f"/api/runs/{id}/control", {"action": "ask", "text": "who walked?"})[0] == 200
    events = client.events(id, lambda event, _: event == "sources")
    lanes = {data["lane"] for event, data in events if event == "answer" and data.get("done")}
    assert lanes == {"lane0", "full"}
    assert events[-1][1]["by"] == "attention"
    assert events[-1][1]["passages"]
    assert client(f"/api/runs/{id}/slots?lane=0&layer=0")[1] == slots
    assert client(f"/api/runs/{id}/control", {"action": "ask", "text": " "})[0] == 422
    assert client(f"/api/runs/{id}/control", {"action": "ask", "text": "x" * 3000})[0] == 422


def test_a_chat_answers_and_goes_on_in_one_state(client, monkeypatch):
    monkeypatch.setattr(runs, "REPLY", 12)
    id = client.start(kind="chat", text="", full=True)
    client.events(id, lambda event, data: event == "status" and data["state"] == "ready")
    for message in ("hello", "again"):
        client(f"/api/runs/{id}/control", {"action": "say", "text": message})
        events = client.events(
            id, lambda event, data: event == "status" and data["state"] == "ready" and data["seen"] > 40
        )
    pieces = [data for event, data in events if event == "piece"]
    text = {kind: "".join("".join(p["tokens"]) for p in pieces if p["kind"] == kind) for kind in range(4)}
    assert text[2].startswith("hello")
    assert all("full" in piece for piece in pieces)


def test_a_bucket_lets_a_burst_through_and_then_a_trickle(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("msrnn.play.server.time.monotonic", lambda: now[0])
    bucket = Bucket(3, 1)
    assert [bucket.take("a") for _ in range(5)] == [True, True, True, False, False]
    assert bucket.take("b")
    now[0] = 2.0
    assert [bucket.take("a") for _ in range(3)] == [True, True, False]


def test_many_starts_are_slowed_down(playground):
    client = playground(Limits(runs=100))
    answers = [client("/api/runs", {"text": "z", "policies": ["tova:8"]})[0] for _ in range(14)]
    assert answers[:10] == [201] * 10
    assert 429 in answers[10:]


def test_an_unfinished_request_holds_up_nobody(client):
    stuck = socket.create_connection(client.server.server_address[:2])
    stuck.sendall(b"POST /api/runs HTTP/1.1\r\nHost: x\r\n")
    assert client("/api/info")[0] == 200
    stuck.close()
    assert threading.active_count() < 100

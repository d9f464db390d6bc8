"""A playground with a tiny model on a free port, and a real Chromium to look at it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from msrnn.play.server import Server, make_server, serve
from msrnn.play.settings import Limits
from tests.support import tiny_eval

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}[/{{ m['role'] }}]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


def tiny(name: str | None) -> tuple[Any, Any]:
    """One token a byte, two layers; any other name is a model that does not exist."""
    if name is not None:
        from msrnn.hf.load import load

        return load(name)
    tokenizer = tiny_eval.tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tiny_eval.model(), tokenizer


class Client:
    """Speaks to a server as a page would, and as one should not."""

    def __init__(self, server: Server) -> None:
        self.server, self.url = server, server.url.rstrip("/")

    def __call__(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """The status and the JSON (or text) of an answer."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        kind = {"Content-Type": "application/json"} if data is not None else {}
        request = urllib.request.Request(self.url + path, data, kind | (headers or {}))
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                status, text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        return status, json.loads(text) if text.startswith("{") else text

    def start(self, **changes: Any) -> str:
        request = {"text": "the river and the old captain", "policies": ["tova:8"], "full": False} | changes
        status, answer = self("/api/runs", request)
        assert status == 201, answer
        return str(answer["id"])

    def events(self, id: str, until: Callable[[str, Any], bool]) -> list[tuple[str, Any]]:
        """The run's events up to the one that `until` waits for."""
        seen = []
        with urllib.request.urlopen(f"{self.url}/api/runs/{id}/events", timeout=20) as stream:
            event = ""
            for line in stream:
                name, _, rest = line.decode().rstrip("\n").partition(": ")
                if name == "event":
                    event = rest
                elif name == "data":
                    seen.append((event, json.loads(rest)))
                    if until(*seen[-1]):
                        break
        return seen


def finished(event: str, data: Any) -> bool:
    return event == "status" and data["state"] in ("done", "failed")


@pytest.fixture
def playground() -> Iterator[Callable[..., Client]]:
    """`playground(limits=...)`: a running server; it ends with the test."""
    servers: list[tuple[Server, threading.Thread]] = []

    def begin(limits: Limits | None = None, load: Any = tiny, **options: Any) -> Client:
        settings: dict[str, Any] = {"policy": "tova:16", "profiles": ("SmolLM2-135M-Instruct",)}
        server = make_server(load, limits=limits, **settings | options)
        thread = threading.Thread(target=serve, args=(server,), daemon=True)
        thread.start()
        servers.append((server, thread))
        return Client(server)

    yield begin
    for server, thread in servers:
        server.shutdown()
        thread.join(timeout=60)
        assert not thread.is_alive()


@pytest.fixture
def profile_by_head(tmp_path: Path) -> str:
    """A profile for the tiny model: two layers, whose two KV heads have capacities of their own."""
    file = tmp_path / "heads.json"
    file.write_text('{"capacities": [[5, 27], [20, 12]], "average": 16}')
    return str(file)


@pytest.fixture
def client(playground: Callable[..., Client]) -> Client:
    return playground()


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The system's Chromium. On a machine without one, root installs Debian's; others are told what to do."""
    names = ("chromium", "chromium-browser", "google-chrome")
    with FileLock(tmp_path_factory.getbasetemp().parent / "chromium.lock"):
        path = next((found for name in names if (found := shutil.which(name))), None)
        if path is None and os.geteuid() == 0 and shutil.which("apt-get"):
            quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
            for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", "chromium"]):
                subprocess.run(["apt-get", *command], check=True, capture_output=True, env=quiet)
            path = shutil.which("chromium")
    if path is None:
        pytest.skip("no Chromium on this machine, and only root can install one: apt-get install chromium")
    return Path(path)


@pytest.fixture(scope="session")
def browser(chromium: Path) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chrome = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield chrome
        chrome.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A fresh window; an error in one of the page's scripts, or one that its policy blocks, fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: errors.append(line.text) if "Content Security Policy" in line.text else None)
    yield page
    context.close()
    assert errors == []

"""The playground's HTTP server: the page, a small JSON interface and one event stream per page.

Python's own `http.server`, one thread per connection: `msrnn play` then needs nothing that `pip install msrnn` did not
bring, and a local server for a few pages needs no more. What a web framework would add is written out here and tested:
limits on size, rate and connections, checks of Host and Origin, security headers, noticing that a page has gone.
"""

from __future__ import annotations

import ipaddress
import json
import re
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import parse_qs, urlsplit

from . import example_text
from .export import page_html
from .runs import Run
from .scheduler import Scheduler
from .settings import Limits, Refused, Settings

BODY = 4 << 20  # bytes of a request
CONNECTIONS = 64
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_RUN = re.compile(r"/api/runs/([\w-]{1,40})/(\w+)")


class HttpError(Exception):
    """An answer other than 200, with a sentence for the page."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass
class Bucket:
    """A rate limit per client address: `burst` at once, then `rate` a second."""

    burst: float
    rate: float
    levels: dict[str, tuple[float, float]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, client: str) -> bool:
        with self.lock:
            now = time.monotonic()
            level, last = self.levels.get(client, (self.burst, now))
            level = min(self.burst, level + (now - last) * self.rate)
            if len(self.levels) > 1000:
                self.levels.clear()
            self.levels[client] = (max(level - 1, 0.0) if level >= 1 else level, now)
            return level >= 1


class Server(ThreadingHTTPServer):
    """Serves one scheduler. `allowed` are the names that a Host header may have."""

    daemon_threads = True
    request_queue_size = 32

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        allowed: tuple[str, ...] = (),
        policy: str = "tova:256",
        profiles: tuple[str, ...] = (),
        rules: tuple[str, ...] = (),
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), Handler)
        self.scheduler, self.policy, self.profiles, self.rules = scheduler, policy, profiles, rules
        self.closing = False
        bracketed = f"[{host}]" if ":" in host else host
        self.allowed = {*LOOPBACK, bracketed.lower(), *(name.lower() for name in allowed)}
        self.wildcard = host in ("0.0.0.0", "::")  # addresses are then not known; names still are
        self.starts, self.requests = Bucket(10, 0.5), Bucket(300, 60)
        self.connections = threading.BoundedSemaphore(CONNECTIONS)
        self.model_change = host in ("127.0.0.1", "localhost", "::1")  # only the owner loads other models
        self.url = f"http://{'localhost' if self.wildcard else bracketed}:{self.server_address[1]}/"

    def allows(self, host: str) -> bool:
        """Whether a Host header names this server. A page of a rebound DNS name sends that name, which is refused."""
        name, _, port = host.lower().rpartition(":") if not host.endswith("]") else (host.lower(), "", "")
        if not name:
            name, port = host.lower(), ""
        if port and port != str(self.server_address[1]):
            return False
        return name in self.allowed or (self.wildcard and _is_address(name))

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is no error of ours."""
        import sys

        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "msrnn", ""
    timeout = 30  # seconds that a request may take to arrive

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_HEAD(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, act: Callable[[str, dict[str, list[str]]], None]) -> None:
        try:
            self._check()
            path = urlsplit(self.path)
            act(path.path, parse_qs(path.query))
        except HttpError as error:
            self._json({"error": str(error)}, error.status, close=True)
        except Refused as error:
            self._json({"error": str(error)}, HTTPStatus.UNPROCESSABLE_ENTITY)
        except ValueError as error:  # a policy's own message
            self._json({"error": " ".join(str(error).split())}, HTTPStatus.UNPROCESSABLE_ENTITY)

    def _check(self) -> None:
        """Only pages that this server gave out may speak to it."""
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not self.server.allows(hosts[0]):
            raise HttpError(HTTPStatus.FORBIDDEN, "this is not the playground's name; open the address it printed")
        origin = self.headers.get("Origin")
        if origin is not None and origin != f"http://{hosts[0]}":
            raise HttpError(HTTPStatus.FORBIDDEN, "requests from other sites are refused")
        if self.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
            raise HttpError(HTTPStatus.FORBIDDEN, "requests from other sites are refused")
        if not self.server.requests.take(self.client_address[0]):
            raise HttpError(HTTPStatus.TOO_MANY_REQUESTS, "too many requests; wait a few seconds")

    # GET

    def _get(self, path: str, query: dict[str, list[str]]) -> None:
        if path == "/api/info":
            self._json(self._info())
        elif match := _RUN.fullmatch(path):
            run = self._find(match[1])
            if match[2] == "events":
                self._events(run, query)
            elif match[2] == "slots":
                self._json(self._slots(run, query))
            elif match[2] == "export":
                self._export(run)
            else:
                raise HttpError(HTTPStatus.NOT_FOUND, "there is nothing here")
        else:
            self._static("index.html" if path == "/" else path[1:])

    def _find(self, id: str) -> Run:
        run = self.server.scheduler.get(id)
        if run is None:
            raise HttpError(HTTPStatus.NOT_FOUND, "this run is over: its page was closed; start it again")
        return run

    def _info(self) -> dict[str, Any]:
        server, scheduler = self.server, self.server.scheduler
        limits = scheduler.limits
        return {
            "policy": server.policy, "profiles": server.profiles, "model": scheduler.model,
            "model_change": server.model_change, "model_error": scheduler.model_error,
            "model_ready": scheduler.model_ready, "example": example_text(),
            "limits": {"tokens": limits.tokens, "characters": limits.characters, "capacity": limits.capacity},
        }  # fmt: skip

    def _slots(self, run: Run, query: dict[str, list[str]]) -> dict[str, Any]:
        try:
            lane, layer = (int(query[name][0]) for name in ("lane", "layer"))
        except (KeyError, ValueError):
            raise HttpError(HTTPStatus.BAD_REQUEST, "give the numbers of a lane and a layer") from None
        reading = run.reading
        if reading is None or not 0 <= lane < len(reading.lanes) or not 0 <= layer < len(reading.lanes[lane].observers):
            raise HttpError(HTTPStatus.NOT_FOUND, "there is no such lane or layer yet")
        return reading.lanes[lane].slots(layer)

    def _export(self, run: Run) -> None:
        page = page_html(run.recording()).encode()
        self._send(page, "text/html", headers={"Content-Disposition": 'attachment; filename="msrnn-run.html"'})

    def _static(self, name: str) -> None:
        kind = TYPES.get(name.rpartition(".")[2])
        if name not in page_files() or kind is None:
            raise HttpError(HTTPStatus.NOT_FOUND, "there is nothing here")
        self._send(asset(name).encode(), kind)

    # the event stream

    def _events(self, run: Run, query: dict[str, list[str]]) -> None:
        """All messages from the one after Last-Event-ID, then new ones as they come, with the status between them."""
        last = self.headers.get("Last-Event-ID") or query.get("from", ["0"])[0]
        sent = int(last) if last.isdigit() else 0
        self.send_response(HTTPStatus.OK)
        self._headers({"Content-Type": "text/event-stream; charset=utf-8", "Connection": "close"})
        self.close_connection = True
        if self.command == "HEAD":
            return
        run.watch()
        try:
            self._follow(run, sent)
        except (ConnectionError, TimeoutError):
            pass
        finally:
            run.unwatch()

    def _follow(self, run: Run, sent: int) -> None:
        version, beat = -1, time.monotonic()
        while not self.server.closing and not self._gone():
            with run.changed:
                if run.version == version:
                    run.changed.wait(0.5)
                if run.version == version:
                    fresh, status = [], None
                else:
                    version, status = run.version, run.status()
                    fresh = run.log[sent : sent + 64]
                    version = version if sent + len(fresh) == len(run.log) else -1
            blocks = [_event(entry, number) for number, entry in enumerate(fresh, sent + 1)]
            sent += len(fresh)
            if status is not None:
                blocks.append(f"event: status\ndata: {json.dumps(status | {'log': sent})}\n\n")
            elif time.monotonic() - beat > 5:
                blocks.append(": still here\n\n")
            if blocks:
                beat = time.monotonic()
                self.wfile.write("".join(blocks).encode())
            if status is not None and status["state"] == "stopped":
                return

    def _gone(self) -> bool:
        """Whether the page has closed its end."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)

    # POST

    def _post(self, path: str, _: dict[str, list[str]]) -> None:
        request = self._body()
        scheduler = self.server.scheduler
        if path == "/api/runs":
            if not self.server.starts.take(self.client_address[0]):
                raise HttpError(HTTPStatus.TOO_MANY_REQUESTS, "too many runs were started; wait a few seconds")
            settings = Settings.parse(request, scheduler.limits, self.server.profiles, self.server.rules)
            if settings.model not in (None, scheduler.model) and not self.server.model_change:
                raise Refused("this server reads with its own model only")
            run = scheduler.submit(settings)
            self._json({"id": run.id}, HTTPStatus.CREATED)
        elif match := _RUN.fullmatch(path):
            run = self._find(match[1])
            if match[2] == "control":
                scheduler.control(run, request)
            elif match[2] == "stop":
                scheduler.drop(run)
            else:
                raise HttpError(HTTPStatus.NOT_FOUND, "there is nothing here")
            self._json({})
        else:
            raise HttpError(HTTPStatus.NOT_FOUND, "there is nothing here")

    def _body(self) -> Any:
        kind = self.headers.get_content_type()
        if kind != "application/json":
            raise HttpError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "requests must be application/json")
        length = self.headers.get("Content-Length", "")
        if not length.isdigit():
            raise HttpError(HTTPStatus.LENGTH_REQUIRED, "requests must say their length")
        if int(length) > BODY:
            limit = f"{BODY >> 20} MiB"
            self._discard(min(int(length), 8 * BODY))
            raise HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the text is larger than {limit}; cut it")
        try:
            return json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise HttpError(HTTPStatus.BAD_REQUEST, "the request is not JSON") from None

    def _discard(self, size: int) -> None:
        """Read what nobody wants: a browser listens to the answer only once it has sent all."""
        while size > 0 and (part := self.rfile.read(min(size, 1 << 16))):
            size -= len(part)

    # answers

    def _json(self, message: dict[str, Any], status: HTTPStatus = HTTPStatus.OK, *, close: bool = False) -> None:
        self.close_connection = self.close_connection or close
        self._send(json.dumps(message, ensure_ascii=False).encode(), "application/json", status)

    def _send(
        self, body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        size = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        self._headers(size | (headers or {}) | ({"Connection": "close"} if self.close_connection else {}))
        if self.command != "HEAD":
            self.wfile.write(body)

    def _headers(self, headers: dict[str, str]) -> None:
        for name, value in (HEADERS | headers).items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed per request."""


def _event(entry: str, number: int) -> str:
    """A message as the stream has it; a page that reconnects says the last number it saw."""
    name, data = entry.split("\n", 1)
    return f"id: {number}\nevent: {name}\ndata: {data}\n\n"


def page_files() -> frozenset[str]:
    """The names that the page may ask for."""
    folder = resources.files("msrnn.play") / "page"
    return frozenset(file.name for file in folder.iterdir() if file.name.rpartition(".")[2] in TYPES)


def asset(name: str) -> str:
    return (resources.files("msrnn.play") / "page" / name).read_text("utf-8")


def serve(server: Server) -> None:
    """Until interrupted; then every run ends and every stream closes."""
    server.scheduler.start()
    try:
        server.serve_forever(poll_interval=0.2)
    finally:
        server.closing = True
        server.scheduler.close()
        server.server_close()


def make_server(
    load: Callable[[str | None], tuple[Any, Any]],
    *,
    model: str | None = None,
    limits: Limits | None = None,
    **options: Any,
) -> Server:
    """A server and its scheduler, not yet started. `load` gives a model and its tokenizer by name."""
    return Server(Scheduler(load, limits or Limits(), model), **options)

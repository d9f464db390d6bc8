"""A run: one text or chat, read in pieces; everything it has to say is kept as messages.

A page that reloads or comes late catches up from the first message. A run that nobody watches any more is stopped and
dropped after a few seconds. The worker thread of `scheduler` calls `work`; the server's threads call everything else.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .ask import Answer, by_attention, by_words
from .reading import MODEL, PIECE, TEMPLATE, TEXT, USER, Message, Reading
from .settings import Limits, Refused, Settings, speed_of
from .tokens import TokenText, encode_text, template

GRACE = 10.0  # seconds that a run outlives its last page: a reload takes less
HOLD = 600.0  # the same for a page that has told that it is in the background
ASKING = "Answer this question about the text in one short sentence:"  # small models recite the text otherwise
REPLY = 256  # tokens of a chat's answer at most


class Models:
    """The loaded model, and the one before it. Used by the worker thread only."""

    def __init__(self, load: Callable[[str | None], tuple[Any, Any]]) -> None:
        self._load = load
        self._loaded: dict[str | None, tuple[Any, Any]] = {}

    def get(self, name: str | None) -> tuple[Any, Any]:
        if name not in self._loaded:
            model = self._load(name)
            while len(self._loaded) > 1:
                self._loaded.pop(next(iter(self._loaded)))
            self._loaded[name] = model
        return self._loaded[name]


@dataclass
class Run:
    """One text or chat, from the request to the last message. `changed` guards everything that pages see."""

    settings: Settings
    limits: Limits
    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    log: list[str] = field(default_factory=list)  # published messages, "event\ndata"
    state: str = "queued"
    error: str = ""
    place: int = 0
    paused: bool = False
    steps: int = 0  # single steps asked for while paused
    speed: float | None = None
    viewers: int = 0
    lease: float = field(default_factory=lambda: time.monotonic() + 3 * GRACE)
    changed: threading.Condition = field(default_factory=threading.Condition)
    version: int = 0

    def __post_init__(self) -> None:
        self.speed = self.settings.speed
        self.reading: Reading | None = None
        self.asks: deque[str] = deque()
        self.says: deque[str] = deque()
        self._job: Iterator[None] | None = None
        self._pending: deque[tuple[int, int]] = deque()  # token ids and their kinds
        self._texts: list[str] = []
        self._kinds: list[int] = []
        self._due = 0.0
        self._rate: deque[tuple[float, int]] = deque(maxlen=12)
        self._answers = 0
        self._working = False

    # what pages do

    def watch(self) -> None:
        with self.changed:
            self.viewers += 1

    def unwatch(self) -> None:
        with self.changed:
            self.viewers -= 1
            self.lease = time.monotonic() + GRACE

    def hold(self, seconds: float) -> None:
        with self.changed:
            self.lease = time.monotonic() + seconds

    def abandoned(self) -> bool:
        return self.viewers == 0 and time.monotonic() > self.lease

    def control(self, request: Any) -> None:
        """Act on what a page asked for."""
        action = request.get("action") if isinstance(request, dict) else None
        with self.changed:
            if action in ("play", "pause"):
                self.paused, self.steps, self._due = action == "pause", 0, 0.0
            elif action == "step":
                self.paused, self.steps = True, min(self.steps + 1, 64)
            elif action == "speed":
                self.speed, self._due = speed_of(request), 0.0
            elif action in ("ask", "say"):
                self._question(request.get("text"), action)
            elif action in ("hold", "leave"):
                self.lease = time.monotonic() + (HOLD if action == "hold" else GRACE)
            else:
                raise Refused(f"unknown action {action!r}")
            if self.reading is not None and not self.finished and not self._working:
                self._settle()
            self._touch()

    def _question(self, text: Any, action: str) -> None:
        if not isinstance(text, str) or not text.strip():
            raise Refused("there is nothing to ask; type a question first")
        if len(text) > self.limits.question:
            raise Refused(f"the question has {len(text):,} characters; {self.limits.question:,} are allowed")
        if self.finished and self.state != "done":
            raise Refused("this run has ended; start another one")
        if len(self.asks) + len(self.says) > 3:
            raise Refused("several questions are waiting already; wait for their answers")
        if action == "ask":
            if self.reading is None or self.reading.seen == 0:
                raise Refused("nothing has been read yet; press play first")
            self.asks.append(text.strip())
        elif self.settings.kind != "chat":
            raise Refused("this run reads a text; ask about it instead")
        else:
            self.says.append(text.strip())

    # what the worker does

    @property
    def finished(self) -> bool:
        return self.state in ("done", "failed", "stopped")

    def runnable(self, now: float) -> bool:
        if self.state in ("failed", "stopped"):
            return False
        if self.reading is None or self._job is not None or self.asks or self.says:
            return True
        return bool(self._pending) and (self.steps > 0 if self.paused else now >= self._due)

    @property
    def waiting(self) -> bool:
        """Whether it wants the worker, now or after a short delay."""
        return self.runnable(float("inf"))

    def work(self, models: Models) -> None:
        """One unit of work: about a piece, so that pauses and other runs wait no longer."""
        self._working = True  # a pause is told when the piece under way has been read
        try:
            self._work(models)
        finally:
            self._working = False
        self._settle()

    def _work(self, models: Models) -> None:
        if self.reading is None:
            self._prepare(models)
        elif self._job is not None:
            if next(self._job, self) is self:
                self._job = None
        elif self.asks:
            self._job = self._ask(self.asks.popleft())
        elif self.says and not self._pending:
            self._job = self._reply(self.says.popleft())
        else:
            self._read()

    def _settle(self) -> None:
        """The state that pages are told."""
        with self.changed:
            if self._job is not None or self.asks or self.says:
                state = "answering"
            elif self._pending:
                state = "paused" if self.paused and not self.steps else "reading"
            else:
                state = "ready" if self.settings.kind == "chat" else "done"
            if state != self.state:
                self.state = state
                self._touch()

    def _prepare(self, models: Models) -> None:
        self.set_state("loading")
        self.model, self.tokenizer = models.get(self.settings.model)
        self.turns = template(self.tokenizer)
        self.decode = TokenText(self.tokenizer)
        self.ends = _ends(self.model, self.tokenizer)
        if self.settings.kind == "chat" and self.turns is None:
            raise Refused("this model has no chat template; read a text with it, or choose an instruct model")
        self._queue_text()
        self._begin(len(self._pending))

    def _queue_text(self) -> None:
        """The template's beginning, where there is one, and the text."""
        prefix = self.turns.first_prefix if self.turns else ""
        self._queue(encode_text(self.tokenizer, prefix, special=not prefix), TEMPLATE)
        if self.settings.kind == "text":
            self._queue(encode_text(self.tokenizer, self.settings.text), TEXT)

    def _begin(self, total: int) -> None:
        """The lanes; full attention reads along as far as the model was trained for."""
        if total > self.limits.tokens:
            raise Refused(
                f"the text has {total:,} tokens, the playground reads {self.limits.tokens:,} at most; cut it, or read "
                "it all with `msrnn trace`"
            )
        context = getattr(self.model.config, "max_position_embeddings", None) or self.limits.full_tokens
        full = min(self.limits.full_tokens, context) if self.settings.full else 0
        length = total if self.settings.kind == "text" else None
        reading = Reading.start(self.model, self.settings.policies, length=length, full_tokens=full)
        meta = reading.describe(self.settings.policies) | {"kind": self.settings.kind, "total": total, "id": self.id}
        self.publish("meta", meta)
        self.reading = reading

    def _queue(self, ids: list[int], kind: int) -> None:
        self._pending.extend((token, kind) for token in ids)

    def _read(self) -> None:
        """One piece of the text, no larger than the speed asks for; a single token where a step was asked for."""
        size = PIECE if self.speed is None else max(1, min(PIECE, round(self.speed / 4)))
        kind = self._pending[0][1]
        if kind == TEMPLATE:
            size = PIECE
        elif self.paused:
            size, self.steps = min(1, self.steps), max(0, self.steps - 1)
        ids: list[int] = []
        while self._pending and len(ids) < size and self._pending[0][1] == kind:
            ids.append(self._pending.popleft()[0])
        if not ids:  # paused since the scheduler asked
            return
        now = time.monotonic()
        if self.speed is not None and not self.paused:
            self._due = max(self._due, now - 1) + len(ids) / self.speed
        self._feed(ids, kind)

    def _feed(self, ids: list[int], kind: int) -> None:
        assert self.reading is not None
        texts = [self.decode(token) for token in ids]
        message = self.reading.feed(ids, texts, kind)
        self._texts += texts
        self._kinds += [kind] * len(ids)
        self._rate.append((time.monotonic(), len(ids)))
        self.publish("piece", message)

    @property
    def rate(self) -> float:
        """Tokens per second over the last pieces."""
        if len(self._rate) < 2:
            return 0.0
        seconds = self._rate[-1][0] - self._rate[0][0]
        return sum(count for _, count in list(self._rate)[1:]) / max(seconds, 1e-6)

    def _ask(self, question: str) -> Iterator[None]:
        """Every lane answers; then the sources."""
        assert self.reading is not None
        reading, number = self.reading, self._answers
        self._answers += 1
        self.publish("question", {"number": number, "text": question, "seen": reading.seen})
        suffix = self.turns.suffix if self.turns else "\nAnswer:"
        ids = encode_text(self.tokenizer, f"\n\n{ASKING} {question}{suffix}")
        whole = reading.full is not None and reading.full.seen == reading.seen
        lanes = [*reading.lanes, *([reading.full] if whole and reading.full else [])]
        sources, said = None, ""
        for lane in lanes:
            answer, decode = Answer.of(lane, self.ends, attention=lane is reading.full), TokenText(self.tokenizer)
            for token in answer.tokens(ids):
                text = decode(token)
                said += text
                self.publish("answer", {"number": number, "lane": lane.name, "text": text})
                yield
            said += "\n"
            self.publish("answer", {"number": number, "lane": lane.name, "text": "", "done": True})
            if answer.attention is not None:
                readable = [kind != TEMPLATE and place > 3 for place, kind in enumerate(self._kinds[: reading.seen])]
                sources = by_attention(answer.attention, readable)
        found = "attention" if sources is not None else "words"
        sources = by_words(self._texts, f"{question} {said}") if sources is None else sources
        self.publish("sources", {"number": number, "by": found, "passages": sources})

    def _reply(self, message: str) -> Iterator[None]:
        """The first policy answers a chat message; all lanes read the same conversation."""
        assert self.reading is not None
        assert self.turns is not None
        before = self.turns.next_prefix if self._kinds and self._kinds[-1] == MODEL else ""
        parts = ((before, TEMPLATE), (message, USER), (self.turns.suffix, TEMPLATE))
        queue = [(encode_text(self.tokenizer, text), kind) for text, kind in parts if text]
        if self.reading.seen + sum(len(ids) for ids, _ in queue) + REPLY > self.limits.tokens:
            raise Refused(f"the conversation has reached the {self.limits.tokens:,} tokens that the playground reads")
        for ids, kind in queue:
            for start in range(0, len(ids), PIECE):
                self._feed(ids[start : start + PIECE], kind)
                yield
        for _ in range(REPLY):
            logits = self.reading.lanes[0].logits
            assert logits is not None
            token = int(logits.argmax())
            if token in self.ends:
                break
            self._feed([token], MODEL)
            yield

    # messages

    def publish(self, event: str, message: Message) -> None:
        text = f"{event}\n{json.dumps(message, ensure_ascii=False, separators=(',', ':'))}"
        with self.changed:
            self.log.append(text)
            self._touch()

    def status(self) -> Message:
        pending = len(self._pending)
        seen = self.reading.seen if self.reading else 0
        return {
            "state": self.state, "error": self.error, "place": self.place, "paused": self.paused, "seen": seen,
            "left": pending, "rate": round(self.rate, 1), "speed": self.speed,
        }  # fmt: skip

    def set_state(self, state: str, error: str = "") -> None:
        with self.changed:
            self.state, self.error = state, error
            self._touch()

    def refuse(self, reason: str) -> None:
        """Give up what was asked for last; what was read stays."""
        self._job = None
        self.publish("notice", {"text": reason})
        self._settle()

    def stop(self) -> None:
        """Ends it and frees its states; nothing is published any more."""
        with self.changed:
            self.state = "stopped"
            self._touch()

    def _touch(self) -> None:
        self.version += 1
        self.changed.notify_all()

    def recording(self) -> Message:
        """Everything published so far, for `export`."""
        with self.changed:
            messages = [entry.split("\n", 1) for entry in self.log]
        recording: Message = {"meta": None, "pieces": [], "answers": [], "slots": None}
        for event, data in messages:
            message = json.loads(data)
            if event == "meta":
                recording["meta"] = message
            elif event == "piece":
                recording["pieces"].append(message)
            else:
                recording["answers"].append([event, message])
        if recording["meta"] is None or not recording["pieces"]:
            raise Refused("nothing has been read yet; press play first")
        reading = self.reading
        if reading is not None:
            layers = range(len(recording["meta"]["layers"]))
            recording["slots"] = [[lane.slots(layer) for layer in layers] for lane in reading.lanes]
        return recording


def _ends(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer."""
    ends = model.generation_config.eos_token_id
    listed = ends if isinstance(ends, list) else [ends]
    return frozenset(int(token) for token in [*listed, tokenizer.eos_token_id] if token is not None)

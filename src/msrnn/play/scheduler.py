"""The queue of runs and its one worker thread: first come first served, and a paused run lets the next one work."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from .runs import GRACE, Models, Run
from .settings import Limits, Refused, Settings

NICE = 2  # the worker yields to the browser a little; much more would starve it on a busy machine


class Scheduler:
    """The queue and its worker thread."""

    def __init__(self, load: Callable[[str | None], tuple[Any, Any]], limits: Limits, model: str | None = None) -> None:
        self.limits, self.model = limits, model
        self.models = Models(load)
        self.runs: dict[str, Run] = {}
        self.model_error = ""
        self.model_ready = False
        self._lock = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="msrnn-play", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for run in self.runs.values():
                run.stop()
            self._lock.notify_all()
        self._thread.join(timeout=30)

    def submit(self, settings: Settings) -> Run:
        with self._lock:
            if len(self.runs) >= self.limits.runs:
                raise Refused(
                    f"{len(self.runs)} runs are open, which is the limit here; close a tab and wait {GRACE:.0f} seconds"
                )
            run = Run(settings, self.limits)
            self.runs[run.id] = run
            self._places()
            self._lock.notify_all()
        return run

    def get(self, id: str) -> Run | None:
        return self.runs.get(id)

    def control(self, run: Run, request: Any) -> None:
        run.control(request)
        with self._lock:
            if isinstance(request, dict) and request.get("action") == "play" and run.id in self.runs:
                self.runs[run.id] = self.runs.pop(run.id)  # who paused goes to the end of the queue
            self._places()
            self._lock.notify_all()

    def drop(self, run: Run) -> None:
        run.stop()
        with self._lock:
            self.runs.pop(run.id, None)
            self._places()
            self._lock.notify_all()

    def _loop(self) -> None:
        _leave_room()
        self._preload()
        while not self._closed:
            run = self._next()
            if run is not None:
                self._work(run)

    def _preload(self) -> None:
        """Load the model before anybody asks, and keep what went wrong for the page."""
        try:
            self.models.get(self.model)
        except Exception as error:
            self.model_error = _one_line(error)
        self.model_ready = True

    def _next(self) -> Run | None:
        """The first run of the queue that has something to do now; None after a while."""
        with self._lock:
            for gone in [run for run in self.runs.values() if run.abandoned()]:
                gone.stop()
                del self.runs[gone.id]
            self._places()
            now = time.monotonic()
            chosen = next((run for run in self.runs.values() if run.runnable(now)), None)
            if chosen is None:
                busy = any(run.waiting for run in self.runs.values())
                self._lock.wait(0.02 if busy else 0.5)
            return chosen

    def _places(self) -> None:
        """Tell every waiting run how many stand before it."""
        before = 0
        for run in self.runs.values():
            place = before if run.waiting else 0
            before += run.waiting
            if place != run.place:
                with run.changed:
                    run.place = place
                    run._touch()

    def _work(self, run: Run) -> None:
        try:
            run.work(self.models)
        except Exception as error:
            if isinstance(error, Refused) and run.reading is not None:
                run.refuse(str(error))
                return
            if not isinstance(error, ValueError | OSError | MemoryError):
                traceback.print_exc(file=sys.stderr)
            run.reading = None
            run.set_state("failed", _one_line(error))


def _leave_room() -> None:
    """The browser shares the cores with this thread: one core stays free for it, and it goes first.

    On two cores, two threads that wait for each other at every operation are slower beside a busy browser than one.
    """
    torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))
    if sys.platform == "linux":  # elsewhere a priority belongs to the whole process
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:600] or type(error).__name__

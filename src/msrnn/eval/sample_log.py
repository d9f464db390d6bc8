"""The log of a run: every finished sample, on the disk before the next one begins, so that a kill loses none.

A line belongs to a run by the hash of the settings that decide its numbers; another run may share the file. Each
process that adds lines first says where it runs, and its lines refer to that.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .record import append_lines, read_lines
from .task import Output, Row


@dataclass(frozen=True)
class Done:
    """What one policy made of one sample. `digest` is of its prompt: another prompt under the same id counts anew."""

    policy: str
    sample: str
    group: str
    digest: str
    rows: list[Row]
    seconds: float
    peak_bytes: int
    text: str | None = None
    ended: bool = False
    session: int = 0


@dataclass
class Log:
    """The finished samples of one run, by policy and sample."""

    path: Path
    run: str
    done: dict[tuple[str, str], Done] = field(default_factory=dict)
    sessions: dict[int, dict[str, Any]] = field(default_factory=dict)
    session: int = 0

    @classmethod
    def open(cls, path: str | Path, run: str) -> Log:
        log = cls(Path(path), run)
        for number, line in read_lines(path) if Path(path).exists() else ():
            try:
                log._take(line)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}:{number}: not a line of a sample log ({error}); move the file away") from None
        log.session = max(log.sessions, default=0)
        return log

    def _take(self, line: Mapping[str, Any]) -> None:
        if "where" in line:
            self.sessions[line["session"]] = line["where"]
        elif line["run"] == self.run:
            rows = [Row(**row) for row in line["rows"]]
            done = Done(**{k: v for k, v in line.items() if k not in ("run", "rows")}, rows=rows)
            self.done[done.policy, done.sample] = done

    def begin(self, where: dict[str, Any]) -> None:
        self.session += 1
        self.sessions[self.session] = where
        append_lines(self.path, [{"session": self.session, "run": self.run, "where": where}])

    def add(self, finished: Sequence[Done]) -> None:
        """They are on the disk when this returns."""
        append_lines(self.path, [{"run": self.run} | asdict(done) for done in finished])
        self.done |= {(done.policy, done.sample): done for done in finished}

    def written(self, policy: str, sample: str) -> Output | None:
        """What the policy wrote for the sample, if it did."""
        known = self.done.get((policy, sample))
        return None if known is None or known.text is None else Output(text=known.text, ended=known.ended)

    def has(self, policy: str, sample: str, digest: str) -> bool:
        known = self.done.get((policy, sample))
        return known is not None and known.digest == digest


def run_key(settings: Mapping[str, Any]) -> str:
    """A hash of everything that decides a run's numbers."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:16]


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Only one process adds to a log at a time."""
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    try:
        with FileLock(Path(tempfile.gettempdir()) / f"msrnn-{name}.lock", timeout=0):
            yield
    except Timeout:
        raise ValueError(f"another process writes to {path} now; wait for it, or give another --out") from None

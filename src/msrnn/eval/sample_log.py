"""The log of a run: every finished sample is on the disk before the next one begins, so a kill loses none.

A line belongs to a run by the hash of the settings that decide its numbers; other runs may share the file. Each process
that appends lines first writes its provenance (machine, commit, command), and its lines refer to that by number.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..system.downloads import cache_folder
from .record import append_lines, read_lines
from .task import Output, Row


@dataclass(frozen=True)
class SampleResult:
    """One policy on one sample. `digest` is of its prompt: another prompt under the same id is measured again."""

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
class SampleLog:
    """The finished samples of one run, by policy and sample."""

    path: Path
    run: str
    results: dict[tuple[str, str], SampleResult] = field(default_factory=dict)
    sessions: dict[int, dict[str, Any]] = field(default_factory=dict)
    session: int = 0

    @classmethod
    def open(cls, path: str | Path, run: str) -> SampleLog:
        log = cls(Path(path), run)
        for number, line in read_lines(path) if Path(path).exists() else ():
            try:
                log._load(line)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}:{number}: not a line of a sample log ({error}); move the file away") from None
        log.session = max(log.sessions, default=0)
        return log

    def _load(self, line: Mapping[str, Any]) -> None:
        if "where" in line:
            self.sessions[line["session"]] = line["where"]
        elif line["run"] == self.run:
            rows = [Row(**row) for row in line["rows"]]
            result = SampleResult(**{k: v for k, v in line.items() if k not in ("run", "rows")}, rows=rows)
            self.results[result.policy, result.sample] = result

    def start_session(self, provenance: dict[str, Any]) -> None:
        self.session += 1
        self.sessions[self.session] = provenance
        append_lines(self.path, [{"session": self.session, "run": self.run, "where": provenance}])

    def add(self, results: Sequence[SampleResult]) -> None:
        """They are on the disk when this returns."""
        append_lines(self.path, [{"run": self.run} | asdict(result) for result in results])
        self.results |= {(result.policy, result.sample): result for result in results}

    def output(self, policy: str, sample: str) -> Output | None:
        """What the policy generated for the sample; None if it has not."""
        result = self.results.get((policy, sample))
        return None if result is None or result.text is None else Output(text=result.text, ended=result.ended)

    def has(self, policy: str, sample: str, digest: str) -> bool:
        result = self.results.get((policy, sample))
        return result is not None and result.digest == digest


def run_key(settings: Mapping[str, Any]) -> str:
    """A hash of everything that decides a run's numbers."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def ids_digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:16]


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Only one process appends to a log at a time."""
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    try:
        with FileLock(_lock_folder() / f"msrnn-{name}.lock", timeout=0):
            yield
    except Timeout:
        raise ValueError(f"another process writes to {path} now; wait for it, or give another --out") from None


def _lock_folder() -> Path:
    """In the cache, where a user's locks are the user's own; elsewhere only if that cannot be written to."""
    folder = cache_folder() / "locks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir())
    return folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir())

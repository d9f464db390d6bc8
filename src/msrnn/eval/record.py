"""Records: a measured value, its confidence interval and its conditions, one JSON line each, appended, never edited.

Figures and tables read records and nothing else. `parts` has the sums behind a value by group (books, stories), so
that two policies can be compared afterwards, paired by group.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..system.files import check_regular

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Cell = dict[str, float | int | str]


@dataclass(frozen=True)
class Record:
    """`value` lies between `low` and `high` with 95 % confidence; both are None where there is only one group.

    `cell` says which part of the task this is, where it has parts: {"length": 2048, "depth": 0.5}. `capacity` is None
    for `full`. `seconds` and `peak_bytes` are of all samples of this policy together and of the worst batch.
    """

    task: str
    model: str
    policy: str
    capacity: float | None
    metric: str
    value: float
    low: float | None
    high: float | None
    samples: int
    groups: int
    seed: int
    dtype: str
    machine: str
    versions: dict[str, str]
    commit: str
    date: str
    seconds: float
    peak_bytes: int
    run: str
    cell: Cell = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, dict[str, float]] = field(default_factory=dict)
    command: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """Two records with the same key are one measurement."""
        return (self.run, self.policy, self.metric, json.dumps(self.cell, sort_keys=True), self.samples, self.value)


def write_records(path: str | Path, records: Iterable[Record]) -> list[Record]:
    """Append the records that the file does not have yet, and return those."""
    keys = {record.key for record in read_records(path)} if Path(path).exists() else set()
    new = [record for record in records if record.key not in keys]
    if new:
        append_lines(path, (asdict(record) for record in new))
    return new


def read_records(path: str | Path) -> list[Record]:
    """All records of a file; the error for a line that is not one names it."""
    return [_record(path, number, line) for number, line in read_lines(path)]


def _record(path: str | Path, number: int, line: Mapping[str, Any]) -> Record:
    unknown = sorted(set(line) - {f.name for f in fields(Record)})
    if unknown:
        raise ValueError(f"{path}:{number}: not a record of this version: it has the field {_brief(unknown[0])}")
    try:
        return checked(Record(**line), f"{path}:{number}")
    except TypeError as error:
        raise ValueError(f"{path}:{number}: not a whole record: {str(error).split('() ')[-1]}") from None


def checked(record: Record, where: str) -> Record:
    """The record itself, if its fields are what they say: files come from anywhere, and figures rely on them."""
    for f in fields(Record):
        value, (kinds, allowed) = getattr(record, f.name), _FIELDS[f.name]
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ValueError(f"{where}: not a record: {f.name} is {_brief(value)}, not {allowed}")
        if isinstance(value, int | float) and not -_LARGEST < value < _LARGEST:
            raise ValueError(f"{where}: not a record: {f.name} is {_brief(value)}; it must be below {_LARGEST:.0e}")
    scalars = [*record.cell.values(), *record.versions.values()]
    numbers = [number for part in record.parts.values() if isinstance(part, dict) for number in part.values()]
    for value in scalars + numbers:
        real = isinstance(value, int | float) and -_LARGEST < value < _LARGEST
        if not real and not (isinstance(value, str) or value is None):
            raise ValueError(f"{where}: not a record: {_brief(value)} is neither a number below 1e+30 nor a text")
    return record


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_LARGEST = 1e30
_TEXT, _WHOLE, _NUMBER, _TABLE = (str, "a text"), (int, "a whole number"), ((int, float), "a number"), (dict, "a table")
_MAYBE = ((int, float, type(None)), "a number or null")
_FIELDS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("task", "model", "policy", "metric", "dtype", "machine", "commit", "date", "run"), _TEXT),
    **dict.fromkeys(("samples", "groups", "seed", "peak_bytes"), _WHOLE),
    **dict.fromkeys(("value", "seconds"), _NUMBER),
    **dict.fromkeys(("capacity", "low", "high"), _MAYBE),
    **dict.fromkeys(("versions", "cell", "settings", "parts"), _TABLE),
    "command": _TEXT,
}


def append_lines(path: str | Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Append JSON lines; they are on the disk when this returns. A last line that was cut off (a crash) is removed."""
    target = Path(path)
    check_regular(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
    with target.open("ab+", buffering=0) as file, _locked(file):
        text = _mend_last_line(file, path) + text
        end = file.seek(0, os.SEEK_END)
        try:
            _write(file, text)
            os.fsync(file.fileno())
        except OSError:  # a full disk: all of the lines, or none
            file.truncate(end)
            raise


def _write(file: Any, data: bytes) -> None:
    """All of it: a disk that fills up takes a part without a word."""
    while data:
        data = data[file.write(data) :]


@contextmanager
def _locked(file: Any) -> Iterator[None]:
    """Processes that append to one file take turns, where the system has locks."""
    if fcntl is None:
        yield
        return
    with suppress(OSError):  # a file system without locks
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
    yield  # closing the file unlocks it


def _mend_last_line(file: Any, path: str | Path) -> bytes:
    """A process killed in the middle of a line leaves it cut off: it is removed, and nothing else ever is.

    Returns the newline that a whole last line lacks.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(_start_of_last_line(file, size))
    last: bytes = file.read()
    if not last:
        return b""
    if _is_cut_off(last):
        file.truncate(size - len(last))
        return b""
    if not isinstance(_parse(last), dict):
        raise ValueError(f"{path} is no file of records; give another name")
    return b"\n"


def _start_of_last_line(file: Any, size: int) -> int:
    """Where the bytes after the last newline begin."""
    end: int = size
    while end > 0:
        start = max(0, end - (1 << 16))
        file.seek(start)
        place: int = file.read(end - start).rfind(b"\n")
        if place >= 0:
            return start + place + 1
        end = start
    return 0


def _is_cut_off(last: bytes) -> bool:
    """Whether a line without a newline is the beginning of one that we wrote: of an object that is not complete."""
    return b'{"'.startswith(last[:2]) and _parse(last) is None


def _parse(line: bytes) -> object:
    """The value of a line, None where it is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def read_lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and objects; a last line that was cut off is left out."""
    with Path(path).open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.endswith(b"\n") and _is_cut_off(raw):
                return
            yield number, json_object(raw, f"{path}:{number}")


def check_record_file(path: str | Path, read: Callable[[Path], Iterable[object]] = read_records) -> None:
    """Refuse a file that records cannot be added to, before anything is measured; `read` knows its lines."""
    path = Path(path)
    check_regular(path)
    try:
        deque(read(path) if path.exists() else (), maxlen=0)
    except ValueError as error:
        raise ValueError(f"{path} is no file of records ({error}); give another name") from None
    with suppress(FileNotFoundError), path.open("r+b"):  # what may not be written says so now
        pass


def json_object(raw: bytes, where: str) -> dict[str, Any]:
    """The object in one line of JSON; the error names `where` if there is none."""
    try:
        line = json.loads(raw)
    except UnicodeDecodeError:
        raise ValueError(f"{where}: not JSON: this is no UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON: {error}") from None
    if not isinstance(line, dict):
        raise ValueError(f"{where}: a JSON object was expected, not {type(line).__name__}")
    return line

"""Where texts come from: a folder laid out like the one in `layout`, or the `datasets` library by public names.

A file that is missing or malformed is named, with its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .record import json_object

LAYOUT = "pg19/*.txt, squality/*.jsonl, qasper/*.jsonl"
HUB = {
    "pg19": ("deepmind/pg19", None, "test"),
    "squality": ("tau/zero_scrolls", "squality", "validation"),
    "qasper": ("tau/zero_scrolls", "qasper", "validation"),
}


@dataclass(frozen=True)
class Book:
    name: str
    text: str


@dataclass(frozen=True)
class Question:
    """A question about a document, with all the answers that count as right."""

    document_name: str
    document: str
    question: str
    answers: list[str] = field(default_factory=list)


def books(folder: str | None) -> Iterator[Book]:
    """PG-19 test books, in the order of their names."""
    if folder is None:
        for row in _hub("pg19"):
            yield Book(str(row["url"]).rstrip("/").split("/")[-1].removesuffix(".txt"), row["text"])
        return
    for path in _files(folder, "pg19", "*.txt"):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            line = error.object[: error.start].count(b"\n") + 1
            raise ValueError(f"{path}:{line}: not UTF-8 text ({error.reason}); convert it, e.g. with iconv") from None
        if not text.strip():
            raise ValueError(f"{path} is empty; remove it or fetch it again")
        yield Book(path.stem, text)


def squality(folder: str | None) -> Iterator[Question]:
    """SQuALITY: stories, each with questions that have four reference summaries."""
    if folder is None:
        yield from (_scrolls(row) for row in _hub("squality"))
        return
    for path in _files(folder, "squality", "*.jsonl"):
        for number, line in _lines(path):
            where = f"{path}:{number}"
            name = str(_field(line, "metadata", dict, where).get("passage_id", number))
            document = _field(line, "document", str, where)
            for asked in _field(line, "questions", list, where):
                answers = [_field(one, "response_text", str, where) for one in _field(asked, "responses", list, where)]
                yield Question(name, document, _field(asked, "question_text", str, where), answers)


def qasper(folder: str | None) -> Iterator[Question]:
    """QASPER as L-Eval packs it; a question asked twice about one paper is one question with two right answers."""
    if folder is None:
        yield from _merged([_scrolls(row) for row in _hub("qasper")])
        return
    for path in _files(folder, "qasper", "*.jsonl"):
        for number, line in _lines(path):
            where = f"{path}:{number}"
            asked, said = _field(line, "instructions", list, where), _field(line, "outputs", list, where)
            if len(asked) != len(said):
                raise ValueError(f"{where}: {len(asked)} instructions but {len(said)} outputs")
            document = _field(line, "input", str, where)
            pairs = zip(asked, said, strict=True)
            yield from _merged([Question(f"{path.stem}:{number}", document, q, [a]) for q, a in pairs])


def _merged(questions: list[Question]) -> list[Question]:
    merged: dict[tuple[str, str], Question] = {}
    for one in questions:
        known = merged.setdefault((one.document, one.question.strip()), one)
        if known is not one:
            known.answers.extend(one.answers)
    return list(merged.values())


def _files(folder: str, name: str, pattern: str) -> list[Path]:
    place = Path(folder) / name
    if not place.is_dir():
        raise ValueError(f"there is no folder {place}; --data needs a folder with {LAYOUT}")
    found = sorted(place.glob(pattern))
    if not found:
        raise ValueError(f"{place} has no {pattern}; --data needs a folder with {LAYOUT}")
    return found


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                yield number, json_object(raw, f"{path}:{number}")


def _field(line: Any, name: str, kind: type, where: str) -> Any:
    if not isinstance(line, dict) or not isinstance(line.get(name), kind):
        raise ValueError(f"{where}: {name!r} is missing or is not a {kind.__name__}")
    return line[name]


def _scrolls(row: dict[str, Any]) -> Question:
    """A row of ZeroSCROLLS, whose `input` holds document and question at given places."""
    text = row["input"]
    document = text[row["document_start_index"] : row["document_end_index"]]
    query = text[row["query_start_index"] : row["query_end_index"]]
    question = re.sub(r"^\s*Question:\s*|\s*Answer:\s*$", "", query).strip()
    # the document's own heading ("Story:") is not part of it
    body = re.sub(r"^\s*(Story|Article):\s*\n", "", document)
    return Question(str(row.get("pid") or row["id"]).split("_")[0], body, question, [row["output"]])


def _hub(name: str) -> Iterator[dict[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"{name} comes from the datasets library, which is not here; pip install 'msrnn[eval]', or give --data "
            f"FOLDER with {LAYOUT}"
        ) from error
    path, config, split = HUB[name]
    try:
        yield from load_dataset(path, config, split=split, streaming=True)
    except (OSError, RuntimeError, ValueError, LookupError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"cannot fetch {path} with the datasets library: {reason}; give --data FOLDER with {LAYOUT}"
        ) from error

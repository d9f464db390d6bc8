"""Texts of the tasks: from a folder with the files of `LAYOUT`, or from the `datasets` library.

Errors name the missing or malformed file, and its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..system.extras import install
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
            for question in _field(line, "questions", list, where):
                responses = _field(question, "responses", list, where)
                answers = [_field(response, "response_text", str, where) for response in responses]
                yield Question(name, document, _field(question, "question_text", str, where), answers)


def qasper(folder: str | None) -> Iterator[Question]:
    """QASPER as L-Eval packs it; a question asked twice about one paper is one question with two right answers."""
    if folder is None:
        yield from _merge([_scrolls(row) for row in _hub("qasper")])
        return
    for path in _files(folder, "qasper", "*.jsonl"):
        for number, line in _lines(path):
            where = f"{path}:{number}"
            questions, answers = _field(line, "instructions", list, where), _field(line, "outputs", list, where)
            if len(questions) != len(answers):
                raise ValueError(f"{where}: {len(questions)} instructions but {len(answers)} outputs")
            document = _field(line, "input", str, where)
            pairs = zip(questions, answers, strict=True)
            yield from _merge([Question(f"{path.stem}:{number}", document, q, [a]) for q, a in pairs])


def _merge(questions: list[Question]) -> list[Question]:
    """Questions asked twice about one document as one, with the answers of both."""
    by_text: dict[tuple[str, str], Question] = {}
    for question in questions:
        first = by_text.setdefault((question.document, question.question.strip()), question)
        if first is not question:
            first.answers.extend(question.answers)
    return list(by_text.values())


def _files(folder: str, name: str, pattern: str) -> list[Path]:
    subfolder = Path(folder) / name
    if not subfolder.is_dir():
        raise ValueError(f"there is no folder {subfolder}; --data needs a folder with {LAYOUT}")
    files = sorted(subfolder.glob(pattern))
    if not files:
        raise ValueError(f"{subfolder} has no {pattern}; --data needs a folder with {LAYOUT}")
    return files


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
    """A row of ZeroSCROLLS, whose `input` holds document and question at the indices beside it."""
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
            f"{name} comes from the datasets library, which is not here; {install('eval')}, or give --data FOLDER "
            f"with {LAYOUT}"
        ) from error
    path, config, split = HUB[name]
    try:
        yield from load_dataset(path, config, split=split, streaming=True)
    except (OSError, RuntimeError, ValueError, LookupError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"cannot fetch {path} with the datasets library: {reason}; give --data FOLDER with {LAYOUT}"
        ) from error

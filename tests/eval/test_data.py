"""Texts from folders and from the datasets library; what is missing or malformed is named with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from msrnn.eval import data
from tests.support import tiny_eval


def test_books_come_by_name(tmp_path):
    folder = tiny_eval.texts(tmp_path / "d")
    assert [book.name for book in data.books(str(folder))] == ["0", "1", "2"]


def test_questions_have_their_answers(tmp_path):
    folder = str(tiny_eval.texts(tmp_path / "d"))
    stories = list(data.squality(folder))
    assert [(one.document_name, len(one.answers)) for one in stories] == [("7", 4), ("7", 4), ("8", 4), ("8", 4)]
    papers = list(data.qasper(folder))
    assert [(one.question, one.answers) for one in papers] == [("Why?", ["the river", "stone"]), ("Who?", ["yes"])]


@pytest.mark.parametrize(
    "name, file, content, read, said",
    [
        ("pg19", "a.txt", b"ok\nbad \xff\n", data.books, r"a.txt:2: not UTF-8"),
        ("pg19", "a.txt", b" \n", data.books, r"a.txt is empty"),
        ("squality", "dev.jsonl", b"\n{\n", data.squality, r"dev.jsonl:2: not JSON"),
        ("squality", "dev.jsonl", b"[]\n", data.squality, r"dev.jsonl:1: a JSON object"),
        ("squality", "dev.jsonl", b'{"metadata": {}, "document": 3}\n', data.squality, r"dev.jsonl:1: 'document'"),
        (
            "qasper",
            "x.jsonl",
            b'{"input": "a", "instructions": ["q"], "outputs": []}\n',
            data.qasper,
            "x.jsonl:1: 1 instr",
        ),
    ],
)
def test_a_malformed_file_is_named_with_its_line(tmp_path, name, file, content, read, said):
    (tmp_path / name).mkdir()
    (tmp_path / name / file).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        list(read(str(tmp_path)))


def test_missing_folders_and_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"there is no folder .*pg19; --data needs"):
        list(data.books(str(tmp_path)))
    (tmp_path / "pg19").mkdir()
    with pytest.raises(ValueError, match=r"pg19 has no \*.txt"):
        list(data.books(str(tmp_path)))


@pytest.fixture
def public(tmp_path, monkeypatch):
    """The datasets library reads files here as it would the public sets of the same columns."""
    pytest.importorskip("datasets", reason="the extra 'eval' is not installed")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))

    def put(name: str, rows: list[dict[str, object]]) -> None:
        place = tmp_path / f"public-{name}"
        place.mkdir()
        (place / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        monkeypatch.setitem(data.HUB, name, (str(place), None, "test"))

    return put


def test_books_by_their_public_name(public):
    public("pg19", [{"url": "http://www.gutenberg.org/ebooks/10146", "text": "Once."}])
    assert list(data.books(None)) == [data.Book("10146", "Once.")]


def test_zero_scrolls_rows_are_taken_apart(public):
    head, story, query = "You are given a story.\n\n", "Story:\nOnce there was.\n\n", "Question:\nWhat?\n\nAnswer:\n"
    ends = {"document_start_index": len(head), "document_end_index": len(head + story)}
    query_indices = {"query_start_index": len(head + story), "query_end_index": len(head + story + query)}
    public(
        "squality",
        [{"id": "7", "pid": "7_0", "input": head + story + query, "output": "That.", **ends, **query_indices}],
    )
    [one] = data.squality(None)
    assert (one.document_name, one.document.strip()) == ("7", "Once there was.")
    assert (one.question, one.answers) == ("What?", ["That."])


def test_a_public_set_that_cannot_be_fetched_is_named(public, monkeypatch):
    monkeypatch.setitem(data.HUB, "pg19", ("/nowhere/at/all", None, "test"))
    with pytest.raises(ValueError, match=r"cannot fetch /nowhere/at/all .*--data FOLDER"):
        list(data.books(None))


needs_texts = pytest.mark.skipif(not tiny_eval.SHARED.is_dir(), reason=f"no texts in {tiny_eval.SHARED}")


@needs_texts
def test_the_real_texts_are_all_there():
    folder = str(tiny_eval.SHARED)
    assert len(list(data.books(folder))) == len(list(Path(folder, "pg19").glob("*.txt"))) == 14
    stories = list(data.squality(folder))
    assert (len(stories), len({one.document_name for one in stories})) == (125, 25)
    assert all(len(one.answers) == 4 for one in stories)
    papers = list(data.qasper(folder))
    assert sum(len(one.answers) for one in papers) == 184
    assert len({one.document_name for one in papers}) == 23

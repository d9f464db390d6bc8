"""RULER and BABILong: the answer is in the text, prompts keep their length, a seed gives the same samples, scores."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from msrnn.eval import tasks
from msrnn.eval.experiment import make_experiment
from msrnn.eval.prompts import Resources
from msrnn.eval.run import run
from msrnn.eval.task import Output
from msrnn.eval.tasks import babilong, ruler
from msrnn.eval.tasks.ruler_examples import KINDS, Example, Texts, builder, common_words, frequent_words, variables
from tests.support import tiny_eval

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH = 4000  # the tokenizer of the tests has one token per byte


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Books of many words, and twelve articles whose answers stand in them."""
    folder = tiny_eval.texts(tmp_path_factory.mktemp("data") / "d")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(300)]
    for number in range(3):
        sentences = (" ".join(rng.sample(words, 8)).capitalize() + "." for _ in range(400))
        (folder / "pg19" / f"{number}.txt").write_text(" ".join(sentences))
    papers = [
        {
            "input": f"{tiny_eval.prose(60, n)} The answer is number {n} thousand. {tiny_eval.prose(60, 99 + n)}",
            "instructions": [f"What is answer {n}?", "Is it so?"],
            "outputs": [f"number {n} thousand.", "yes"],
        }
        for n in range(40)
    ]
    (folder / "qasper" / "some.jsonl").write_text("".join(json.dumps(paper) + "\n" for paper in papers))
    return str(folder)


@pytest.fixture
def resources(folder: str) -> Resources:
    return Resources(tiny_eval.model(), tiny_eval.tokenizer(), folder)


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_is_in_the_text_and_the_prompt_fits(resources: Resources, kind: str) -> None:
    task = ruler.task(ruler.Settings((kind,), (LENGTH,), 2), resources)
    for sample in task.samples():
        example = sample.content.example
        ids = task.prompt(sample, None)
        text = resources.tokenizer.decode(ids)
        assert all(answer in example.context for answer in example.answers)
        assert example.context in text
        assert text.endswith(example.question + example.answer_start)
        assert 0.8 * LENGTH < len(ids) + ruler.new_tokens(kind) <= LENGTH
        assert len(task.prompt(sample, 2000)) == 2000  # the baseline's shorter context


def test_a_seed_decides_all(resources: Resources, folder: str) -> None:
    settings = ruler.Settings(("niah_multikey_1", "vt", "cwe", "fwe", "qa"), (LENGTH,), 2)
    first = [sample.content for sample in ruler.task(settings, resources).samples()]
    again = [sample.content for sample in ruler.task(settings, resources).samples()]
    other = Resources(resources.model, resources.tokenizer, folder, seed=1)
    assert first == again
    assert all(a != b for a, b in zip(first, [s.content for s in ruler.task(settings, other).samples()], strict=True))


def test_needles_hide_as_many_keys_and_values_as_their_kind_says() -> None:
    texts = Texts(tuple(f"Sentence {n}." for n in range(50)), ("river", "stone", "lantern", "captain"))
    expected = {"niah_single_2": (1, 1, 1), "niah_multikey_1": (4, 4, 1), "niah_multivalue": (1, 4, 4)}
    expected |= {"niah_multiquery": (4, 4, 4)}
    for kind, (keys, values, asked) in expected.items():
        example = builder(kind, 4096)(texts, 20, random.Random(3))
        hidden = re.findall(r"numbers for (\S+) is: (\d{7})\.", example.context)
        assert (len({key for key, _ in hidden}), len({value for _, value in hidden})) == (keys, values)
        assert len(example.answers) == asked
        assert set(example.answers) <= {value for _, value in hidden}
        assert example.context.count("Sentence") == 20


def test_a_chain_of_variables_comes_in_order() -> None:
    example = variables(Texts((), ()), 30, random.Random(1))
    places = [example.context.index(f"VAR {name} =") for name in example.answers]
    assert places == sorted(places)
    value = re.search(r"VAR \w+ = (\d+)", example.context)[1]
    assert value in example.question
    assert example.intro.count("Question:") == 1  # the worked example
    assert not any(name in example.intro for name in example.answers)


def test_common_and_frequent_words_are_the_most_common() -> None:
    words = tuple("".join(pair) for pair in zip("abcdefghijklmnopqrstuvwxyz" * 3, "z" * 78, strict=True))
    texts = Texts((), tuple(f"{word}{n:02}" for n, word in enumerate(words)))
    example = common_words(texts, 20, random.Random(0), repeats=(6, 2))
    counts = Counter(re.findall(r"\d+\. (\w+)", example.context))
    assert {word for word, _ in counts.most_common(10)} == set(example.answers)
    assert sorted(counts.values()) == [2] * 20 + [6] * 10
    example = frequent_words(texts, 400, random.Random(0))
    counts = Counter(example.context.split())
    assert [word for word, _ in counts.most_common(4)] == ["...", *example.answers]


@pytest.mark.parametrize(
    "kind, said, match",
    [("vt", "all", 100), ("vt", "first", 20), ("vt", "none", 0), ("qa", "all", 100), ("qa", "none", 0)],
)
def test_the_share_of_right_answers_counts(resources: Resources, kind: str, said: str, match: float) -> None:
    task = ruler.task(ruler.Settings((kind,), (LENGTH,), 1), resources)
    [sample] = task.samples()
    answers = sample.content.example.answers
    text = {"all": " ".join(answers), "first": answers[0], "none": "nothing"}[said].upper()
    ids = resources.encode(text)[: ruler.new_tokens(kind)]
    own, overall = task.score(sample, Output(ids=ids, text=text))
    if kind == "vt" and said == "all":
        match = 100 * sum(name in text[:30] for name in answers) / 5  # 30 new tokens are 30 bytes here
    assert own.columns == overall.columns == {"match": pytest.approx(match), "count": 1.0}
    assert (own.cell["kind"], overall.cell["kind"]) == (kind, "all")


@pytest.mark.parametrize("name", ["ruler", "babilong"])
def test_wrong_settings_are_refused(name: str) -> None:
    settings = tasks.module(name).Settings
    for wrong, match in (({"kinds": ("x",)}, "allowed"), ({"lengths": (100,)}, "at least"), ({"samples": 0}, "1")):
        with pytest.raises(ValueError, match=match):
            settings(**wrong)


def test_texts_that_are_too_short_are_refused(tmp_path: Path) -> None:
    folder = tiny_eval.texts(tmp_path / "d", words=60)
    resources = Resources(tiny_eval.model(), tiny_eval.tokenizer(), str(folder))
    with pytest.raises(ValueError, match="sentences"):
        list(ruler.task(ruler.Settings(("niah_single_2",), (LENGTH,), 1), resources).samples())
    task = babilong.task(babilong.Settings(lengths=(LENGTH,), samples=1), resources)
    with pytest.raises(ValueError, match="too short"):
        task.prompt(next(iter(task.samples())), None)


@pytest.mark.parametrize("kind", babilong.KINDS)
def test_facts_lead_to_the_answer(kind: str) -> None:
    """The story is played back, fact by fact."""
    for seed in range(20):
        story = babilong.tell(kind, 8, random.Random(seed))
        where, holder, visited = {}, None, []
        for fact in story.facts:
            person = fact.split()[0]
            if "took" in fact:
                holder, visited = person, [where[person]]
            else:
                where[person] = fact.rstrip(".").split()[-1]
                visited += [where[person]] if person == holder else []
        if kind == "qa1":
            assert story.answer == where[story.question.rstrip("?").split()[-1]]
        elif kind == "qa2":
            assert story.answer == visited[-1]
        else:
            assert f"before the {visited[-1]}?" in story.question
            assert story.answer == visited[-2]


def test_facts_lie_in_the_book_in_order(resources: Resources) -> None:
    task = babilong.task(babilong.Settings(lengths=(LENGTH,), samples=2), resources)
    for sample in task.samples():
        ids = task.prompt(sample, None)
        text = resources.tokenizer.decode(ids).split("Now the text:")[1]
        place = 0
        for fact in sample.content.story.facts:
            place = text.index(fact, place) + len(fact)
        assert 0.95 * LENGTH < len(ids) <= LENGTH


@pytest.mark.parametrize(
    "text, accuracy",
    [(" The {}.", 100), ("{}\nkitchen garden office", 100), ("the {} or the {other}", 0), ("I do not know", 0)],
)
def test_only_the_right_place_alone_is_right(text: str, accuracy: float) -> None:
    sample = next(babilong._samples(babilong.Settings(("qa1",), (LENGTH,), 1), 0))
    answer = sample.content.story.answer
    other = next(place for place in babilong.PLACES if place != answer)
    [row] = babilong.score(sample, Output(text=text.replace("{}", answer).replace("{other}", other)))
    assert row.columns["accuracy"] == accuracy


@pytest.mark.parametrize("name", ["ruler", "babilong"])
def test_they_run_and_give_intervals(folder: str, tmp_path: Path, name: str) -> None:
    kinds = {"ruler": ["niah_single_1", "qa"], "babilong": ["qa1"]}[name]
    table = {"task": name, "data": folder, "kinds": kinds, "lengths": [2000], "samples": 2, "batch": 4}
    experiment = make_experiment(table | {"policies": ["full", "tova:64"]}, tasks.settings())
    records = run(experiment, tiny_eval.model(), tiny_eval.tokenizer(), tmp_path / "out.jsonl", quiet=True)
    assert {record.policy for record in records} == {"full", "tova:64"}
    assert {record.cell["kind"] for record in records} == {*kinds, "all"} if name == "ruler" else {"qa1"}
    assert all(record.low is not None and record.low <= record.value <= record.high for record in records)


def test_a_haystack_is_no_longer_than_its_book(resources: Resources) -> None:
    """The estimate from the first sentences, which are short, is far too large."""
    lines = tuple(["Oh."] * 4 + ["This is a sentence of about ten tokens, one hopes."] * 60)

    def build(size: int) -> Example:
        assert size <= len(lines)
        return Example("", " ".join(lines[:size]), "", "", ("",))

    length = len(ruler.compose(resources, build(50), None))
    assert ruler.largest(build, resources, length, len(lines)).context.count("about") >= 43
    with pytest.raises(ValueError, match="has 64 sentences, too few for a prompt of 4000 tokens; give longer books"):
        ruler.largest(build, resources, 4000, len(lines))

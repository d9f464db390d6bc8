"""The tasks: what their prompts are, what counts as right, and that they run."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from msrnn.eval import judge, tasks
from msrnn.eval.experiment import make_experiment
from msrnn.eval.generation import generate
from msrnn.eval.prompts import Resources
from msrnn.eval.run import run
from msrnn.eval.task import Output
from msrnn.eval.tasks import extrapolation, needle, story, turns
from tests.support import tiny_eval

pytestmark = pytest.mark.usefixtures("one_thread")
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_eval.texts(tmp_path_factory.mktemp("data") / "d", words=400))


@pytest.fixture
def resources(folder):
    return Resources(tiny_eval.model(), tiny_eval.tokenizer(), folder)


def make_task(name, resources, **settings):
    return tasks.module(name).task(tasks.module(name).Settings(**settings), resources)


def run_task(name, folder, out, policies, **settings):
    table = {"task": name, "data": folder, "policies": policies, "batch": 4} | settings
    experiment = make_experiment(table, tasks.settings())
    return run(experiment, tiny_eval.model(), tiny_eval.tokenizer(), out, quiet=True)


@pytest.mark.parametrize("name", ["squality", "qasper"])
@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_only_the_end_of_the_document_is_cut(resources, name, template):
    resources.tokenizer.chat_template = template
    whole, short = make_task(name, resources, context=4096), make_task(name, resources, context=500)
    sample = next(iter(whole.samples()))
    long, cut = (
        resources.tokenizer.decode(whole.prompt(sample, None)),
        resources.tokenizer.decode(short.prompt(sample, None)),
    )
    assert len(short.prompt(sample, None)) == 500 < len(whole.prompt(sample, None))
    assert short.prompt(sample, 450) == whole.prompt(sample, 450)  # the baseline's shorter context
    question = f"Question:\n{sample.content.question}\n\nAnswer:\n"
    tail = question + ("<assistant>" if template else "")
    assert long.endswith(tail)
    assert cut.endswith(tail)
    start = "<user>" if template else ""
    assert cut.startswith(start + sample.content.document[:50])
    assert sample.content.document in long


def test_a_context_without_room_is_refused(resources):
    task = make_task("qasper", resources, context=60)
    with pytest.raises(ValueError, match="more than 60"):
        task.prompt(next(iter(task.samples())), None)


@pytest.mark.parametrize("name, metric", [("squality", "rouge"), ("qasper", "f1")])
def test_a_right_answer_scores_100(resources, name, metric):
    if name == "squality":
        pytest.importorskip("rouge_score", reason="the extra 'eval' is not installed")
    task = make_task(name, resources)
    sample = next(iter(task.samples()))
    [row] = task.score(sample, Output(text=f" {sample.content.answers[1]}\n"))
    assert row.columns["rouge1" if metric == "rouge" else "f1"] == pytest.approx(100)


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", needle.KINDS)
def test_a_needle_lies_where_it_should(resources, kind, depth):
    task = make_task("needle", resources, kinds=(kind,), lengths=(1500,), depths=(depth,), repeats=1)
    [sample] = task.samples()
    ids = list(task.prompt(sample, None))
    text = resources.tokenizer.decode(ids)
    place = text.index(sample.content.number)
    assert len(ids) == 1500
    assert text.endswith(f"{needle.QUESTION[kind]}\n")
    room = 1500 - len(needle.INTRO)
    assert abs((place - len(needle.INTRO)) / room - depth) < 0.15
    assert len(task.prompt(sample, 700)) == 700
    assert (sample.content.number in resources.tokenizer.decode(task.prompt(sample, 700))) == (depth == 0.0)


@pytest.mark.parametrize("text, right", [("It is 12345.", 1), ("1 2 3 4 5", 1), ("12354", 0), ("", 0)])
def test_a_needle_is_found_if_the_number_is_said(text, right):
    sample = needle.Sample("", "", needle.Needle("passkey", 1000, 0.5, "12345", 0))
    [row] = needle.score(sample, Output(text=text))
    assert row.columns["recall"] == right
    assert row.cell == {"kind": "passkey", "length": 1000, "depth": 0.5}


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_facts_are_told_first_and_asked_for_last(resources, template):
    resources.tokenizer.chat_template = template
    task = make_task("turns", resources, turns=(0, 3), tokens_per_turn=40, conversations=2)
    samples = list(task.samples())
    assert [len(sample.content.pages) for sample in samples] == [0, 3, 0, 3]
    long = resources.tokenizer.decode(task.prompt(samples[1], None))
    conversation = samples[1].content
    assert (
        long.index(conversation.statement)
        < min(long.index(page) for page in conversation.pages)
        < long.index(conversation.question)
    )
    assert long.endswith(conversation.answer_start)
    assert conversation.answer in conversation.statement
    assert turns.score(samples[1], Output(text=f"It is {conversation.answer.lower()}!"))[0].columns["recall"] == 1
    assert turns.score(samples[1], Output(text=f"{conversation.answer}x"))[0].columns["recall"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, settings",
    [
        ("squality", {"context": 500, "new_tokens": 6}),
        ("qasper", {"context": 600, "new_tokens": 6}),
        ("needle", {"lengths": [400], "depths": [0.5], "repeats": 2, "new_tokens": 6}),
        ("turns", {"turns": [0, 1], "tokens_per_turn": 30, "conversations": 2, "new_tokens": 6}),
    ],
)
def test_every_task_that_writes_runs_with_every_kind_of_policy(folder, tmp_path, name, settings):
    if name == "squality":
        pytest.importorskip("rouge_score", reason="the extra 'eval' is not installed")
    records = run_task(name, folder, tmp_path / "r.jsonl", ["full", "baseline:450", "tova:32", "h2o:2000"], **settings)
    by = {(r.policy, r.metric, json.dumps(r.cell)): r for r in records}
    assert {r.policy for r in records} == {"full", "baseline:450", "tova:32", "h2o:2000"}
    for (policy, metric, cell), record in by.items():
        if policy == "h2o:2000":  # nothing ever leaves: the same as full
            assert record.value == by["full", metric, cell].value


def test_extrapolation_counts_every_token_once(resources):
    nll = torch.arange(1.0, 11.0).numpy()  # of tokens 1 to 10 of a text of 11
    rows = extrapolation.rows(nll, 5, "plain")
    assert [row.cell["position"] for row in rows] == [5, 10]
    assert [row.columns["nll"] for row in rows] == [10.0, 35.0]
    assert [row.columns["tokens"] for row in rows] == [4, 5]
    assert [row.columns["nll so far"] for row in rows] == [10.0, 45.0]


def test_extrapolation_runs_all_positions_and_full_as_far_as_it_may(folder, tmp_path):
    settings = {"length": 900, "bin": 300, "positions": ["plain", "gaps", "relative"], "full_tokens": 650}
    records = run_task("extrapolation", folder, tmp_path / "r.jsonl", ["full", "tova:64"], **settings)
    cells = {(r.policy, r.cell["positions"], r.cell["position"]) for r in records}
    assert {c for c in cells if c[0] == "full"} == {("full", "plain", 300), ("full", "plain", 600)}
    assert {c[1] for c in cells if c[0] == "tova:64"} == {"plain", "gaps", "relative"}
    assert {c[2] for c in cells if c[0] == "tova:64"} == {300, 600, 900}
    assert {r.metric for r in records} == {"perplexity", "running perplexity"}
    at = {(r.cell["positions"], r.cell["position"]): r.value for r in records if r.metric == "perplexity"}
    assert at["gaps", 900] != at["plain", 900]


def test_repetition_by_hand():
    assert story.repetition("a b c d e") == 0
    assert story.repetition("a b c d a b c d") == pytest.approx(1 - 4 / 5)
    assert story.repetition("too short") == 0


@pytest.mark.parametrize(
    "answer, meant",
    [
        ("A", "A"),
        (" b.", "B"),
        ("Story A is better", "A"),
        ("**B**", "B"),
        ("tie", "tie"),
        ("Tie: both are fine", "tie"),
        ("Both", None),
        ("A's", "A"),
        ("Because", None),
        ("", None),
    ],
)
def test_what_a_judge_says_is_understood(answer, meant):
    assert judge.verdict(answer) == meant


class Server(ThreadingHTTPServer):
    """A small OpenAI-compatible server: a model of ours answers, through a bounded state."""

    daemon_threads = True

    def __init__(self, model, tokenizer):
        super().__init__(("127.0.0.1", 0), Handler)
        self.model, self.tokenizer, self.exchanges, self.lock = model, tokenizer, [], threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            self.send_error(404)
            return
        with self.server.lock:
            question = body["messages"][-1]["content"]
            prompt = Resources(self.server.model, self.server.tokenizer).prompt("", question, "", 1 << 30)
            output = generate(self.server.model, self.server.tokenizer, [prompt], "tova:64", body["max_tokens"])[0]
            self.server.exchanges.append((question, output.text))
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": output.text}}
        reply = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
        data = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    pytest.importorskip("openai", reason="the extra 'judge' is not installed")
    judge_server = Server(tiny_eval.model(), tiny_eval.tokenizer())
    yield judge_server
    judge_server.shutdown()
    judge_server.server_close()


def test_a_pair_is_shown_twice_with_sides_swapped(server):
    verdict = judge.Judge(server.url, "tiny").compare("Write.", "mine", "yours")
    first, second = (question for question, _ in server.exchanges)
    assert first.index("mine") < first.index("yours")
    assert second.index("yours") < second.index("mine")
    answers = [judge.verdict(answer) for _, answer in server.exchanges]
    assert verdict.verdict == {("A", "B"): "wins", ("B", "A"): "losses"}.get(tuple(answers), "ties")


@pytest.mark.parametrize(
    "answers, verdict, agrees, answered",
    [
        (("A", "B"), "wins", True, 1),
        (("B", "A"), "losses", True, 1),
        (("A", "A"), "ties", False, 1),
        (("B", "tie"), "ties", False, 1),
        (("tie", "tie"), "ties", True, 1),
        ((None, "B"), "ties", False, 0.5),
        ((None, None), "ties", False, 0),  # silence is no agreement
    ],
)
def test_a_win_needs_both_sides(monkeypatch, answers, verdict, agrees, answered):
    pytest.importorskip("openai", reason="the extra 'judge' is not installed")
    replies = iter(answers)
    one = judge.Judge("http://127.0.0.1:9/v1", "none")
    monkeypatch.setattr(one, "prefers", lambda *_: next(replies))
    assert one.compare("", "", "") == (verdict, agrees, answered)


def test_a_judge_that_is_not_there_is_named():
    pytest.importorskip("openai", reason="the extra 'judge' is not installed")
    one = judge.Judge("http://127.0.0.1:9/v1", "none")
    one.client.max_retries = 0
    with pytest.raises(ValueError, match=r"the judge at http://127.0.0.1:9/v1/ does not answer"):
        one.prefers("", "", "")


def test_stories_are_measured_and_judged(server, folder, tmp_path):
    settings = {"stories": 3, "new_tokens": 12, "temperature": 1.0, "judge_url": server.url, "judge_model": "tiny"}
    records = run_task("story", folder, tmp_path / "r.jsonl", ["full", "tova:16"], **settings)
    by = {(r.policy, r.metric): r for r in records}
    wins, ties, losses = (by["tova:16", name].value for name in judge.VERDICTS)
    assert wins + ties + losses == pytest.approx(1)
    assert 0 <= by["tova:16", "agreement"].value <= by["tova:16", "answered"].value <= 1
    assert ("full", "wins") not in by
    assert len(server.exchanges) == 2 * by["tova:16", "wins"].parts.__len__()
    assert by["full", "full perplexity"].value > 1
    assert by["tova:16", "tokens"].value <= 12


def test_one_story_repeated_at_no_temperature_is_refused():
    with pytest.raises(ValueError, match="all stories would be the same"):
        story.Settings(stories=2, temperature=0.0)

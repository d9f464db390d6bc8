"""Runs: numbers against an independent loop, resumption after a real kill, batches, limits, the command line."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from msrnn.cli import main
from msrnn.eval import data, tasks
from msrnn.eval.experiment import make_experiment
from msrnn.eval.record import read_lines, read_records
from msrnn.eval.run import Prompt, batches, round_robin, run
from msrnn.eval.task import Sample
from msrnn.plan import Plan
from msrnn.policy import Policy, tova
from msrnn.system.console import progress
from tests.support import tiny_eval

pytestmark = pytest.mark.usefixtures("one_thread")
POLICIES = ["full", "baseline:16", "tova:16", "window+4:16", "h2o:100"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_eval.texts(tmp_path_factory.mktemp("data") / "d")


def experiment(folder, task="pg19", **more):
    table = {"task": task, "data": str(folder), "policies": POLICIES, "batch": 4} | more
    return make_experiment(table, tasks.settings())


def run_tiny(setup, out, **options):
    return run(setup, tiny_eval.model(), tiny_eval.tokenizer(), out, quiet=True, **options)


def test_pg19_is_what_a_plain_loop_over_books_gives(folder, tmp_path):
    """The loop shares nothing with the harness but the books: tokens, chunks and sums are its own."""
    records = {record.policy: record for record in run_tiny(experiment(folder, chunk=64), tmp_path / "r.jsonl")}
    model, encode = tiny_eval.model(), tiny_eval.tokenizer()
    nats, count = {"full": 0.0, "baseline:16": 0.0}, Counter()
    for path in sorted((folder / "pg19").glob("*.txt")):
        ids = encode(path.read_text())["input_ids"]
        for start in range(0, len(ids) - 63, 64):
            chunk = torch.tensor(ids[start : start + 64])
            for name, pieces in (("full", [chunk]), ("baseline:16", chunk.split(16))):
                for piece in pieces:
                    with torch.no_grad():
                        logits = model(piece[None]).logits[0]
                    nats[name] += float(cross_entropy(logits[:-1], piece[1:], reduction="sum"))
                    count[name] += len(piece) - 1
    for name in nats:
        assert records[name].value == pytest.approx(math.exp(nats[name] / count[name]), rel=1e-5)
        assert sum(part["tokens"] for part in records[name].parts.values()) == count[name]
    assert records["h2o:100"].value == records["full"].value  # 64 tokens never fill 100 slots
    assert records["tova:16"].value != pytest.approx(records["full"].value, rel=1e-3)
    assert {record.groups for record in records.values()} == {3}
    assert all(record.low <= record.value <= record.high for record in records.values())


@pytest.mark.parametrize(
    "policy", ["key_difference:16", Policy(16, first=2, rule="key_difference"), Plan((tova(8), tova(16)))]
)
def test_research_policies_and_plans_run_like_any_other(folder, tmp_path, policy):
    setup = replace(experiment(folder, chunk=64, limit=4), policies=("full", policy))
    full, bounded = run_tiny(setup, tmp_path / "r.jsonl")
    assert bounded.policy == str(policy)
    assert bounded.value != pytest.approx(full.value, rel=1e-3)


def test_batches_change_nothing(folder, tmp_path):
    values = []
    for size in (1, 7):
        records = run_tiny(experiment(folder, chunk=64, batch=size), tmp_path / f"{size}.jsonl")
        values.append([record.value for record in records])
    assert values[0] == pytest.approx(values[1], rel=1e-4)


def test_the_tail_is_counted_only_when_asked_for(folder, tmp_path):
    tokens = []
    for tail in (False, True):
        [record] = run_tiny(experiment(folder, chunk=64, tail=tail, policies=["full"]), tmp_path / f"{tail}.jsonl")
        tokens.append(sum(part["tokens"] for part in record.parts.values()))
    whole = sum(len(path.read_bytes()) for path in (folder / "pg19").glob("*.txt"))
    assert tokens[0] < tokens[1] < whole


def test_a_finished_run_is_not_done_again(folder, tmp_path):
    out = tmp_path / "r.jsonl"
    first = run_tiny(experiment(folder, chunk=64), out)
    log = (tmp_path / "r.samples.jsonl").read_text()
    assert run_tiny(experiment(folder, chunk=64), out) == first
    assert (tmp_path / "r.samples.jsonl").read_text() == log
    assert read_records(out) == first
    run_tiny(experiment(folder, chunk=64, policies=[*POLICIES, "tova:8"]), out)
    added = (tmp_path / "r.samples.jsonl").read_text()[len(log) :].splitlines()
    assert {json.loads(line).get("policy") for line in added} == {None, "tova:8"}


def test_other_settings_are_another_run(folder, tmp_path):
    out = tmp_path / "r.jsonl"
    one = run_tiny(experiment(folder, chunk=64, limit=2), out)
    two = run_tiny(experiment(folder, chunk=32, limit=2), out)
    assert {r.run for r in one}.isdisjoint(r.run for r in two)


def test_no_batch_begins_after_the_time(folder, tmp_path):
    assert run_tiny(experiment(folder, chunk=64), tmp_path / "r.jsonl", minutes=0) == []
    assert not (tmp_path / "r.samples.jsonl").exists()


def test_records_are_of_samples_that_all_policies_have_done(folder, tmp_path):
    out = tmp_path / "r.jsonl"
    run_tiny(experiment(folder, chunk=64, limit=3, policies=["full"]), out)
    records = run_tiny(experiment(folder, chunk=64, policies=["full", "tova:16"]), out, minutes=0)
    assert records == []
    records = run_tiny(experiment(folder, chunk=64, limit=2, policies=["full", "tova:16"]), out)
    assert {record.samples for record in records} == {2}


def test_policies_share_one_pass_over_the_data(folder, tmp_path, monkeypatch):
    """Books are opened and tokenized once, and every policy has taken a batch before the next one begins."""
    opened, books = [], data.books
    monkeypatch.setattr(data, "books", lambda place: opened.append(place) or books(place))
    run_tiny(
        experiment(folder, chunk=64, batch=2, limit=6, policies=["full", "tova:16", "h2o:16"]), tmp_path / "r.jsonl"
    )
    assert len(opened) == 1
    policies = [line["policy"] for _, line in read_lines(tmp_path / "r.samples.jsonl") if "policy" in line]
    assert policies == 3 * ["full", "full", "tova:16", "tova:16", "h2o:16", "h2o:16"]


def test_the_bar_says_what_is_done_and_how_long_the_rest_takes():
    with progress(1000, "pg19", "tok") as bar:
        bar.n, bar.start_t = 250, bar.start_t - 5
        assert re.search(r"pg19: +25%.*250/1.00k \[00:05<00:1[45], ", str(bar))


def test_a_limit_takes_from_every_group():
    samples = [Sample(f"{group}{n}", group, n) for group, count in (("a", 3), ("b", 1), ("c", 2)) for n in range(count)]
    assert [one.id for one in round_robin(samples)] == ["a0", "b0", "c0", "a1", "c1", "a2"]


def test_only_equal_lengths_go_together_unless_padding_may_mix_them():
    sample = Sample("", "", None)
    prompts = [Prompt(sample, np.zeros(size, np.int32), "") for size in (3, 4, 3, 3, 4)]
    assert [[len(p.ids) for p in batch] for batch in batches(prompts, 2, mixed=False)] == [[3, 3], [4, 4], [3]]
    assert [[len(p.ids) for p in batch] for batch in batches(prompts, 2, mixed=True)] == [[3, 4], [3, 3], [4]]


@pytest.mark.slow
def test_a_kill_loses_no_sample_and_repeats_none(folder, tmp_path):
    """A process of its own, killed with SIGKILL in the middle; then the same command again."""
    model = tiny_eval.save(tmp_path / "model")
    (tmp_path / "e.toml").write_text('task = "pg19"\nchunk = 32\npolicies = ["full", "tova:8", "window+4:8"]\n')
    texts = tiny_eval.texts(tmp_path / "long", books=4, words=150)
    command = [sys.executable, "-m", "msrnn", "eval", "e.toml", "--data", str(texts), "--model", str(model)]
    command += ["--device", "cpu", "--threads", "1", "-q", "--out"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    log = tmp_path / "killed.samples.jsonl"
    process = subprocess.Popen([*command, "killed.jsonl"], cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    while process.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") > 20):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    with log.open("ab") as file:
        file.write(b'{"run": "cut sho')  # what a kill in the middle of a write leaves
    before = [line for _, line in read_lines(log) if "policy" in line]
    assert not (tmp_path / "killed.jsonl").exists()
    subprocess.run([*command, "killed.jsonl"], cwd=tmp_path, env=environment, check=True, stdout=subprocess.DEVNULL)
    lines = [line for _, line in read_lines(log) if "policy" in line]
    assert lines[: len(before)] == before
    assert max(Counter((line["policy"], line["sample"]) for line in lines).values()) == 1
    settings = {"chunk": 32, "policies": ["full", "tova:8", "window+4:8"], "batch": 1}
    killed, whole = (
        read_records(tmp_path / "killed.jsonl"),
        run_tiny(experiment(texts, **settings), tmp_path / "whole.jsonl"),
    )
    assert [(r.policy, r.samples, r.value) for r in killed] == [
        (r.policy, r.samples, pytest.approx(r.value)) for r in whole
    ]
    assert {r.samples for r in whole} == {len(lines) // 3}


def test_the_command_prints_a_table_and_json(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tiny_eval.save(tmp_path / "model")
    (tmp_path / "e.toml").write_text('task = "pg19"\nchunk = 64\npolicies = ["full", "tova:16"]\nlimit = 3\n')
    arguments = ["eval", "e.toml", "--data", str(folder), "--model", str(model), "--device", "cpu", "-q", "--seed", "5"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "tova:16" in printed
    assert "95 % interval" in printed
    assert main([*arguments, "--json", "--policy", "window:16", "--out", "o.jsonl"]) == 0
    [record] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (record["policy"], record["seed"], record["samples"]) == ("window:16", 5, 3)
    assert len(read_records(tmp_path / "results" / "e.jsonl")) == 2


@pytest.mark.parametrize(
    "more, said",
    [
        (["none.toml"], "none.toml cannot be read"),
        (["e.toml", "--data", "nowhere"], "--data nowhere is not a folder"),
        (["e.toml", "--policy", "tovaa:3"], "unknown policy 'tovaa:3'; did you mean 'tova:3'"),
        (["e.toml", "--out", "x.csv"], "give a name that ends in .jsonl"),
        (["e.toml", "--limit", "0"], "must be at least 1"),
    ],
)
def test_the_command_refuses_in_one_line(tmp_path, capsys, monkeypatch, more, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e.toml").write_text('task = "pg19"\n')
    assert main(["eval", *more]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_batch_that_does_not_fit_is_halved(folder, tmp_path, monkeypatch):
    from msrnn.eval import run as runs

    sizes, real = [], runs.token_nll

    def small(model, ids, *rest, **named):
        sizes.append(len(ids))
        if len(ids) > 2:
            raise torch.OutOfMemoryError("too large")
        return real(model, ids, *rest, **named)

    expected = run_tiny(experiment(folder, chunk=64, policies=["tova:16"], limit=5), tmp_path / "a.jsonl")
    monkeypatch.setattr(runs, "token_nll", small)
    halved = run_tiny(experiment(folder, chunk=64, policies=["tova:16"], limit=5, batch=5), tmp_path / "b.jsonl")
    assert sizes == [5, 2, 3, 1, 2]
    assert halved[0].value == pytest.approx(expected[0].value, rel=1e-5)


@pytest.fixture(scope="module")
def bundled():
    """A few samples of the real thing."""
    import msrnn

    return msrnn.load(device="cpu", dtype="float32")


@pytest.mark.slow
def test_a_pass_key_within_the_state_is_recalled_and_one_beyond_it_is_not(bundled, tmp_path):
    table = {"task": "needle", "kinds": ["passkey"], "lengths": [256], "depths": [0.2], "repeats": 1, "new_tokens": 14}
    setup = make_experiment(table | {"policies": ["full", "window+4:64"]}, tasks.settings())
    records = run(setup, *bundled, tmp_path / "r.jsonl", quiet=True)
    assert [(record.policy, record.value) for record in records] == [("full", 1.0), ("window+4:64", 0.0)]


@pytest.mark.slow
@pytest.mark.skipif(not tiny_eval.SHARED.is_dir(), reason=f"no texts in {tiny_eval.SHARED}")
def test_a_chunk_of_a_real_book_has_the_plain_models_perplexity(bundled, tmp_path):
    [path, *_] = sorted((tiny_eval.SHARED / "pg19").glob("*.txt"))
    text = path.read_text()[:3000]
    (tmp_path / "pg19").mkdir()
    (tmp_path / "pg19" / path.name).write_text(text)
    setup = experiment(tmp_path, chunk=256, policies=["full", "tova:64"], limit=1)
    full, tova = run(setup, *bundled, tmp_path / "r.jsonl", quiet=True)
    model, tokenizer = bundled
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"][:256]])
    with torch.no_grad():
        loss = model(ids, labels=ids).loss  # transformers' own: the mean over all tokens but the first
    assert full.value == pytest.approx(math.exp(float(loss)), rel=1e-4)
    assert full.value < tova.value < 1.3 * full.value

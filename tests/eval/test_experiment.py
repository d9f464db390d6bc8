"""Experiments: what a TOML file may say, and what it is told when it may not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from msrnn.eval import tasks
from msrnn.eval.experiment import Experiment, entry, make_experiment, read_experiment
from msrnn.plan import Plan
from msrnn.policy import full, tova

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", tasks.NAMES)
def test_every_task_has_an_experiment_that_reads(name):
    experiment = read_experiment(ROOT / "experiments" / f"{name}.toml", tasks.settings())
    assert experiment.task == name
    assert experiment.entries()[0].label == "full"


def test_the_pg19_table_is_the_papers():
    experiment = read_experiment(ROOT / "experiments" / "pg19.toml", tasks.settings())
    labels = [one.label for one in experiment.entries()]
    assert len(labels) == len(set(labels)) == 1 + 10 * 7
    assert {"baseline:64", "tova+4:4096", "h2o-layer:512", "tova-head:2048"} < set(labels)
    assert experiment.settings.chunk == 4096


@pytest.mark.parametrize(
    "table, reason",
    [
        ({"task": "pg20"}, "task is 'pg20'; did you mean 'pg19'"),
        ({}, "task is None"),
        ({"task": "pg19", "chunks": 3}, "unknown key 'chunks'; did you mean 'chunk'"),
        ({"task": "pg19", "capacitys": [3]}, "unknown key 'capacitys'; did you mean 'capacities'"),
        ({"task": "pg19", "chunk": "long"}, "chunk is 'long'; a whole number"),
        ({"task": "pg19", "chunk": 1}, "chunk is 1; it must be at least 2"),
        ({"task": "pg19", "tail": 1}, "tail is 1; true or false"),
        ({"task": "pg19", "policies": "tova:3"}, "policies is 'tova:3'; a list"),
        ({"task": "pg19", "policies": ["tova"]}, "policy 'tova' has no size"),
        ({"task": "pg19", "policies": ["tovaa:3"]}, "unknown policy 'tovaa:3'"),
        ({"task": "pg19", "policies": ["baseline:x"]}, "'baseline:x': the baseline needs"),
        ({"task": "pg19", "policies": ["tova:8,profile=none.json"]}, "profile none.json cannot be read"),
        ({"task": "needle", "depths": [2.0]}, "each must lie from 0"),
        ({"task": "extrapolation", "positions": ["odd"]}, "allowed: plain, gaps, relative"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(table, reason):
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refused:
        make_experiment(table, tasks.settings(), "some.toml")
    assert reason in str(refused.value)


def test_files_that_are_none_are_named(tmp_path):
    with pytest.raises(
        ValueError, match=r"none.toml cannot be read: No such file.*; experiments/ has those of the paper"
    ):
        read_experiment(tmp_path / "none.toml", tasks.settings())
    (tmp_path / "bad.toml").write_text("task = ")
    with pytest.raises(ValueError, match=r"bad.toml is not TOML"):
        read_experiment(tmp_path / "bad.toml", tasks.settings())


def test_sizes_cross_policies_and_overrides_stay_behind_the_size():
    table = {"task": "pg19", "policies": ["tova,last=2", "window+4:9", "full"], "capacities": [4, 8]}
    labels = [one.label for one in make_experiment(table, tasks.settings()).entries()]
    assert labels == ["full", "tova:4,last=2", "tova:8,last=2", "window+4:9"]


def test_a_profile_gives_each_layer_its_capacity_and_a_digest(tmp_path):
    digests = set()
    for sizes in ([4, 12], [5, 11]):
        (tmp_path / "p.json").write_text(json.dumps({"capacities": sizes}))
        table = {"task": "pg19", "policies": [f"tova,profile={tmp_path}/p.json"], "capacities": [8]}
        one = make_experiment(table, tasks.settings()).entries()[-1]
        assert (one.label, one.capacity) == (f"tova:8,profile={tmp_path}/p.json", 8)
        assert not one.never_evicts(10)
        assert one.never_evicts(4)
        digests.add(one.capacities_digest)
    assert len(digests) == 2
    assert entry("tova:8").capacities_digest == ""


@pytest.mark.parametrize("text, length, never", [("full", 10**9, True), ("tova:8", 8, True), ("h2o:8", 9, False),
                                                 ("baseline:8", 8, True), ("baseline:8", 9, False)])  # fmt: skip
def test_when_a_policy_reads_as_the_plain_model_does(text, length, never):
    assert entry(text).never_evicts(length) is never


def test_policies_may_be_objects():
    mixed = Plan((tova(8), full()))
    experiment = Experiment("pg19", policies=(tova(8), mixed, full(), "window:8"))
    entries = {one.label: one for one in experiment.entries()}
    assert list(entries) == ["full", "tova:8", str(mixed), "window:8"]
    assert (entries["full"].policy, entries["tova:8"].policy) == (None, tova(8))
    assert (entries["tova:8"].capacity, entries[str(mixed)].capacity) == (8, None)
    assert entries[str(mixed)].never_evicts(8)
    assert not entries[str(mixed)].never_evicts(9)

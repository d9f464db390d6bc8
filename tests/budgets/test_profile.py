"""Profile files: what they may hold, which capacities they give, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from msrnn.budgets.profile import check_policy_kind, dump, open_profile, plan_for, profile_path, read_profile
from msrnn.plan import HeadPolicies
from msrnn.policy import PolicyText, fade, h2o, split_policy, tova

HEAD_CURVES = [[[[4, 1.0], [16, 0.1]], [[4, 0.2], [16, 0.0]]], [[[4, 0.3], [16, 0.0]], [[4, 0.0], [16, 0.0]]]]
CURVES = [[[4, 1.0], [16, 0.1]], [[4, 0.2], [16, 0.0]]]


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    return write(tmp_path, capacities=[12, 4], average=8, allocations={"6": [8, 4]}, curves=CURVES)


def write(folder: Path, **content: Any) -> Path:
    file = folder / "p.json"
    file.write_text(json.dumps(content))
    return file


def test_capacities_by_average(profile: Path) -> None:
    assert read_profile(profile) == read_profile(profile, 8) == [12, 4]
    assert read_profile(profile, 6) == [8, 4]
    assert sum(read_profile(profile, 10)) == 20  # from the curves
    with pytest.raises(ValueError, match="no capacities for an average of 2: 4 slots are fewer"):
        read_profile(profile, 2)


def test_a_policy_with_a_profile_is_a_plan(profile: Path) -> None:
    assert plan_for(f"tova,profile={profile}", 2).policies == (tova(12), tova(4))
    assert plan_for(f"h2o:6,profile={profile}", 2).policies == (h2o(8), h2o(4))
    assert plan_for("tova:6", 2).policies == (tova(6), tova(6))
    with pytest.raises(ValueError, match="the plan has 2 layers, the model 3"):
        plan_for(f"tova,profile={profile}", 3)


def test_capacities_by_kv_head(tmp_path: Path) -> None:
    by_head = write(tmp_path, capacities=[[12, 4], [8, 8]], average=8, allocations={"6": [[8, 6], [6, 4]]},
                    curves=HEAD_CURVES, by="head")  # fmt: skip
    assert read_profile(by_head) == read_profile(by_head, 8) == [[12, 4], [8, 8]]
    assert read_profile(by_head, 6) == [[8, 6], [6, 4]]
    between: Any = read_profile(by_head, 10)  # from the curves, over all heads
    assert [len(heads) for heads in between] == [2, 2]
    assert sum(size for heads in between for size in heads) == 40
    assert between[1][1] == 4  # it loses nothing
    plan = plan_for(f"fade:8,profile={by_head}", 2)
    assert plan.policies == (HeadPolicies((fade(12), fade(4))), HeadPolicies((fade(8), fade(8))))
    with pytest.raises(
        ValueError, match=r"and under tova they decide together; use fade, h2o or tova-head, or a profile"
    ):
        plan_for(f"tova:8,profile={by_head}", 2)


@pytest.mark.parametrize(
    "content, reason",
    [
        ({}, 'needs "capacities"'),
        ({"capacities": [[4, 8], 4]}, 'needs "capacities".* or for every layer a list of one per KV head'),
        ({"capacities": [[4, 8], []]}, 'needs "capacities"'),
        ({"capacities": [[4, 8], [4, 0]]}, 'needs "capacities"'),
        ({"capacities": [[4, 8], [4, [8]]]}, 'needs "capacities"'),
        ({"capacities": [[4, 8]], "allocations": {"8": [[4, 1.5]]}}, '"allocations" must give a list'),
        ({"capacities": [[4, 8]], "allocations": {"8": [[4]]}}, "must have the same layers and KV heads"),
        ({"capacities": [[4, 8]], "allocations": {"8": [4]}}, "must have the same layers and KV heads"),
        ({"capacities": [4, 8], "allocations": {"8": [4]}}, "must have the same layers as"),
        ({"capacities": [4, 8], "curves": HEAD_CURVES}, '"curves" must have pairs .* for the same layers as'),
        ({"capacities": [[4, 8], [4, 8]], "curves": CURVES}, '"curves" .* for the same layers and KV heads'),
        ({"capacities": [[4, 8], [4]], "curves": HEAD_CURVES}, '"curves" .* for the same layers and KV heads'),
        ({"capacities": [4], "curves": [[[4, "x"]]]}, '"curves" must have pairs'),
        ({"capacities": []}, 'needs "capacities"'),
        ({"capacities": [4, 0]}, 'needs "capacities"'),
        ({"capacities": [4, True]}, 'needs "capacities"'),
        ({"capacities": [4], "allocations": {"8": [1.5]}}, '"allocations" must give a list'),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, content: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        open_profile(write(tmp_path, **content))


def test_a_missing_profile_names_the_shipped_ones(tmp_path: Path) -> None:
    assert profile_path("SmolLM2-135M-Instruct").is_file()
    with pytest.raises(ValueError, match=r"cannot be read: .*; msrnn comes with: SmolLM2-135M-Instruct"):
        open_profile(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        open_profile(tmp_path / "bad.json")


def test_a_kind_has_no_size(profile: Path) -> None:
    check_policy_kind("tova,last=1/8")
    check_policy_kind(f"tova,profile={profile}")
    with pytest.raises(ValueError, match="names a size"):
        check_policy_kind("tova:8")


def test_a_file_has_one_line_per_list_and_reads_back() -> None:
    content = {"capacities": [12, 4], "curves": CURVES, "text": {"names": ["a" * 60, "b" * 60]}}
    text = dump(content)
    assert json.loads(text) == content
    assert ' "capacities": [12, 4],\n' in text


@pytest.mark.parametrize("text", ["tova:4,profile=a b.json", "tova:4, profile=a b.json", "tova:4 , profile = a b.json"])
def test_spaces_around_the_name_of_a_profile_do_not_matter(text: str) -> None:
    assert split_policy(text) == PolicyText("tova", "4", "a b.json")

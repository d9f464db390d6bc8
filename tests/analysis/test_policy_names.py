"""Names of policies in figures and tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from msrnn.analysis.policy_names import family, policy_capacity, short_name


@pytest.mark.parametrize(
    "policy, name",
    [
        ("tova:512", "tova"),
        ("window+4:64", "window+4"),
        ("full", "full"),
        ("tova:512,last=1", "tova, last=1"),
        ("tova:256 by layer", "tova by layer"),
        ("tova:avg=256", "tova"),
        ("tova:256,last=1/2,profile=some/where.json", "tova, last=1/2 by layer"),
        ("tova:256,last=1/2 by layer", "tova, last=1/2 by layer"),
        ("h2o-layer:64", "h2o-layer"),
        ("tova:16 + profile", "tova + profile"),
    ],
)
def test_families(policy: str, name: str) -> None:
    assert family(policy) == name


def test_short_names_do_not_spell_out_profiles() -> None:
    assert short_name("tova:512,profile=some-model") == "tova:512 by layer"
    assert short_name("tova:256,last=1/2,profile=a,b.json") == "tova:256,last=1/2 by layer"
    assert short_name("window+4:64") == "window+4:64"


def test_a_profile_by_kv_head_is_another_line_than_one_by_layer(tmp_path: Path) -> None:
    for name, capacities in (("heads", [[4, 8], [6, 6]]), ("layers", [8, 4])):
        (tmp_path / f"{name}.json").write_text(json.dumps({"capacities": capacities}))
    heads, layers = (f"fade:6,kv=k8v4,profile={tmp_path}/{name}.json" for name in ("heads", "layers"))
    assert short_name(heads) == "fade:6,kv=k8v4 by KV head"
    assert (family(heads), family(layers)) == ("fade, kv=k8v4 by KV head", "fade, kv=k8v4 by layer")
    assert policy_capacity(short_name(heads)) == 6


@pytest.mark.parametrize(
    "policy, slots",
    [
        ("tova:512", 512),
        ("tova:256,last=8", 256),
        ("tova:avg=255.5", 255.5),
        ("tova:256 by layer", 256),
        ("tova:64,profile=p128.json", 64),
        ("full", None),
        ("tova:1/8", None),
        ("tova:2GiB", None),
    ],
)
def test_the_capacity_that_a_policy_names(policy: str, slots: float | None) -> None:
    assert policy_capacity(policy) == slots

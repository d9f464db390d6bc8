"""Policies as text: what is written is what is meant, and nonsense is refused in one line with a way out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrnn.budgets import profile
from msrnn.budgets.profile import check_policy_kind, plan_for, read_profile
from msrnn.plan import Plan, per_layer
from msrnn.policy import KVS, Policy, check_size, fade, full, h2o, needs_model, parse_policy, split_policy, tova, window


@pytest.mark.parametrize(
    "text, policy",
    [
        ("full", Policy(None)),
        ("window:512", Policy(512, last=512)),
        ("window+4:512", Policy(512, first=4, last=508)),
        ("h2o:512", Policy(512, last=256, momentum=1.0, scope="kv_head")),
        ("h2o-layer:512", Policy(512, last=256, momentum=1.0, scope="layer")),
        ("tova:512", Policy(512)),
        ("tova-head:512", Policy(512, scope="kv_head")),
        ("tova-query-head:512", Policy(512, scope="query_head")),
        ("tova+4:512", Policy(512, first=4)),
        ("tova:512,last=1", Policy(512, last=1)),
        ("tova:512,momentum=0.5", Policy(512, momentum=0.5)),
        ("window:1", Policy(1, last=1)),
        ("fade:512", Policy(512, last=256, momentum=1 - 1.5 / 512, scope="kv_head")),
        ("fade-layer+4:64", Policy(64, first=4, last=32, momentum=1 - 1.5 / 64, scope="layer")),
        ("fade:512,last=64", Policy(512, last=64, momentum=1 - 1.5 / 512, scope="kv_head")),
        ("blend:512", Policy(512, last=256, momentum=1 - 1.5 / 512, scope="kv_head", residual=1 - 1.5 / 512)),
        ("tova:8,residual=0.9", Policy(8, residual=0.9)),
    ],
)
def test_text_form(text: str, policy: Policy) -> None:
    assert parse_policy(text) == policy
    assert str(policy) == text


def test_other_spellings() -> None:
    assert parse_policy(" TOVA:512 , last=1 ") == parse_policy("tova:512,last=1")
    assert parse_policy("tova-layer:8") == tova(8)
    assert parse_policy("tova:64,last=1/8") == parse_policy("tova:64,last=8")
    assert parse_policy("h2o-head:8") == h2o(8)
    assert parse_policy("tova:64,momentum=1-4/k") == parse_policy("tova:64,momentum=0.9375")
    assert parse_policy("tova:2,momentum=1-4/k") == tova(2)
    assert parse_policy("tova:64,residual=1-4/k") == parse_policy("tova:64,residual=0.9375")
    assert parse_policy("fade:8,residual=1-1.5/k") == parse_policy("Blend:8")
    assert parse_policy("fade:1") == fade(1) == Policy(1, scope="kv_head")
    assert parse_policy("window+4:8") == window(8, 4)
    assert full().blind
    assert window(8, 4).blind
    assert not tova(8).blind


@given(
    capacity=st.one_of(st.none(), st.integers(1, 10_000)),
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    momentum=st.sampled_from([0.0, 0.25, 1 - 1.5 / 512, 1.0]),
    scope=st.sampled_from(["layer", "kv_head", "query_head"]),
    residual=st.sampled_from([None, 0.0, 0.25, 1 - 1.5 / 512, 1.0]),
)
def test_parse_reads_what_str_writes(
    capacity: int | None, shares: tuple, momentum: float, scope: str, residual: float | None
) -> None:
    first = int(shares[0] * (capacity or 100))
    last = int(shares[1] * ((capacity or 100) - first))
    policy = Policy(capacity, first, last, momentum, scope, residual=residual if capacity else None)
    assert parse_policy(str(policy)) == policy


def test_capacity_as_a_fraction() -> None:
    assert parse_policy("tova:1/8", length=4096) == tova(512)
    assert parse_policy("window+4:1/8", length=4096) == window(512, 4)
    assert parse_policy("tova:1/8", length=3) == tova(1)


def test_which_sizes_depend_on_the_model() -> None:
    for text in ("tova:2KiB", "h2o:1.5kb,kv=int8", "fade:64MiB,profile=F", "best:64", "best:1/8", "BEST:2GB"):
        assert needs_model(text)  # how many slots it is: tests/hf/test_byte_budget.py
    for other in ("tova:64", "tova:1/8", "full", "tova,profile=64MiB", "tova", tova(8), ["tova:2GiB"]):
        assert not needs_model(other)


@pytest.mark.parametrize(
    "text, size",
    [
        ("full", None),
        ("tova:64", (64, "slots")),
        ("tova:1/8", (512, "slots")),
        ("best:64,profile=F", (64, "slots")),
        ("h2o:2KiB,kv=int8,profile=F", (2048, "bytes")),
        ("best:1.5kb", (1500, "bytes")),
    ],
)
def test_the_size_as_far_as_it_is_known_without_a_model(text: str, size: tuple | None) -> None:
    assert check_size(text, length=4096) == size


@pytest.mark.parametrize(
    "text, says",
    [
        ("toav:64MiB", "did you mean 'tova:64mib'"),
        ("full:64MiB", "takes no size"),
        ("tova:0B", "at least 1"),
        ("tova:64MiB,gain=x", "unknown gain"),
        ("tova:64MiB,last=3/2", "last slots are protected"),
        ("best:64MiB,last=4", "'best:64MiB,last=4': best takes kv= and profile= only"),
        ("best:64MiB,format=int8", "best takes kv= and profile= only, not format=int8"),
        ("best", "write slots (best:512)"),
        ("best:-5", "'best:-5': capacity is -5; it must be at least 1 (or 'full', which keeps every token)"),
        ("best:0B,profile=F", "'best:0B,profile=F': capacity is 0; it must be at least 1"),
        ("best:64,kv=int4", "'best:64,kv=int4': unknown kv format 'int4'; allowed: int8 (8-bit keys and values), k8v4"),
        ("best:64,kv=int8,kv=k8v4", "'best:64,kv=int8,kv=k8v4' gives kv twice, int8 and k8v4; write it once"),
        ("best:64,profile=a,profile=b", "gives two profiles, a and b; a policy takes one"),
        ("best:64,", "'best:64,': there is no setting behind a comma; add one, such as kv=int8, or leave it out"),
        ("best:64,kv=", "'best:64,kv=': kv has no value; write e.g. kv=int8"),
    ],
)
def test_what_no_model_could_run_is_refused_without_one(text: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is checked below)
        check_size(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text, says",
    [
        ("toav:512", "did you mean 'tova:512'"),
        ("512", "unknown policy '512'; did you mean 'tova:512'"),
        ("1/8", "unknown policy '1/8'; did you mean 'tova:1/8'"),
        ("2GiB", "unknown policy '2GiB'; did you mean 'tova:2gib'"),
        ("windw+4:512", "did you mean 'window+4:512'"),
        ("h20:512", "did you mean 'h2o:512'"),
        ("nonsense", "allowed: best:512"),
        ("", "allowed: best:512"),
        ("tova", "write slots (tova:512)"),
        ("tova:many", "write slots (tova:512)"),
        ("tova:0", "'tova:0': capacity is 0; it must be at least 1"),
        ("tova:-3", "'tova:-3': capacity is -3"),
        ("fade:0", "'fade:0': capacity is 0"),
        ("fade:-5", "'fade:-5': capacity is -5"),
        ("h2o:-5", "'h2o:-5': capacity is -5"),
        ("window+4:-5", "'window+4:-5': capacity is -5"),
        ("blend:0", "'blend:0': capacity is 0"),
        ("tova:0,momentum=1-4/k", "at least 1"),
        ("tova:3/2", "at most at 1"),
        ("tova:0/2", "above 0"),
        ("tova:1/8", "a length that is not known"),
        ("tova:2GiB", "no model is known"),
        ("full:512", "takes no size"),
        ("full+4", "takes no size"),
        ("window-head:4", "write window"),
        ("window+9:4", "9 first slots are protected, more than the capacity of 4"),
        ("tova:8,first=5,last=5", "5 first and 5 last slots are protected, more than the capacity of 8"),
        ("tova:8,lst=5", "did you mean 'last'"),
        ("tova:8,last=x", "not a number"),
        ("tova:8,momentum=1-x/k", "not a number"),
        ("full:momentum=1-4/k", "not a number"),
        ("tova:8,last=1/0", "not a number"),
        ("tova:8,momentum=2", "from 0 (TOVA) to 1 (H2O)"),
        ("tova:8,residual=2", "from 0 (the last that left) to 1"),
        ("tova:8,residual=x", "not a number"),
        ("tova:8,scope=kvhead", "unknown scope 'kvhead'; did you mean 'kv_head'? Allowed: layer, kv_head, query_head"),
        ("tova:8,last=-1", "0 or more"),
        ("tova:8,kv=int8,kv=k8v4", "'tova:8,kv=int8,kv=k8v4' gives kv twice, int8 and k8v4; write it once"),
        ("tova:8,momentum=1,momentum=0.5", "gives momentum twice, 1 and 0.5"),
        ("tova+4:8,first=3", "'tova+4:8,first=3' gives first twice, 4 and 3"),
        ("tova-head:8,scope=layer", "gives scope twice, head and layer"),
        ("tova:8,profile=a,profile=b", "'tova:8,profile=a,profile=b' gives two profiles, a and b"),
        ("fade:8,gain=foo", "'fade:8,gain=foo': unknown gain 'foo'; allowed: value_norm"),
        ("tova:8,kv=", "'tova:8,kv=': kv has no value; write e.g. kv=int8"),
        ("tova:8,gain=", "gain has no value; write e.g. gain=value_norm"),
        ("tova:8,scope", "scope has no value; write e.g. scope=layer"),
        ("tova:8,", "'tova:8,': there is no setting behind a comma"),
        ("tova:8,,last=1", "there is no setting behind a comma"),
        ("kv=int8", "'kv=int8' names no policy; settings go behind one, as in tova:512,kv=int8"),
        ("kv=", "'kv=' names no policy; settings go behind one"),
        ("tova:8,format=int8", "unknown setting 'format'; did you mean 'kv'? Allowed: first, last"),
        ("tova:8,budget=9", "unknown setting 'budget'; the capacity stands behind the policy's name, as in tova:512"),
        ("best-head:8", "'best-head:8': best takes no scope and no first tokens; write fade-head:8"),
        ("Best+4:8,last=1", "best takes no scope and no first tokens; write fade+4:8,last=1"),
    ],
)
def test_nonsense_is_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is checked below)
        parse_policy(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kv", ["int4", "8", "4", "fp8"])
def test_another_format_is_answered_with_the_bits_of_all(kv: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is checked below)
        parse_policy(f"tova:8,kv={kv}")
    formats = "int8 (8-bit keys and values), k8v4 (8-bit keys, 4-bit values)"
    assert str(caught.value) == f"'tova:8,kv={kv}': unknown kv format '{kv}'; allowed: {formats}"
    assert all(name in formats for name in KVS)


def test_policies_made_in_python_are_refused_by_the_same_words() -> None:
    for make, says in (
        (lambda: h2o(-5), "capacity is -5; it must be at least 1"),
        (lambda: window(-5, 4), "capacity is -5"),
        (lambda: Policy(8, kv=8), "unknown kv format 8; allowed: int8"),  # type: ignore[arg-type]
        (lambda: Policy(8, scope=None), "unknown scope None; allowed: layer"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=says):
            make()


def test_plans() -> None:
    assert str(plan_for("tova:512", 3)) == "tova:512"
    mixed = plan_for(["tova:512", tova(256), "tova:1/8"], 3, length=1024)
    assert [p.capacity for p in mixed.policies] == [512, 256, 128]
    assert not mixed.uniform
    assert str(per_layer("h2o:96", [64, 128])) == "h2o:avg=96"
    assert per_layer("h2o", [64, 128])[1] == h2o(128)
    faded = per_layer("tova,momentum=0.5,last=1/8", [64, 128])
    assert [policy.last for policy in faded.policies] == [8, 16]
    assert str(faded) == "tova:avg=96,momentum=0.5"
    assert [policy.momentum for policy in per_layer("tova,momentum=1-4/k", [64, 128]).policies] == [0.9375, 0.96875]
    assert Plan((full(), tova(3))).average is None
    with pytest.raises(ValueError, match="2 layers, the model 3"):
        plan_for(["tova:1", "tova:2"], 3)
    with pytest.raises(ValueError, match="average of 100, but the capacities by layer average 96"):
        per_layer("tova:100", [64, 128])
    with pytest.raises(ValueError, match="no capacities by layer"):
        per_layer("full", [64, 128])
    with pytest.raises(TypeError, match="not int"):
        plan_for(512, 3)  # type: ignore[arg-type]


def test_profiles(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({"capacities": [64, 128]}))
    assert read_profile(file) == [64, 128]
    for text, says in (("{", "not JSON"), ("{}", "needs"), ('{"capacities": [1, 0]}', "at least 1"), ("[]", "needs")):
        file.write_text(text)
        with pytest.raises(ValueError, match=says):
            read_profile(file)
    with pytest.raises(ValueError, match="cannot be read"):
        read_profile(tmp_path / "missing.json")


def test_a_policy_with_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    curves = [[[16, 1.0], [64, 0.1]], [[16, 0.5], [64, 0.4]]]
    about = {"capacities": [64, 128], "average": 96, "allocations": {"32": [8, 56]}, "curves": curves}
    (tmp_path / "Mine.json").write_text(json.dumps(about))
    monkeypatch.setattr(profile, "_SHIPPED", tmp_path)
    sizes = {"tova": [64, 128], "tova:96": [64, 128], "tova:32": [8, 56]}
    for text, wanted in sizes.items():
        assert [p.capacity for p in plan_for(f"{text},profile=Mine", 2).policies] == wanted
    lasts = [p.last for p in plan_for(f"tova,last=1/8,profile={tmp_path}/Mine.json", 2).policies]
    assert lasts == [8, 16]
    assert sum(p.capacity or 0 for p in plan_for("h2o:40,profile=Mine", 2).policies) == 80  # from the curves
    for text, says in (
        ("tova:8,profile=Mine", "no capacities for an average of 8: 16 slots are fewer than"),
        ("tova:96,profile=Other", "profile Other cannot be read: .*; msrnn comes with: Mine"),
        ("tova:96,profile=", "names no profile"),
        ("full,profile=Mine", "no capacities by layer"),
    ):
        with pytest.raises(ValueError, match=says):
            plan_for(text, 2)
    with pytest.raises(ValueError, match="has a profile, so it is one policy per layer"):
        parse_policy("tova:96,profile=Mine")


@pytest.mark.parametrize("text", ["tova", "h2o-layer", "tova+4,last=1/8", "window"])
def test_a_kind_has_no_size(text: str) -> None:
    check_policy_kind(text)
    with pytest.raises(ValueError, match="names a size; give the kind alone"):
        check_policy_kind(text.replace(",", ":64,") if "," in text else f"{text}:64")


@pytest.mark.parametrize(
    "text, kind, size, profile_name",
    [
        ("tova:96,last=1,profile=A,b.json", "tova,last=1", "96", "A,b.json"),
        ("tova:1/8", "tova", "1/8", None),
        ("window+4", "window+4", "", None),
        ("full:scope=kv_head", "full,scope=kv_head", "", None),
        ("./My_rule.py-head:64,last=8", "./My_rule.py-head,last=8", "64", None),
    ],
)
def test_a_text_in_parts(text: str, kind: str, size: str, profile_name: str | None) -> None:
    parts = split_policy(text)
    assert (parts.kind, parts.size, parts.profile) == (kind, size, profile_name)
    assert split_policy(str(parts)) == parts
    assert split_policy(parts.with_size(7)).size == "7"
    assert split_policy(parts.with_size(7)).kind == kind


def test_gains_and_rules_as_text() -> None:
    assert parse_policy("tova:8,gain=value_norm") == Policy(8, gain="value_norm")
    assert str(parse_policy("h2o:8,gain=value_norm")) == "h2o:8,gain=value_norm"
    assert parse_policy("key_difference-head+2:8,last=1") == Policy(8, 2, 1, scope="kv_head", rule="key_difference")
    assert str(parse_policy("./My_rule.py:8")) == "./My_rule.py:8"
    assert parse_policy("key_difference:8,momentum=1-4/k") == Policy(8, momentum=0.5, rule="key_difference")
    for text, says in (
        ("tova:8,gain=key_norm", "unknown gain 'key_norm'; did you mean 'value_norm'.*Allowed: value_norm"),
        ("key_difference:8,gain=value_norm", "a rule with a score of its own; it takes no gain"),
        ("key_diff:8", "unknown policy 'key_diff:8'.*research policies: .*key_difference"),
    ):
        with pytest.raises(ValueError, match=says):
            parse_policy(text)

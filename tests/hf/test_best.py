"""`best:256`: what it stands for on a model, that it stays within its bytes, and whose profile it takes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, Gemma2Config, LlamaConfig, PreTrainedConfig

import msrnn
from msrnn.budgets import profile as profiles
from msrnn.budgets.advise import sized
from msrnn.eval import tasks
from msrnn.eval.experiment import entry, make_experiment
from msrnn.eval.run import run
from msrnn.hf.best import resolution, resolve
from msrnn.hf.cost import cost
from msrnn.hf.geometry import geometry
from msrnn.hf.identity import profile_identity
from msrnn.plan import Plan
from msrnn.policy import is_best, parse_policy, split_policy
from msrnn.vllm import settings
from tests.support import tiny_eval
from tests.support.models import tiny_llama

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CURVES = [[[4, 1.0], [16, 0.2], [64, 0.01]], [[4, 0.1], [16, 0.02], [64, 0.0]], [[4, 0.4], [16, 0.1], [64, 0.05]]]
pytestmark = pytest.mark.usefixtures("one_thread")


def some_config(rng: random.Random) -> PreTrainedConfig:
    kv_heads, layers = rng.choice((1, 2, 3, 8)), rng.choice((1, 3, 5))
    shape = {"num_hidden_layers": layers, "num_key_value_heads": kv_heads, "head_dim": 4 * rng.randint(1, 40)}
    shape |= {"num_attention_heads": kv_heads * rng.choice((1, 2, 4)), "hidden_size": 96, "vocab_size": 8}
    return Gemma2Config(**shape, sliding_window=rng.choice((16, 100))) if rng.random() < 0.3 else LlamaConfig(**shape)


def test_its_state_is_the_largest_that_takes_no_more_bytes_than_so_many_plain_slots() -> None:
    rng = random.Random(3)
    for _ in range(150):
        config, dtype, slots = some_config(rng), rng.choice(DTYPES), rng.choice((1, 7, 64, 256, 1000))
        kv = rng.choice(("", ",kv=int8", ",kv=k8v4"))
        layers, best = geometry(config), resolution(f"best:{slots}{kv}", config, dtype=dtype)
        state, plain, larger = (
            cost(layers, Plan.of(text, len(layers)), dtype, 10_000).state
            for text in (best.policy, f"tova:{slots}", split_policy(best.policy).with_size(best.slots + 1))
        )
        assert state <= plain == best.limit_bytes
        assert larger > plain or larger == state  # the windows of all layers are the tighter bound


@pytest.mark.parametrize("dtype, slots", [(torch.float32, 35), (torch.bfloat16, 18)])
def test_a_cache_of_it_really_takes_no_more(dtype: torch.dtype, slots: int) -> None:
    """By hand: 17 slots of 128 + 8 bytes (or 64 + 8) and 16 more, against slots of 40 + 16 + 8 and 24 more."""
    model = tiny_llama().to(dtype)
    best, plain = msrnn.cache(model, "best:16"), msrnn.cache(model, "tova:16")
    with torch.no_grad():
        for cache in (best, plain):
            model(torch.arange(100)[None] % 64, past_key_values=cache)
    assert best.nbytes <= plain.nbytes
    assert (str(best.plan), best.held) == (f"fade:{slots},kv=int8", slots)


def test_sizes_may_be_fractions_and_bytes() -> None:
    model = tiny_llama(hidden_size=512)  # a head size of 128
    assert resolution("best:1/8", model) == resolution("best:32", model)
    assert resolution("best:1/8", model, length=1024) == resolution("best:128", model, length=1024)
    limit = resolution("best:32", model).limit_bytes
    assert resolution(f"best:{limit}B", model) == resolution("best:32", model)
    assert resolution("BEST:32", model).policy == resolution("best:32", model).policy
    assert resolve("tova:32", model) == "tova:32"
    assert resolve(parse_policy("tova:32"), model) == parse_policy("tova:32")


def test_values_have_4_bits_while_slots_are_few() -> None:
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=9, num_key_value_heads=3, hidden_size=576)
    best = {n: resolution(f"best:{n}", config, dtype=torch.bfloat16) for n in (64, 256, 512, 1024)}
    assert [one.kv for one in best.values()] == ["k8v4", "k8v4", "int8", "int8"]
    assert [one.slots for one in best.values()] == [141, 562, 920, 1840]
    assert resolution("best:256", config, dtype=torch.float32).kv == "int8"  # twice the bytes, so many slots
    assert resolution("best:256,kv=int8", config, dtype=torch.bfloat16).slots == 460
    odd = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, head_dim=66, hidden_size=64)
    assert resolution("best:64", odd, dtype=torch.bfloat16).kv == "int8"  # its values cannot be cut in quarters


@pytest.mark.parametrize(
    "text, says",
    [
        ("best", "write slots (best:512)"),
        ("best:0", "'best:0': capacity is 0; it must be at least 1"),
        ("best:-5", "'best:-5': capacity is -5; it must be at least 1"),
        ("best:3/2", "at most at 1"),
        ("best:10B", "bytes hold no state; this model needs at least"),
        ("best:32,last=4", "best takes kv= and profile= only, not last=4"),
        ("best:32,kv=int2", "'best:32,kv=int2': unknown kv format 'int2'; allowed: int8 (8-bit keys and values), k8v4"),
        ("best:32,kv=", "'best:32,kv=': kv has no value; write e.g. kv=int8"),
        ("best:32,", "'best:32,': there is no setting behind a comma"),
        ("best:32,kv=int8,kv=k8v4", "'best:32,kv=int8,kv=k8v4' gives kv twice, int8 and k8v4"),
        ("best:32,profile=a,profile=b", "'best:32,profile=a,profile=b' gives two profiles, a and b"),
        ("best:32,kv=k8v4", "needs values whose size is a multiple of 4, and it is 6; use kv=int8"),
        ("best-head:32", "'best-head:32': best takes no scope and no first tokens; write fade-head:32"),
        ("best+4:1/8,kv=int8", "best takes no scope and no first tokens; write fade+4:1/8,kv=int8"),
        ("best:32,profile=nowhere.json", "profile nowhere.json cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(text: str, says: str) -> None:
    model = tiny_llama(hidden_size=24)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is checked below)
        msrnn.cache(model, text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_a_model_it_is_refused() -> None:
    with pytest.raises(ValueError, match="'best:32' depends on the model; give it to"):
        parse_policy("best:32")
    assert is_best("best:32,kv=k8v4")
    assert not is_best("tova:32")


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A profile for the tiny model, as if it came with the package."""
    monkeypatch.setattr(profiles, "_SHIPPED", tmp_path)
    about = profile_identity(tiny_llama()) | {"name": "tiny"}
    content = {"average": 16, "capacities": [30, 8, 10], "model": about, "grid": [4, 16, 64], "curves": CURVES}
    (tmp_path / "tiny.json").write_text(json.dumps(content))
    return "tiny"


def test_the_profile_of_these_very_weights_is_taken_and_no_other(shipped: str) -> None:
    policy = str(resolve("best:16", tiny_llama()))
    assert policy.endswith(",kv=int8,profile=tiny")
    assert str(resolve("best:16", tiny_llama().bfloat16())).endswith("profile=tiny")  # rounded, but the same
    plan = msrnn.cache(tiny_llama(), "best:16").plan
    assert not plan.uniform
    assert plan.average == int(split_policy(policy).size)
    assert "profile" not in str(resolve("best:16", tiny_llama(seed=1)))
    assert "profile" not in str(resolve("best:16", tiny_llama(num_hidden_layers=2)))
    assert "profile" not in str(resolve("best:1", tiny_llama()))  # smaller than it was measured for


def test_a_profile_that_gives_all_the_same_is_not_named(shipped: str, tmp_path: Path) -> None:
    """The curves end at 64 slots."""
    model, whole = tiny_llama(), cost(geometry(tiny_llama()), Plan.of("fade:64,kv=int8", 3), torch.float32, 1).state
    assert not msrnn.cache(model, f"best:{whole - 100}B").plan.uniform
    assert resolve(f"best:{whole}B", model) == "fade:64,kv=int8"
    content = json.loads((tmp_path / "tiny.json").read_text())
    later = [[curve, [*curve, [100, 0.0]]] for curve in CURVES]  # one head of two gains up to 100 slots
    by_head = content | {"capacities": [[50, 10], [4, 12], [10, 10]], "curves": later, "by": "head"}
    (tmp_path / "a-by-head.json").write_text(json.dumps(by_head))
    assert resolution(f"best:{whole}B", model).profile == "a-by-head"
    assert str(resolve(f"best:{whole}B,profile=tiny", model)).endswith("profile=tiny")  # asked for by name


def test_a_profile_by_kv_head_comes_first_and_takes_no_more_bytes(shipped: str, tmp_path: Path) -> None:
    content = json.loads((tmp_path / "tiny.json").read_text())
    heads = [[curve, [[size, loss / 3] for size, loss in curve]] for curve in CURVES]
    by_head = content | {"capacities": [[50, 10], [4, 12], [10, 10]], "curves": heads, "by": "head"}
    (tmp_path / "a-by-head.json").write_text(json.dumps(by_head))
    (tmp_path / "a-before.json").write_text(json.dumps(by_head | {"for": "recall"}))
    (tmp_path / "z-by-head.json").write_text(json.dumps(by_head | {"model": content["model"] | {"layers": 9}}))
    model = tiny_llama()
    best = resolution("best:16", model)
    assert best.profile == "a-by-head"
    assert resolution("best:16,profile=a-before", model).profile == "a-before"
    caches = [msrnn.cache(model, text) for text in ("best:16", "tova:16")]
    assert caches[0].plan.by_head
    assert caches[0].plan.average == best.slots
    with torch.no_grad():
        for cache in caches:
            model(torch.arange(100)[None] % 64, past_key_values=cache)
    assert caches[0].nbytes <= caches[1].nbytes == best.limit_bytes
    assert [resolution("best:16", model, length=length).profile for length in (256, 257)] == ["a-by-head", shipped]
    assert not msrnn.cache(model, "best:16", length=257).plan.by_head  # beyond the trained context


def test_beyond_the_trained_context_an_eighth_of_the_slots_may_hold_old_tokens(shipped: str) -> None:
    model = tiny_llama()
    within, beyond = (msrnn.cache(model, "best:16", length=length).plan for length in (256, 257))
    assert [policy.last for policy in within] == [policy.capacity // 2 for policy in within]
    assert [policy.last for policy in beyond] == [policy.capacity * 7 // 8 for policy in beyond]
    assert [policy.capacity for policy in beyond] == [policy.capacity for policy in within]
    assert str(resolve("best:16,kv=k8v4", model, length=257)).startswith("fade:")
    assert ",last=7/8" in str(resolve("best:16", tiny_llama(seed=1), length=257))  # without a profile too


def test_a_configuration_finds_the_profile_by_its_files_or_else_by_its_name(shipped: str, tmp_path: Path) -> None:
    for seed, name in ((0, "other name"), (1, "tiny")):
        tiny_llama(seed=seed).save_pretrained(tmp_path / name)
    same, finetuned = (AutoConfig.from_pretrained(tmp_path / name) for name in ("other name", "tiny"))
    assert resolution("best:16", same).profile == "tiny"
    assert resolution("best:16", finetuned).profile is None
    same.name_or_path = "somewhere/tiny"  # no files here
    assert resolution("best:16", same).profile == "tiny"
    same.name_or_path = "somewhere/else"
    assert resolution("best:16", same).profile is None


def test_a_users_profile_is_taken_and_one_for_another_model_refused(shipped: str, tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    file.write_text(json.dumps({"capacities": [9, 9, 12]}))
    with pytest.raises(ValueError, match="has no curves, so its capacities do not scale"):
        msrnn.cache(tiny_llama(), f"best:16,profile={file}")
    file.write_text(json.dumps({"capacities": [9, 9, 12], "curves": CURVES}))
    assert msrnn.cache(tiny_llama(), f"best:16,profile={file}").plan.average == 35
    with pytest.raises(ValueError, match="was made for another model"):
        msrnn.cache(tiny_llama(seed=1), "best:16,profile=tiny")


def test_it_reads_generates_and_saves_as_the_policy_that_it_stands_for(tmp_path: Path) -> None:
    model, ids = tiny_llama(), [5, 9, 33, 2] * 20
    policy = str(resolve("best:8", model))
    rnn = msrnn.RNN(model, "best:8")
    logits, state = rnn.read(ids, rnn.start())
    other = msrnn.RNN(model, policy)
    expected, _ = other.read(ids, other.start())
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)
    state.save(tmp_path / "s.safetensors")
    assert other.load(tmp_path / "s.safetensors").seen == [len(ids)]  # a saved state has the resolved plan
    one, two = (msrnn.Engine(model, text, batch=1).generate([ids], max_new_tokens=6) for text in ("best:8", policy))
    assert one == two


def test_an_evaluation_names_what_was_asked_and_what_it_stands_for(tmp_path: Path) -> None:
    table = {"task": "pg19", "data": str(tiny_eval.texts(tmp_path / "d")), "chunk": 64, "batch": 4}
    setup = make_experiment(table | {"policies": ["best:16", "tova:16"]}, tasks.settings())
    assert not entry("best:16").never_evicts(10**6)  # not yet resolved
    model = tiny_eval.model()
    records = run(setup, model, tiny_eval.tokenizer(), tmp_path / "r.jsonl", quiet=True)
    best = next(record for record in records if record.policy == "best:16")
    assert best.settings["policy"] == resolve("best:16", model) == "fade:35,kv=int8"
    assert best.capacity == 35
    with pytest.raises(ValueError, match="is a fraction of a length that is not known here"):
        make_experiment(table | {"policies": ["best:1/8"]}, tasks.settings())
    assert sized("best", 16, model).average == 35


def test_an_evaluation_beyond_the_trained_context_says_how_long_its_texts_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []
    resolve_at = lambda text, model, length=None: lengths.append(length) or resolve(text, model)  # noqa: E731
    monkeypatch.setattr("msrnn.eval.run.resolve", resolve_at)
    table = {"data": str(tiny_eval.texts(tmp_path / "d")), "policies": ["best:16"]}
    for task in ({"task": "extrapolation", "length": 600, "bin": 100}, {"task": "pg19", "chunk": 64}):
        setup = make_experiment(table | task, tasks.settings())
        run(setup, tiny_eval.model(), tiny_eval.tokenizer(), tmp_path / f"{task['task']}.jsonl", quiet=True)
    assert lengths == [600, None]


def test_vllms_processes_replace_it_in_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(dtype=torch.bfloat16, max_model_len=256, revision=None, hf_config=tiny_llama().config)
    monkeypatch.setenv("MSRNN_POLICY", "best:64")
    settings.check()
    settings.resolve(model)
    assert settings.policies() == tuple(set(msrnn.cache(tiny_llama().bfloat16(), "best:64").plan.policies))
    monkeypatch.setenv("MSRNN_POLICY", "best:64,last=3")
    with pytest.raises(ValueError, match="best takes kv= and profile= only"):
        settings.check()

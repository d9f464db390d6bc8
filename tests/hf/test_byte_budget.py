"""A size in bytes bounds the whole state, on every model, under every policy, and wherever a policy is read."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, PreTrainedModel

import msrnn
from msrnn.budgets.profile import plan_for
from msrnn.cli import main
from msrnn.eval.experiment import entry
from msrnn.hf.best import resolve
from msrnn.hf.byte_budget import ByteBudget
from msrnn.hf.cost import cost
from msrnn.hf.geometry import Geometry, geometry
from msrnn.policy import split_policy
from msrnn.vllm import settings
from tests.support.models import tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
KINDS = [
    *("tova", "tova-head", "tova-query-head", "tova+4", "tova,last=1/8", "tova,last=9", "tova,momentum=1-4/k"),
    *("window", "window+4", "h2o", "h2o-layer", "h2o-query-head", "h2o+4", "fade", "fade-layer", "fade-query-head"),
    *("blend", "blend-layer", "blend-query-head+4"),
    *("key_difference", "key_norm-head", "lagged", "random", "redundancy-query-head", "window_attention"),
]
BY_HEAD = ["tova-head", "window", "h2o", "h2o+4", "fade", "blend"]  # their KV heads decide alone
GAINS = [kind for kind in KINDS if kind.startswith(("tova", "h2o", "fade"))]
MIB = 1 << 20


def some_layers(rng: random.Random) -> list[Geometry]:
    """Layers that are all alike, or differ in heads, head size and window."""

    def layer(index: int) -> Geometry:
        kv_heads, window = rng.choice((1, 2, 3, 8)), rng.choice((16, 40, 100, None))
        return Geometry(index, kv_heads * rng.choice((1, 2, 4)), kv_heads, 4 * rng.randint(1, 40), window)

    count, alike = rng.choice((1, 2, 5)), rng.choice((True, False))
    first = layer(0)
    return [first if alike else layer(index) for index in range(count)]


def some_profile(rng: random.Random, layers: list[Geometry], file: Path, *, by_head: bool) -> str:
    def curve() -> list[list[float]]:
        return [[size, rng.random() / size] for size in (8, 16, 64, 256)]

    curves: list[Any] = [[curve() for _ in range(layer.kv_heads)] if by_head else curve() for layer in layers]
    capacities = [[8] * layer.kv_heads if by_head else 8 for layer in layers]
    file.write_text(json.dumps({"capacities": capacities, "curves": curves}))
    return f",profile={file}"


def some_text(rng: random.Random, layers: list[Geometry], file: Path) -> str:
    """A policy's text with `SIZE` for its size."""
    profile = rng.choice(("none", "none", "layer", "head"))
    kind = rng.choice(BY_HEAD if profile == "head" else KINDS)
    name, *changes = [*kind.split(","), *rng.choice(([], ["kv=int8"], ["kv=k8v4"]))]
    if kind in GAINS and rng.random() < 0.3:
        changes.append("gain=value_norm")
    text = ",".join([f"{name}:SIZE", *changes])
    return text if profile == "none" else text + some_profile(rng, layers, file, by_head=profile == "head")


def test_the_state_takes_at_most_these_bytes_and_one_more_slot_would_take_more(tmp_path: Path) -> None:
    rng, refused, by_head = random.Random(5), 0, 0
    for _ in range(400):
        layers, dtype = some_layers(rng), rng.choice(DTYPES)
        text = some_text(rng, layers, tmp_path / "profile.json")

        def state(slots: int, layers: Any = layers, dtype: Any = dtype, text: str = text) -> int:
            return cost(layers, plan_for(text.replace("SIZE", str(slots)), len(layers)), dtype, 10_000).state

        limit = int(2 ** rng.uniform(8, 24))
        words = split_policy(text.replace("SIZE", f"{limit}B"))
        try:
            slots = ByteBudget(str(words), limit, layers, dtype).slots(words)
        except ValueError as error:
            least = int(str(error).split("needs at least ")[1].split()[0].replace(",", ""))
            assert least > limit
            assert state(ByteBudget("", least, layers, dtype).slots(words)) <= least
            refused += 1
            continue
        assert state(slots) <= limit, (text, layers)
        assert state(slots + 1) > limit or all(layer.window for layer in layers), (text, layers)
        by_head += plan_for(text.replace("SIZE", str(slots)), len(layers)).by_head
    assert 20 < refused < 200
    assert by_head > 40


@pytest.mark.parametrize(
    "text, slots",
    [
        ("tova:64MiB", 509),  # 32 layers of 510 x (8 x 2 x 128 x 2 bytes + a position) + 2 numbers
        ("window+4:64MiB", 509),
        ("h2o:64MiB", 499),
        ("h2o:64MiB,kv=int8", 962),
        ("h2o:64MiB,kv=k8v4,gain=value_norm", 1158),
        ("tova-query-head:64MiB", 125),  # 32 heads are stored, not 8
        ("best:64MiB", 962),
    ],
)
def test_on_an_8b_model(text: str, slots: int) -> None:
    shape = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    config = LlamaConfig(**shape)
    policy = str(resolve(text, config, dtype=torch.bfloat16))
    assert int(split_policy(policy).size) == slots
    assert 63 * MIB < cost(geometry(config), plan_for(policy, 32), torch.bfloat16, 1).state <= 64 * MIB
    if text == "tova:64MiB":
        assert 32 * (510 * (8 * 2 * 128 * 2 + 8) + 16) <= 64 * MIB < 32 * (511 * (8 * 2 * 128 * 2 + 8) + 16)


def tiny_gemma() -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "sliding_window": 40, "head_dim": 8}
    return Gemma2ForCausalLM(Gemma2Config(**shape, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2))


@pytest.mark.parametrize("model", [tiny_llama(), tiny_llama().bfloat16(), tiny_gemma().eval()])
def test_a_cache_that_is_full_takes_no_more(model: PreTrainedModel, tmp_path: Path) -> None:
    rng, layers = random.Random(7), geometry(model)
    ids, limit = torch.arange(300)[None] % 64, 30_000
    profiles = [some_profile(rng, layers, tmp_path / f"{by}.json", by_head=by == "head") for by in ("layer", "head")]
    kinds = ["tova:SIZE", "tova-query-head:SIZE,kv=int8", "h2o:SIZE,kv=k8v4,gain=value_norm", "window+4:SIZE"]
    for text in [*kinds, "best:SIZE", *(f"fade:SIZE{profile}" for profile in profiles), "lagged-head:SIZE"]:
        cache = msrnn.cache(model, text.replace("SIZE", f"{limit}B"))
        with torch.no_grad():
            model(ids, past_key_values=cache)
        assert cache.nbytes == cost(layers, cache.plan, model.dtype, 300).state
        assert 0.9 * limit < cache.nbytes <= limit, text


@pytest.mark.parametrize("text", ["tova:20000B", "h2o:16KiB,kv=int8", "tova-query-head:30kb", "fade:20kb,profile=FILE"])
def test_every_reader_of_a_policy_has_the_same_slots(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_llama().bfloat16()
    profile = some_profile(random.Random(1), geometry(model), tmp_path / "p.json", by_head=False)
    text = text.replace(",profile=FILE", profile)
    model.save_pretrained(tmp_path / "model")
    plan = msrnn.cache(model, text).plan
    assert msrnn.RNN(model, text).plan == plan
    experiment = entry(text, lambda one: resolve(one, model))
    assert experiment.capacities == tuple(part.capacity for part in (plan.parts if profile in text else plan.parts[:1]))
    assert experiment.label == text
    assert experiment.resolved == resolve(text, model)
    policy, _, file = text.partition(",profile=")
    options = ["--profile", file] if file else []
    assert main(["info", str(tmp_path / "model"), policy, *options, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["policy"] == str(plan)
    assert said["state_bytes"] == cost(geometry(model), plan, torch.bfloat16, 1).state
    monkeypatch.setenv("MSRNN_POLICY", text)
    settings.check()
    settings.resolve(
        SimpleNamespace(dtype=torch.bfloat16, max_model_len=256, revision=None, hf_config=tiny_llama().config)
    )
    assert settings.policies() == (plan.policies if profile in text else plan.policies[:1])


def test_a_second_model_in_the_same_process_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [
        SimpleNamespace(
            dtype=torch.bfloat16, max_model_len=256, revision=None, hf_config=tiny_llama(num_hidden_layers=count).config
        )
        for count in (3, 2)
    ]
    monkeypatch.delenv("MSRNN_POLICY_FOUND", raising=False)
    found = []
    for text, model in (("tova:20KiB", 0), ("tova:20KiB", 1), ("tova:40KiB", 1), ("tova:20KiB", 1), ("tova:20KiB", 0)):
        monkeypatch.setenv("MSRNN_POLICY", text)
        settings.resolve(models[model])
        found.append(settings.policies()[0].capacity)
    assert found[0] == found[4] < found[1] == found[3] < found[2]
    monkeypatch.setenv("MSRNN_POLICY", "tova:64")
    assert settings.policies()[0].capacity == 64


@pytest.mark.parametrize(
    "text, says",
    [
        (
            "tova:100B",
            "'tova:100B': 100 bytes hold no state; this model needs at least 864 bytes",
        ),  # 3 x (2 x 136 + 16)
        ("tova+4:1KiB", "'tova+4:1KiB': 1,024 bytes hold no state; this model needs at least 2,088 bytes"),
        ("best:100B", "'best:100B': 100 bytes hold no state; this model needs at least"),
        ("fade:1KiB,profile=FILE", "1,024 bytes hold no state; this model needs at least"),
        ("full:64MiB", "full keeps everything, so it takes no size; write full"),
        ("toav:64MiB", "did you mean 'tova"),
        ("tova:64MiB,kv=int3", "unknown kv format 'int3'"),
        ("tova:64MiB,last=3/2", "last slots are protected, more than the capacity"),
        ("tova:64MiB,profile=HEADS", "KV heads decide alone, and under tova they decide together; use fade"),
        ("tova:64MiB,profile=HAND", "has no curves, so its capacities do not scale to a number of bytes; write"),
        ("tova:64MiB,profile=OTHER", "the plan has 2 layers, the model 3"),
        ("tova:64MiB,profile=nowhere", "profile nowhere cannot be read"),
        (["tova:64MiB"] * 3, "is a size in bytes and no model is known here"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(text: str | list[str], says: str, tmp_path: Path) -> None:
    model = tiny_llama()
    layers, rng = geometry(model), random.Random(1)
    some_profile(rng, layers, tmp_path / "FILE", by_head=False)
    some_profile(rng, layers, tmp_path / "HEADS", by_head=True)
    some_profile(rng, layers[:2], tmp_path / "OTHER", by_head=False)
    (tmp_path / "HAND").write_text('{"capacities": [9, 9, 12]}')
    if isinstance(text, str):
        text = text.replace("profile=", f"profile={tmp_path}/") if "nowhere" not in text else text
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is checked below)
        msrnn.cache(model, text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)

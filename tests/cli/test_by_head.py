"""A profile with a capacity for every KV head, through every command that runs or describes a policy."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import msrnn
from msrnn.budgets.profile import plan_for
from msrnn.cli import demo, demo_measure, main
from msrnn.hf.cost import cost
from msrnn.hf.geometry import geometry
from msrnn.plan import per_layer
from tests.support import tiny_eval

CAPACITIES = [[5, 40], [30, 9]]  # 21 on average
TEMPLATE = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
TEXT = tiny_eval.prose(40, 1)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tiny_eval.save(tmp_path_factory.mktemp("models") / "tiny")
    tokenizer = tiny_eval.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def profile(tmp_path: Path) -> str:
    file = tmp_path / "heads.json"
    file.write_text(json.dumps({"capacities": CAPACITIES, "average": 21}))
    return str(file)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = main([*arguments])
    output = capsys.readouterr()
    assert code == 0, output.err
    return output.out


def test_info(capsys: pytest.CaptureFixture[str], model: str, profile: str, tmp_path: Path) -> None:
    facts = json.loads(run(capsys, "info", model, f"fade:21,profile={profile}", "--json"))
    assert facts["slots"] == [[6, 41], [31, 10]]
    layers = geometry(tiny_eval.model())
    assert facts["state_bytes"] == cost(layers, per_layer("fade", CAPACITIES), torch.float32, 512).state
    text = run(capsys, "info", model, f"fade:21,profile={profile}")
    assert re.search(r"\nstate .* per sequence; slots per KV head: 6 to 41, 22 on average\n", text)
    (tmp_path / "even.json").write_text(json.dumps({"capacities": [[8, 8], [8, 8]]}))
    assert "; slots per KV head: 9\n" in run(capsys, "info", model, f"fade:8,profile={tmp_path}/even.json")


def test_heads_that_decide_together_are_refused(capsys: pytest.CaptureFixture[str], model: str, profile: str) -> None:
    assert main(["info", model, f"tova:21,profile={profile}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "under tova they decide together; use fade, h2o or tova-head, or a profile by layer" in error


def test_generate(capsys: pytest.CaptureFixture[str], model: str, profile: str) -> None:
    common = ("generate", TEXT, "--model", model, "--policy", f"fade:21,profile={profile}", "--json", "-q")
    facts = [json.loads(run(capsys, *common, "--max-new-tokens", "9", "--engine", how)) for how in ("off", "on")]
    assert facts[0]["text"] == facts[1]["text"]
    for one in facts:
        assert one["policy"] == "fade:avg=21"
        assert one["capacities"] == CAPACITIES
        assert one["held"] == one["capacity"] == 40
    loaded, tokenizer = msrnn.load(model)
    ids = tokenizer(TEXT, return_tensors="pt")
    cache = msrnn.cache(loaded, per_layer("fade", CAPACITIES))
    expected = loaded.generate(**ids, past_key_values=cache, max_new_tokens=9, do_sample=False)
    assert facts[0]["text"] == tokenizer.decode(expected[0, ids.input_ids.shape[1] :], skip_special_tokens=True)
    assert facts[0]["state_bytes"] == cache.nbytes


def test_trace(capsys: pytest.CaptureFixture[str], model: str, profile: str, tmp_path: Path) -> None:
    file, page = tmp_path / "trace.safetensors", tmp_path / "run.html"
    common = ("trace", TEXT, "--model", model, "--policy", f"fade:21,profile={profile}", "-q", "-o", str(file))
    rows = json.loads(run(capsys, *common, "--json"))["layers"]
    assert [row["held_by_unit"] for row in rows] == CAPACITIES
    assert [row["held"] for row in rows] == [40, 30]
    trace = msrnn.Trace.load(file)
    table = run(capsys, *common, "--html", str(page))
    assert re.search(r"\n +0  5 to 40 .*\n +1  9 to 30 ", table)
    again = msrnn.Trace.load(file)  # written from what the page's observers saw
    assert all(torch.equal(one, other) for one, other in zip(trace.deaths, again.deaths, strict=True))
    assert '"capacities":[[5,40],[30,9]]' in page.read_text("utf-8")


def test_retention_and_plot(capsys: pytest.CaptureFixture[str], model: str, profile: str, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(TEXT)
    by_head, out = f"fade:21,profile={profile}", tmp_path / "retention.jsonl"
    options = ["--policy", "fade:21", "--policy", by_head, "--no-words", "--tokens", "200", "-q"]
    traces = ["--traces", str(tmp_path / "traces")]
    table = run(capsys, "retention", str(tmp_path / "book.txt"), "--model", model, "-o", str(out), *options, *traces)
    assert "fade:21" in table
    records = [json.loads(line) for line in out.read_text().splitlines()]
    own = {(r["metric"], r["cell"].get("layer")): r for r in records if r["policy"] == by_head}
    held = [own["any token held", layer]["value"] * 200 for layer in range(2)]
    assert held == pytest.approx([22.5, 19.5])
    assert own["any token held", None]["capacity"] == 21
    assert own["agreement with fade:21", None]["value"] < 1
    assert 0 < own["agreement of heads", 0]["value"] < 5 / 40 + 1e-6  # what 5 slots can share with 40
    run(capsys, "plot", str(out), str(tmp_path / "traces"), "-o", str(tmp_path / "figures"), "--figure", "map")
    assert len(list((tmp_path / "figures").glob("*.png"))) == 2


def test_eval(capsys: pytest.CaptureFixture[str], model: str, profile: str, tmp_path: Path) -> None:
    data = tiny_eval.texts(tmp_path / "data", books=2, words=40)
    (tmp_path / "pg19.toml").write_text(f'task = "pg19"\nchunk = 96\npolicies = ["fade:21,profile={profile}"]\n')
    out = tmp_path / "out.jsonl"
    run(capsys, "eval", str(tmp_path / "pg19.toml"), "--data", str(data), "--model", model, "--out", str(out), "-q")
    (record,) = (json.loads(line) for line in out.read_text().splitlines())
    assert (record["policy"], record["capacity"]) == (f"fade:21,profile={profile}", 21)
    ids = tiny_eval.tokenizer()((data / "pg19" / "0.txt").read_text(), return_tensors="pt").input_ids[0, : 2 * 96]
    loaded, _ = msrnn.load(model)
    assert record["parts"]["0"]["nll"] == pytest.approx(loss(loaded, ids.view(2, 96)), rel=1e-5)


@torch.no_grad()
def loss(model: PreTrainedModel, ids: torch.Tensor) -> float:
    """Nats over all tokens but the first of each row."""
    logits = model(ids, past_key_values=msrnn.cache(model, per_layer("fade", CAPACITIES))).logits
    return float(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))


def test_a_chat_goes_on_from_its_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str, profile: str, tmp_path: Path
) -> None:
    def chat(text: str) -> list[str]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode()), "utf-8"))
        options = ("--model", model, "--policy", f"fade:21,profile={profile}", "--max-new-tokens", "6", "-q")
        return run(capsys, "chat", *options).splitlines()

    state = tmp_path / "state"
    _, saved, *rest = chat(f"{TEXT}\n/save {state}\nWho?\n/state\n")
    loaded, *again = chat(f"/load {state}\nWho?\n/state\n")
    assert saved.startswith("saved ")
    assert loaded.startswith("loaded ")
    assert again == rest
    assert rest[-1].startswith("fade:avg=21: ")
    assert " 40 held in " in rest[-1]
    Path(profile).write_text(json.dumps({"capacities": [[40, 5], [30, 9]]}))
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"/load {state}\n".encode()), "utf-8"))
        main(["chat", "--model", model, "--policy", f"fade:21,profile={profile}", "-q"])
    assert "fade:5|fade:40" in capsys.readouterr().err


def test_advise(capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path) -> None:
    curve = [[4, 2.0], [64, 0.1]]
    steep = [[4, 6.0], [64, 0.1]]
    curves = [[curve, steep], [steep, curve]]
    file, book = tmp_path / "curves.json", tmp_path / "book.txt"
    file.write_text(json.dumps({"capacities": CAPACITIES, "average": 21, "curves": curves}))
    book.write_text(TEXT * 3)
    command = ("advise", model, "--text", str(book), "--within", "20%", "--length", "96", "--chunks", "3", "-q")
    kind = f"fade,profile={file}"
    (row,) = json.loads(run(capsys, *command, "--policy", kind, "--memory", "1GiB", "--json"))["policies"]
    assert 16 <= row["capacity"] < 96
    plan = plan_for(f"fade:{row['capacity']},profile={file}", 2)
    assert len(set(plan.capacities[0])) == 2
    assert row["state_bytes"] == cost(geometry(tiny_eval.model()), plan, torch.float32, 96).state


def test_demo(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str, profile: str, tmp_path: Path
) -> None:
    monkeypatch.setattr(demo_measure, "ANSWER", 8)
    (tmp_path / "own.txt").write_text(TEXT)
    policies = ["--policy", "fade:21", "--policy", f"fade:21,profile={profile}", "--out", str(tmp_path / "a.png")]
    assert demo.main(["--model", model, "--text", str(tmp_path / "own.txt"), "--length", "150", *policies]) == 0
    output = capsys.readouterr().out
    assert "fade:21            keeps 21 tokens in every layer: " in output
    assert "fade:21 + profile  keeps 5 to 40 tokens in a KV head, 21 on average: " in output
    row = next(line.split() for line in output.splitlines() if line.startswith("fade:21 + profile   "))
    assert row[3:5] == ["150", "21"]

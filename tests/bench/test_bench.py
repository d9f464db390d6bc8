"""`msrnn bench` on a tiny shape: records, the table, and the gate that stands before every speed."""

from __future__ import annotations

import json
import math

import pytest
import torch

from msrnn import cli
from msrnn.bench import decode, gate, measure, prefill, run, shapes

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


@pytest.fixture
def quick_gate(monkeypatch):
    monkeypatch.setattr(gate, "POLICIES", ("tova:16",))
    monkeypatch.setattr(gate.check, "__defaults__", (("tova:16",),))


def bench(*arguments: str) -> int:
    return cli.main(["bench", "--device", "cpu", "--shape", "tiny", "--runs", "1", *arguments])


@pytest.mark.slow
def test_the_table_and_its_records(tmp_path, capsys, quick_gate):
    file = tmp_path / "records" / "bench.jsonl"
    parts = ["--parts", "table", "same", "prefill", "generate"]
    assert (
        bench(*parts, "--policy", "tova:8", "--batch", "2", "--length", "40", "--context", "32", "-o", str(file)) == 0
    )
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(r["part"], r["policy"]) for r in records] == [
        ("table", "full"), ("table", "tova:8"), ("same", "full"), ("same", "tova:8"), ("prefill", "full"),
        ("prefill", "tova:8"), ("generate", "full"),
    ]  # fmt: skip
    for record in records:
        assert record["shape"] == "tiny"
        assert record["weights"] == "random"
        assert {"torch", "transformers", "python"} <= set(record["versions"])
        assert record["median_s"] > 0
        assert record["tokens_per_s"] > 0
    bounded, full = (next(r for r in records if (r["part"], r["policy"]) == ("same", p)) for p in ("tova:8", "full"))
    assert math.isclose(bounded["times_full"], bounded["tokens_per_s"] / full["tokens_per_s"])
    assert bounded["state_bytes"] < full["state_bytes"]
    assert records[0]["batch"] < records[1]["batch"]  # more of the smaller fit
    out = capsys.readouterr().out
    assert "tokens/s" in out
    assert out.count("tova:8") == 3


@pytest.mark.slow
def test_json(capsys, quick_gate):
    assert bench("--parts", "same", "--policy", "tova:8", "--batch", "1", "--json", "-q") == 0
    output = capsys.readouterr()
    assert [r["policy"] for r in json.loads(output.out)["records"]][-1] == "tova:8"
    assert output.err == ""


def test_no_speed_where_a_kernel_is_wrong(monkeypatch, capsys):
    right = gate.step

    def wrong(*arguments: object) -> torch.Tensor:
        return right(*arguments) * 1.01

    monkeypatch.setattr(gate, "step", wrong)
    with pytest.raises(gate.GateFailed, match=r"a step of tova:16 is off by"):
        gate.check(CPU, ("tova:16",))


def test_a_wrong_eviction_does_not_pass(monkeypatch):
    right = gate.step

    def wrong(slots, *rest):
        output = right(slots, *rest)
        if slots.seen.max() == 39:  # the last step, so that no output differs
            slots.positions[0, 0, slots.positions[0, 0].argmax()] = 0
        return output

    monkeypatch.setattr(gate, "step", wrong)
    with pytest.raises(gate.GateFailed, match="inf"):
        gate.check(CPU, ("tova:16",))


@pytest.mark.slow
def test_every_policy_passes_the_gate_here():
    assert gate.check(CPU) == 1 + 5 * len(gate.POLICIES) - 2


def test_a_batch_that_does_not_fit_is_made_smaller(monkeypatch):
    model, tried = shapes.make("tiny", torch.float32, "cpu"), []
    whole = decode.step

    def small_machine(model, policy, batch, context, **more):
        tried.append(batch)
        if batch > 20:
            raise torch.OutOfMemoryError("no")
        return whole(model, policy, batch, context, **more)

    monkeypatch.setattr(decode, "step", small_machine)
    monkeypatch.setattr(decode, "estimate", lambda *_: 24)
    found = decode.largest(model, "tova:8", 32, runs=1)
    assert found["batch"] == 20
    assert found["tried"] == tried == [24, 23, 22, 21, 20]
    monkeypatch.setattr(decode, "estimate", lambda *_: 2)
    monkeypatch.setattr(decode, "step", lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError("no")))
    assert decode.largest(model, "tova:8", 32) is None


def test_the_floor_is_what_must_be_read():
    model = shapes.make("tiny", torch.float32, "cpu")
    found = decode.step(model, "tova:8", 3, 32, runs=1, bytes_per_second=1.0)
    weights = sum(p.numel() for p in model.parameters()) - 128 * 64
    kept = 3 * 2 * 9 * 2 * 2 * 16  # rows, layers, slots, keys and values, stored heads, head size
    assert found["floor_s"] == 4 * (weights + kept)
    assert found["times_floor"] == found["median_s"] / found["floor_s"]


@pytest.mark.parametrize("policy", ["h2o:8", "tova:8,gain=value_norm"])
def test_states_are_full_when_a_step_is_timed(policy):
    engine = decode.Engine(shapes.make("tiny", torch.float32, "cpu"), policy, batch=2)
    decode.fill(engine, 40)
    for _ in range(3):
        engine.step()
    assert engine.cache.seen.tolist() == [42, 42]
    for layer in engine.cache.static:
        assert (layer.slots.positions >= 0).sum(-1).eq(8).all()


def test_queries_can_be_made_steady():
    model = shapes.make("tiny", torch.float32, "cpu", attention_bias=True)
    shapes.steady(model)
    bias = model.model.layers[0].self_attn.q_proj.bias.view(4, 2, 8)
    assert bias[:, :, :5].eq(0).all()
    assert bias[:, :, 5:].abs().mean() > 1


@pytest.mark.slow
def test_the_baseline_can_be_compiled(monkeypatch):
    whole, seen = torch.compile, []
    monkeypatch.setattr(torch, "compile", lambda *a, **more: seen.append(a) or whole(*a, **more | {"backend": "eager"}))
    model = shapes.make("tiny", torch.float32, "cpu")
    found = prefill.full(model, 1, 24, runs=1, backend="any", compiled=True)
    assert found["compiled"]
    assert len(seen) == 2  # a layer each
    prefill.full(model, 1, 24, runs=1, backend="any")
    assert len(seen) == 2


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--shape", "llama-9"], "unknown shape 'llama-9'; allowed: tiny, llama-2-7b"),
        (["--policy", "tovo:8"], "did you mean 'tova:8'"),
        (["--shape", "./nowhere"], "there is no file or folder"),
        (["--batch", "0"], "too small"),
        (["--length", "64", "--most", "10"], "every prompt has more than 10 tokens"),
    ],
)
def test_refusals(capsys, quick_gate, arguments, says):
    assert cli.main(["bench", "--device", "cpu", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_bandwidth_and_times():
    assert measure.bandwidth(CPU) > 1e8
    assert len(measure.seconds(lambda: None, CPU, runs=3, least=0.001)) == 3
    full = prefill.fastest_full(shapes.make("tiny", torch.float32, "cpu"), 1, 16, runs=1)
    assert full["policy"] == "full"
    assert (
        run.count(("table", "same", "prefill", "generate"), run.Settings(("a", "b"), 8, (1, 2), ((4, 1), (4, 2)), 4))
        == 3 + 6 + 6 + 2
    )


@pytest.mark.parametrize(
    "typed, said",
    [
        (["/some/bin/msrnn", "bench", "--shape", "tiny"], "msrnn bench --shape tiny"),
        (["/some/src/msrnn/__main__.py", "bench"], "msrnn bench"),
        (["benchmarks/h200.py", "gate"], "python benchmarks/h200.py gate"),
    ],
)
def test_a_record_says_what_was_typed(monkeypatch, typed, said):
    monkeypatch.setattr("sys.argv", typed)
    assert measure.conditions(CPU)["command"] == said

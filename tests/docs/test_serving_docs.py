"""docs/serving.md says what is true: what a request takes is what `msrnn info` and `msrnn serve` say."""

import argparse
import importlib
import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from msrnn.cli import main
from tests.docs import pages
from tests.docs.records import close, load, numbers, served
from tests.support.serving import run, started  # noqa: F401 - a fixture

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "serving.md").read_text()
WORDS = " ".join(GUIDE.split())
COMMIT = "a83a95a"  # the newest at which both engines ran
ROWS = re.findall(r"^\| (`tova:\d+`|full cache, [\d,]+ tokens) \| ([^|]+) \| ([\d,]+) \|$", GUIDE, re.MULTILINE)
LLAMA = {  # of Llama-3.1-8B, all that counts
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "dtype": "bfloat16",
}


@pytest.fixture
def llama(tmp_path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


def human(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count < 2**30 else f"{count / 2**30:.1f} GiB"


def test_the_table_is_what_info_says(llama, capsys):
    assert len(ROWS) == 7
    for name, size, fit in ROWS:
        bounded = name.startswith("`")
        policy, length = (name.strip("`"), "8192") if bounded else ("tova:512", re.sub(r"\D", "", name))
        assert main(["info", llama, policy, "--memory", "80GiB", "--length", length, "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert human(said["state_bytes" if bounded else "full_bytes"]) == size, name
        assert f"{said['batch' if bounded else 'full_batch']:,}" == fit, name
        assert human(said["weight_bytes"]) == "15.0 GiB"


def test_the_first_example_says_what_serve_says(llama, started, capsys):  # noqa: F811
    run(llama, "--policy", "tova:1024", "--max-model-len", "131072", "--prefix-pool", "0")
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("msrnn: ")]
    assert len(said) == 3
    for line in said:
        assert line in GUIDE


@pytest.mark.parametrize("policy", ["tova:512", "h2o:512", "window+4:512"])
def test_info_and_serve_agree(llama, started, capsys, policy):  # noqa: F811
    """Blocks are padded a little: not by a thousandth."""
    from msrnn.budgets.profile import plan_for
    from msrnn.hf.geometry import geometry
    from msrnn.hf.load import config
    from msrnn.vllm.cost import price

    assert main(["info", llama, policy, "--json"]) == 0
    info = json.loads(capsys.readouterr().out)["state_bytes"]
    read = config(llama)
    layers = geometry(read)
    state, _ = price(layers, plan_for(policy, len(layers)), read.dtype, 1)
    assert info < state < info * 1.001


@pytest.mark.parametrize("name, number", [("vllm_gpu", 0), ("part/vllm_gpu_llama2", 2)])
def test_loads_on_a_gpu_are_what_was_measured(name: str, number: int) -> None:
    """Every load that both engines ran: stock's figure, ours and their ratio, of the commit that the row is of."""
    measured = served(name)
    _, *rows = pages.tables("docs/serving.md", "On a GPU")[number]
    labels = [re.fullmatch(r"(.+?)(?: \((\w{7})\))?(?:, side by side)?", row[0]) for row in rows]
    assert {label[1] for label in labels} == set(measured)
    for label, (_, *cells, _) in zip(labels, rows, strict=True):
        one = measured[label[1]]
        assert (label[2] or usual_commit(number, label[1])) == one.commit, label[1]
        for cell, value in zip(cells, (one.stock, one.ours, one.ratio), strict=True):
            assert close(numbers(cell)[0], value), (label[1], cell, value)


def usual_commit(number: int, load: str) -> str:
    """What the text says of rows that name no commit."""
    text = " ".join(GUIDE.split())
    if number == 0:
        assert f"the newest at which both engines ran the load: {COMMIT}, if the row names no other" in text
        return COMMIT
    assert "One prompt and the start are of commit 430b5f1" in text
    assert "the other rows of 9d5ab57" in text
    return "430b5f1" if load.startswith(("first tokens, 1 x", "start")) else "9d5ab57"


def gpu_records(kind: str, engine: str = "msrnn", **more: object) -> list[dict[str, Any]]:
    """Of one engine at the newest commit, Llama-3-8B shape."""
    wanted = {"kind": kind, "engine": engine, "commit": COMMIT} | more
    return [one for one in load("vllm_gpu") if wanted.items() <= one.items()]


def start_of(engine: str) -> dict[str, Any]:
    (record,) = gpu_records("vllm start", engine)
    return record


def test_in_short() -> None:
    """The paragraph before the table, from the records; what fits into stock's memory, by its bytes."""
    measured = served("vllm_gpu")
    said = WORDS.split("**In short:")[1].split(" Real vLLM 0.32.0")[0]

    def ratio(name: str) -> float:
        return measured[name].ratio

    steps = [ratio(f"decode step, 96 requests, context {context}") for context in ("1,024", "4,096")]
    text = f"takes {steps[0]:.2f} times stock's time after 1,024 tokens and {steps[1]:.2f} times after 4,096"
    assert f"a decode step of 96 requests {text}" in said
    token = 2 * 2 * 32 * 8 * 128  # keys and values in 16 bits, layers, KV heads and their size
    share = {count: count * 3072 * token / start_of("stock")["kv_bytes"] for count in (256, 384)}
    assert share[384] > 1
    text = f"With 256 requests of 3,072 tokens, prompt and output together, which fill {100 * share[256]:.0f} %"
    text += f" of stock's KV memory, throughput is {ratio('256 x (1,024 + 2,048)'):.2f} times stock's"
    text += f"; with 384, which do not fit into it, {ratio('384 x (2,048 + 1,024), trained attention'):.2f} times"
    assert text in said
    for count, preempted in ((256, 0), (384, 85)):
        loads = [one for one in load("vllm_gpu") if one["kind"] == "vllm load" and one["requests"] == count]
        assert {one["preemptions"] for one in loads if one["engine"] == "stock"} == {preempted}
    ours = [one for one in load("vllm_gpu") if one["kind"] == "vllm load" and one["engine"] == "msrnn"]
    assert {one["preemptions"] for one in ours} == {0}
    assert "Triton compiled nothing during the loads of a83a95a" in WORDS
    assert not any(one["triton_compiled"] for one in ours if one["commit"] == COMMIT)
    trained = {size: ratio(f"first tokens, {size}, trained attention") for size in ("96 x 4,096", "1 x 4,096")}
    text = f"at once take {trained['96 x 4,096']:.2f} times as long as with stock"
    text += f", one alone {trained['1 x 4,096']:.1f} times"
    text += f"; one of 65,536 tokens takes {ratio('first tokens, 1 x 65,536, trained attention'):.2f} times as long"
    assert f"Many prompts of 4,096 tokens {text}" in said


def test_conditions_of_the_loads() -> None:
    """What the text names, and what the table for LLaMA-2-7B has otherwise."""
    measured = [one for one in load("vllm_gpu") if one["commit"] in (COMMIT, "430b5f1", "917c831")]
    (common,) = {(one["max_num_seqs"], one["max_model_len"], one["budget"]) for one in measured}
    text = "but for {:,} sequences, {:,} tokens a sequence (`--max-model-len`), {:,} tokens a batch".format(*common)
    assert text in WORDS
    other = {(one["commit"], one["max_model_len"]) for one in load("part/vllm_gpu_llama2")}
    assert other == {("430b5f1", 8192), ("9d5ab57", 66000)}
    text = "6 GiB for keys and values of each engine and 8,192 tokens a sequence at most, the other rows of 9d5ab57"
    assert text in WORDS
    assert "28 for states and 66,000 tokens a sequence" in WORDS


def test_blocks_beside_stocks_memory() -> None:
    """Not what vLLM gave divided by the size of a block, which is always the number of blocks."""
    ours, stock = start_of("msrnn"), start_of("stock")
    fit = stock["kv_bytes"] // ours["request_bytes"]
    text = f"States had {ours['kv_bytes'] / 2**30:.1f} GiB, which are {ours['blocks']:,} blocks. "
    text += f"Stock's cache had {stock['kv_bytes'] / 2**30:.1f} GiB, in which {fit:,} blocks would fit"
    assert f"{text}, so ours had {100 * (1 - ours['blocks'] / fit):.1f} % fewer" in WORDS


def profiled(steps: str) -> tuple[dict[str, Any], dict[str, float]]:
    """The profile of a kind of step with 384 requests, and its milliseconds by row of the table.

    Products of the model have 16-bit results (`tst`), those of the attention float32 ones (`tss`).
    """
    (record,) = gpu_records("vllm kernels", steps=steps, load="serve-384x2048+1024")
    of = {"matrix products of the model": "_tst_", "scan of the evictions": "scan"}

    def total(*names: str) -> float:
        return sum(kernel["ms"] for kernel in record["kernels"] if any(name in kernel["name"] for name in names))

    parts = {row: total(name) for row, name in of.items()}
    parts["attention to slots, in decode"] = total("attend", "finish")
    parts["logits, weighted sums, copies and the rest"] = record["kernels_ms"] - sum(parts.values())
    return record, parts | {"whole step, with the profiler": record["step_ms"]}


def test_kernels_of_384_requests() -> None:
    _, *rows = pages.tables("docs/serving.md", "On a GPU")[1]
    for column, steps in ((1, "read prompts"), (2, "all write")):
        _, parts = profiled(steps)
        for row in rows:
            assert close(row[column] or "0", parts[row[0]]), (row, parts[row[0]])
    assert len(rows) == 5


def test_how_much_faster_a_reading_step_would_have_to_be() -> None:
    """Seconds until all have their first token and after it, medians; what is left for twice stock's throughput, and
    what stock's speed of reading would give."""
    runs, (stock,) = (gpu_records("vllm load", engine, requests=384) for engine in ("msrnn", "stock"))
    whole = median(one["seconds"] for one in runs)
    reading = median(one["first_token_s"]["last"] for one in runs)
    steps, aim = 384 * 2048 / 8192, stock["seconds"] / 2
    text = f"The load takes {whole:.1f} s: {reading:.1f} until all have their first token, "
    text += f"{1e3 * reading / steps:.0f} ms for each of {steps:.0f} steps of 8,192 tokens, "
    text += f"and {whole - reading:.1f} after that."
    assert f"{text} For 2 times stock's throughput it may take {aim:.1f}." in WORDS
    record, parts = profiled("all write")
    kept = parts["matrix products of the model"] + parts["attention to slots, in decode"]
    assert f"products and slots are {kept:.1f} of {record['kernels_ms']:.1f} ms of kernels" in WORDS
    theirs = stock["first_token_s"]["last"]
    text = (
        f"prompts would have to be read in {aim - (whole - reading):.1f} s, and stock itself needs {theirs:.1f} until"
    )
    assert f"{text} all have their first token." in WORDS
    best = theirs + whole - reading
    text = f"the load would take {best:.1f} s, {stock['seconds'] / best:.2f} times stock's throughput"
    assert f"At stock's speed of reading {text}" in WORDS


def test_near_decisions_of_steady_flat_and_a_trained_model() -> None:
    """The first 8,192 tokens, 4,096 in each record."""
    rows = [one for one in load("near_decisions") if one["to"] <= 8192]

    def shares(attention: str, **more: object) -> list[float]:
        wanted = {"attention": attention} | more
        return [100 * one["near"] for one in rows if wanted.items() <= one.items()]

    flat, steady = shares("flat", rope_theta=None), shares("steady", rope_theta=500000.0)
    assert len(flat) == len(steady) == 2
    assert f"{min(flat):.0f} to {max(flat):.0f} % are near with *flat* attention (without RoPE)" in WORDS
    assert f"weaker biases and {min(steady):.0f} to {max(steady):.0f} % near decisions (Llama-3's RoPE)" in WORDS
    layers = [shares("SmolLM2-135M-Instruct", layer=number) for number in range(30)]
    first, others = layers[0], [max(both) for both in layers[1:]]
    means = [sum(both[part] for both in layers) / 30 for part in (0, 1)]
    like = shares("trained", rope_theta=500000.0)
    assert f"row to row, with which {min(like):.0f} to {max(like):.0f} % are near" in WORDS
    text = f"it is {min(first):.0f} to {max(first):.0f} % in the first layer, at most {max(others):.0f} % in each of"
    assert f"{text} the other 29, and {means[0]:.0f} to {means[1]:.0f} % on average" in WORDS


def test_what_missed_its_aim_on_a_gpu() -> None:
    """The number that the text gives; throughput has to be above its aim, a time below."""
    _, *rows = pages.tables("docs/serving.md", "On a GPU")[0]
    judged = [(row[0], float(row[3]), float(row[4]), "tok/s" in row[1]) for row in rows if row[4]]
    missed = [load for load, ratio, aim, more in judged if (ratio < aim if more else ratio > aim)]
    assert len(judged) == 14
    assert {load[:9] for load in missed} == {"384 x (2,"}
    assert "\nOne load misses its aim: *384 requests*." in GUIDE


def test_starts() -> None:
    """The pair of the row, ours alone on another machine, and the earlier pairs, of which ours was always the first."""
    ours = start_of("msrnn")
    own = sum(seconds for part, seconds in ours["parts"].items() if part.startswith("warm-up"))
    assert start_of("stock")["date"] < ours["date"]
    assert f"Compiling our kernels and capturing the graphs of reads took {own:.1f} s of it" in WORDS
    (alone,) = [one for one in load("part/vllm_gpu_again") if one["kind"] == "vllm start" and one["commit"] == COMMIT]
    assert f"As the first engine of another machine ours took {alone['start_s']:.1f} s" in WORDS
    starts = [one for one in load("vllm_gpu") if one["kind"] == "vllm start" and one["commit"] != COMMIT]
    pairs = {(one["commit"], one["engine"]): one for one in starts}
    both = [(pairs[commit, "msrnn"], pairs[commit, "stock"]) for commit in {one["commit"] for one in starts}]
    assert all(first["date"] < second["date"] for first, second in both)
    ratios = [first["start_s"] / second["start_s"] for first, second in both]
    assert f"{min(ratios):.2f} to {max(ratios):.2f} times as long as stock after it" in WORDS


@pytest.mark.parametrize(
    "commit, number, sooner", [("a7a25c7", 0, "37 times sooner"), ("430b5f1", 1, "6.1 times sooner")]
)
def test_prefix_reuse_is_what_was_measured(commit: str, number: int, sooner: str) -> None:
    """From the single times: medians, without first requests that started from a state too."""
    (record,) = [one for one in load("vllm") if one.get("what") == "prefix reuse" and one["commit"] == commit]
    runs = record["runs_s"]
    hits = record["tokens_reused"] // record["shared"] - 2 * (record["rounds"] + 1)  # two of each round, warm-up too
    assert hits == number
    first = sorted(runs["first"])[hits:]
    times = [median(first), median(runs["again"]), median(runs["without_pool"])]
    _, *rows = pages.tables("docs/serving.md", "Automatic prefix reuse")[1 + number]
    for (_, cell), value in zip(rows, times, strict=True):
        assert close(numbers(cell)[0], value), cell
    text = " ".join(GUIDE.split())
    assert sooner in text
    assert close(sooner.split()[0], times[0] / times[1])
    if record["shape"]:
        assert f"medians of {len(first)}, {len(runs['again'])} and {len(runs['without_pool'])} requests" in text
        assert f"{times[2] / times[1]:.1f} times sooner than without a pool" in text
        assert f"The pool cost {100 * (times[0] / times[2] - 1):.0f} % where a long prompt is alone" in text
        pool, none = (median(record["many_s"][name]) for name in ("pool", "without_pool"))
        assert f"and {100 * (pool / none - 1):.0f} % where 24 prompts" in text
        assert f"({pool:.2f} s instead of {none:.2f})" in text
    assert record["equal"] == (record["shape"] is None)


def test_rounds_of_the_prefix_reuse_benchmark_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up, round -1, once had the text of round 1, whose first request then started from its state."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    prompts = importlib.import_module("vllm_reuse").prompts
    for shape in ("llama-3-8b", None):
        options = argparse.Namespace(shape=shape, tail=8)
        rounds = [prompts(options, length, turn) for length in (64, 128) for turn in range(-1, 5)]
        assert len({tuple(prompt[:64]) for texts in rounds for prompt in texts}) == len(rounds)
        assert len({tuple(prompt) for texts in rounds for prompt in texts}) == 3 * len(rounds)

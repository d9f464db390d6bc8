"""docs/serving.md says what is true: what a request takes is what `msrnn info` and `msrnn serve` say."""

import argparse
import importlib
import json
import re
from pathlib import Path
from statistics import median

import pytest

from msrnn.cli import main
from tests.docs import pages
from tests.docs.records import close, load, numbers, served
from tests.support.serving import run, started  # noqa: F401 - a fixture

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "serving.md").read_text()
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


@pytest.mark.parametrize("name, number", [("vllm_gpu", 0), ("part/vllm_gpu_llama2", 1)])
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
        assert "the newest at which both engines ran the load: 430b5f1, if the row names no other" in text
        return "430b5f1"
    assert "One prompt and the start are of commit 430b5f1" in text
    assert "the other rows of 9d5ab57" in text
    return "430b5f1" if load.startswith(("first tokens, 1 x", "start")) else "9d5ab57"


def test_what_missed_its_aim_on_a_gpu() -> None:
    """The number that the text gives; throughput has to be above its aim, a time below."""
    _, *rows = pages.tables("docs/serving.md", "On a GPU")[0]
    judged = [(row[3], row[4], "tok/s" in row[1]) for row in rows if row[4]]
    missed = sum(float(ratio) < float(aim) if more else float(ratio) > float(aim) for ratio, aim, more in judged)
    assert missed == 4
    assert "\nFour figures miss their aim:\n" in GUIDE


def test_all_starts_on_record_are_told() -> None:
    """Ratios of both engines' starts by commit, and what we add to ours."""
    text = " ".join(GUIDE.split())
    added = []
    for name in ("vllm_gpu", "part/vllm_gpu_llama2"):
        starts = [one for one in load(name) if one["kind"] == "vllm start"]
        pairs = {(one["commit"], one["engine"]): one for one in starts}
        for commit in {one["commit"] for one in starts}:
            stock, ours = pairs[commit, "stock"], pairs[commit, "msrnn"]
            assert f"{ours['start_s'] / stock['start_s']:.2f} ({commit})" in text
            assert name != "vllm_gpu" or ours["date"] < stock["date"], "ours was first"
            own = [
                seconds for part, seconds in ours.get("parts", {}).items() if part.startswith(("rehearsal", "warm-up"))
            ]
            added += [(sum(own), ours["start_s"] - stock["start_s"])] if own else []
    assert (len(added), round(min(own for own, _ in added)), round(max(own for own, _ in added))) == (5, 7, 10)
    assert "takes 7 to 10 s by vLLM's log" in text
    assert sorted(round(difference) for _, difference in added) == [7, 10, 11, 34, 45]


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
        options = argparse.Namespace(shape=shape, shared=64, tail=8)
        rounds = [prompts(options, turn) for turn in range(-1, 5)]
        assert len({tuple(prompt[:64]) for texts in rounds for prompt in texts}) == len(rounds)
        assert len({tuple(prompt) for texts in rounds for prompt in texts}) == 3 * len(rounds)

"""docs/serving.md says what is true: what a request takes is what `msrnn info` and `msrnn serve` say."""

import json
import re
from pathlib import Path

import pytest

from msrnn.analysis.records import read_results
from msrnn.analysis.serving_gpu import LOADS, ratios
from msrnn.cli import main
from tests.docs import pages
from tests.docs.records import close, load, numbers
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
def test_loads_on_a_gpu_are_what_was_measured(name, number):
    """Every load that both engines ran: stock's figure, ours and their ratio."""
    measured = ratios(read_results([ROOT / "results" / f"{name}.jsonl"]), LOADS)
    _, *rows = pages.tables("docs/serving.md", "On a GPU")[number]
    loads = [row[0].removesuffix(" (o)").removesuffix(", side by side") for row in rows]
    assert set(loads) == set(measured)
    for label, (_, *cells, _) in zip(loads, rows, strict=True):
        stock, ours = measured[label]
        for cell, value in zip(cells, (stock, ours, ours / stock), strict=True):
            assert close(numbers(cell)[0], value), (label, cell, value)


def test_what_an_earlier_commit_measured_is_marked():
    records = [one for one in load("vllm_gpu") if one["kind"] in ("vllm load", "vllm start")]
    newest = max(records, key=lambda one: one["date"])["commit"]
    commits: dict[tuple[str, str], dict[str, str]] = {}
    for one in records:  # later ones replace earlier ones
        commits.setdefault((one.get("load", "start"), one.get("attention", "")), {})[one["engine"]] = one["commit"]
    (_, *rows), *_ = pages.tables("docs/serving.md", "On a GPU")
    marked = sum("(o)" in row[0] for row in rows)
    assert marked == sum(set(engines.values()) != {newest} for engines in commits.values())

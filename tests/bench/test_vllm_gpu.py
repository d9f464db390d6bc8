"""Helpers of benchmarks/vllm_gpu.py, as far as they need neither vLLM nor a GPU."""

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch):
    """A module of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


def options(**changes: object) -> argparse.Namespace:
    usual = {"small": False, "policy": "tova:512", "max_model_len": 66000, "kv_gib": None, "loads": None}
    usual |= {"attention": None, "max_num_seqs": 512, "rounds": 3, "long_rounds": 1, "once": []}
    return argparse.Namespace(**usual | changes)


@pytest.mark.parametrize(
    "changes, fits", [({}, (118 * 2**30 - 16_061_177_856) // 67_371_776), ({"kv_gib": 6.0}, 6 * 2**30 // 67_371_776)]
)
def test_as_many_requests_as_info_says(benchmark, changes, fits):
    """From memory known before the start: not from what vLLM gave."""
    engine = benchmark("vllm_gpu_engine")
    asked = options(**changes)
    info = engine.info_of(engine.model_folder("llama-3-8b"), asked)
    assert info["state_bytes"] == 67_371_776
    assert engine.fitting(info, asked, 118 * 2**31, 0.5) == fits


def test_without_a_gpu_nothing_is_predicted(benchmark):
    assert benchmark("vllm_gpu_engine").fitting({"state_bytes": 1, "weight_bytes": 0}, options(), None, 0.9) is None


def test_what_triton_compiles_is_counted_by_name(benchmark, monkeypatch):
    """vLLM's own hook is called as before."""
    warned = []
    runtime = SimpleNamespace(jit_post_compile_hook=lambda **about: warned.append(about["key"]))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=SimpleNamespace(runtime=runtime)))
    compiled = benchmark("vllm_gpu_compiled").Compilations()
    assert compiled.take() == {}
    for key, name in enumerate(("scan", "scan", "attend")):
        runtime.jit_post_compile_hook(key=key, fn=SimpleNamespace(name=name))
    assert compiled.take() == {"scan": 2, "attend": 1}
    assert compiled.take() == {}
    assert warned == [0, 1, 2]


def test_triton_calls_the_hook_by_that_name():
    """What is watched exists in the version that is installed here."""
    knobs = pytest.importorskip("triton.knobs")
    assert hasattr(knobs.runtime, "jit_post_compile_hook")


def test_without_triton_nothing_is_known(benchmark, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert benchmark("vllm_gpu_compiled").Compilations().take() is None


@pytest.mark.parametrize("changes, there", [({}, False), ({"max_num_seqs": 1024}, True)])
def test_loads_run_all_their_requests_at_once(benchmark, changes, there):
    module = benchmark("vllm_gpu")
    names = [load.name for load in module.chosen(options(**changes))]
    assert ("serve-1024x512+256" in names) == there
    assert "serve-384x2048+1024" in names
    (named,) = module.chosen(options(loads=["serve-1024x512+256"]))
    assert (named.requests, named.prompt, named.new) == (1024, 512, 256)


def test_a_load_that_is_not_there_is_named(benchmark):
    with pytest.raises(SystemExit, match="no such load; there are first-96x4096"):
        benchmark("vllm_gpu").chosen(options(loads=["first-1x1"]))


def row(engine: str, seconds: float, **more: object) -> dict[str, object]:
    """A record of one load that both engines ran."""
    common = {"kind": "vllm load", "engine": engine, "commit": "aaaaaaa", "shape": "llama-3-8b", "small": False}
    common |= {"max_num_seqs": 512, "max_model_len": 66000, "budget": 8192, "utilization": None, "graphs": None}
    common |= {"policy": "tova:512" if engine == "msrnn" else "full", "threshold": 512 if engine == "msrnn" else 0}
    common |= {"load": "one-4096", "attention": "steady", "seconds": seconds, "new_tokens_per_s": 1.0}
    return common | {"step_ms": None, "complete": True, "preemptions": 0.0, "target": ""} | more


def summary_of(benchmark, capsys, tmp_path, *rows) -> list[str]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    benchmark("vllm_gpu_summary").summary(path)
    return [line for line in capsys.readouterr().out.splitlines() if line]


def test_a_median_is_of_one_commit(benchmark, capsys, tmp_path):
    rows = [row("stock", 1.0), row("msrnn", 2.0), row("msrnn", 9.0, commit="bbbbbbb")]
    said = summary_of(benchmark, capsys, tmp_path, *rows)
    assert [line[:7] for line in said if "sequences" in line] == ["aaaaaaa", "bbbbbbb"]
    (ratio,) = (line for line in said if "time" in line)
    assert "time 2.00" in ratio
    assert "9.000" not in ratio


def test_a_median_is_of_one_setting_of_ours(benchmark, capsys, tmp_path):
    """Another threshold is another measurement; stock's is the same. A field of older records says nothing."""
    rows = [row("stock", 1.0), row("msrnn", 2.0), row("msrnn", 3.0, threshold=256), row("stock", 1.0, groups=0)]
    rows.append(row("msrnn", 2.0, groups=1))
    said = summary_of(benchmark, capsys, tmp_path, *rows)
    assert sum("threshold 256" in line for line in said) == 1
    assert [line.split("time ")[1].split(",")[0] for line in said if "time " in line] == ["2.00", "3.00"]


def test_the_summary_says_what_was_compiled(benchmark, capsys, tmp_path):
    rows = [row("msrnn", 2.0, triton_compiled={}), row("msrnn", 2.0, triton_compiled={"scan": 2}, load="other")]
    rows.append(row("msrnn", 0.0, kind="vllm first requests", triton_compiled={"move": 1}))
    del rows[-1]["load"]
    said = summary_of(benchmark, capsys, tmp_path, *rows)
    assert [line for line in said if "compiled" in line] == [
        "    msrnn, other steady: Triton compiled scan 2",
        "    msrnn, first requests steady: Triton compiled move 1",
    ]


def test_the_summary_compares_blocks_with_what_was_known_before(benchmark, capsys, tmp_path):
    start = {"kind": "vllm start", "start_s": 1.0, "kv_bytes": 90 * 2**20}
    ours = row("msrnn", 0.0, **start, blocks=90, request_bytes=2**20, info_blocks=110)
    stock = row("stock", 0.0, **start | {"kv_bytes": 100 * 2**20}, blocks=50)
    said = summary_of(benchmark, capsys, tmp_path, stock, ours)
    assert said[-1].endswith("0.1 GiB for 90 blocks, 110 by `msrnn info --memory`, 100 in stock's memory")

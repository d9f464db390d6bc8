"""Bounded states on several nodes of Ray, on this one machine: `python benchmarks/vllm_ray.py`, in .venv-vllm with ray.

Two nodes share the layers (pp), three the heads (tp), each a node of its own for Ray, started before there is a policy:
what its workers know of it, vLLM has brought them. The tokens are compared with those of one process. With `stray`, one
of two nodes has an empty policy of its own, and the start must end. vLLM's CPU build
does not go with Ray by itself ("current platform cpu does not support ray"), because it does not say what a worker
takes of a node; by vLLM's own seam for platforms, this script says so: a worker takes what Ray counts as a GPU.
Records go to results/vllm.jsonl.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from conditions import conditions, write

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "vllm.jsonl"
POLICY, NEW = "tova:64", 12
TRACED = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}
SPREAD: dict[str, tuple[int, dict[str, Any]]] = {
    "pp": (2, {"pipeline_parallel_size": 2, **TRACED}),
    "tp": (3, {"tensor_parallel_size": 3}),
    "stray": (2, {"pipeline_parallel_size": 2, **TRACED}),
}
PLATFORM = {
    "cpu_with_ray.py": "from vllm.platforms.cpu import CpuPlatform\n\n\n"
    'class CpuWithRay(CpuPlatform):\n    ray_device_key = "GPU"\n',
    "cpu_with_ray_name.py": 'def platform():\n    return "cpu_with_ray.CpuWithRay"\n',
    "cpu_with_ray-0.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: cpu-with-ray\nVersion: 0.1\n",
    "cpu_with_ray-0.1.dist-info/entry_points.txt": "[vllm.platform_plugins]\nx = cpu_with_ray_name:platform\n",
}


def main() -> int:
    from ray import __version__ as ray_version

    from msrnn.vllm.plugin import vllm_version

    wanted = sys.argv[1:] or list(SPREAD)
    alone = json.loads(_apart("one")[0])["tokens"] if {"pp", "tp"} & {*wanted} else []
    failed = 0
    for name in wanted:
        about = conditions(what=f"ray {name}", run="vllm_ray", policy=POLICY, vllm=vllm_version(), ray=ray_version)
        started = time.time()
        row, right = _stray() if name == "stray" else _compared(name, alone)
        row |= {"seconds": round(time.time() - started)}
        write(RESULTS, [about | row])
        print(name, row, "" if right else "WRONG", flush=True)
        failed |= not right
    return failed


def _compared(name: str, alone: list[list[int]]) -> tuple[dict[str, Any], bool]:
    result = json.loads(_apart(name)[0])
    equal = sum(ours == theirs for ours, theirs in zip(result.pop("tokens"), alone, strict=True))
    return result | {"equal_answers": equal}, equal == len(alone) and result["nodes"] == SPREAD[name][0]


def _stray() -> tuple[dict[str, Any], bool]:
    said, error = _apart("stray")
    return {"nodes": 2, "ended_with": error}, not said and "Workers disagree" in error


def _apart(name: str) -> tuple[str, str]:
    """An engine in a process of its own: its result, and the last line of its errors."""
    with tempfile.TemporaryDirectory(prefix="msrnn-ray-") as folder:
        for path, text in PLATFORM.items():
            (Path(folder) / path).parent.mkdir(exist_ok=True)
            (Path(folder) / path).write_text(text)
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, __file__, "--engine", name]
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    said = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    errors = [line for line in done.stderr.splitlines() if re.match(r"\w*Error:", line)]
    if not said and name != "stray":
        raise SystemExit(f"{name}: the engine ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return "".join(said), "".join(errors[-1:])


def engine(name: str) -> None:
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", VLLM_USE_RAY_V2_EXECUTOR_BACKEND="1")
    nodes, options = SPREAD.get(name, (1, {}))
    if name in SPREAD:
        _start_nodes(nodes, {"MSRNN_POLICY": ""} if name == "stray" else {})
        options = options | {"distributed_executor_backend": "ray"}
    os.environ["MSRNN_POLICY"] = POLICY
    from vllm import LLM, SamplingParams
    from vllm_long import _texts

    from msrnn.hf.load import bundled

    common = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 128 << 20, "enforce_eager": True}
    llm = LLM(str(bundled()), **(common | options))
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": ids} for ids in _texts(6, 200)], sampling, use_tqdm=False)
    result = {
        "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
        "options": {key: value for key, value in options.items() if key != "compilation_config"},
        "nodes": _nodes_in_use() if name in SPREAD else 1,
        "blocks": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks,
    }
    print("RESULT " + json.dumps(result), flush=True)


def _start_nodes(count: int, environment: dict[str, str]) -> None:
    """So many, with an environment for all but the first, where this process is."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 1, "include_dashboard": False})
    for _ in range(count - 1):
        cluster.add_node(num_cpus=1, num_gpus=1, env_vars=environment)
    ray.init(address=cluster.address, log_to_driver=False)


def _nodes_in_use() -> int:
    """Nodes of Ray whose share is all taken, by a worker."""
    import ray
    from ray._private.state import available_resources_per_node

    return sum(not left.get("GPU") for left in available_resources_per_node().values() if ray.is_initialized())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        engine(sys.argv[2])
    else:
        sys.exit(main())

"""The longer proofs of msrnn inside vLLM, on a CPU: `python benchmarks/vllm_long.py [part ...]`, in .venv-vllm.

Parts: tp (3 processes share the heads), pp (2 share the layers), many (200 requests at once over HTTP at a memory
where stock vLLM preempts), killed (a worker dies in the middle). Each prints one line and the script ends with 1 if any
failed. Small model, float32, greedy: equal means token for token.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
NEW = 16
POLICY = "tova:64"


def main() -> int:
    parts = {"tp": tensor_parallel, "pp": pipeline_parallel, "many": many, "killed": killed}
    failed = 0
    for name in sys.argv[1:] or parts:
        started = time.time()
        try:
            said = parts[name]()
        except Exception as error:  # the other parts are to run all the same
            said, failed = f"FAILED: {type(error).__name__}: {error}", 1
        print(f"{name}: {said} ({time.time() - started:.0f} s)", flush=True)
    return failed


def tensor_parallel() -> str:
    return _same_as_one(POLICY, "--tensor-parallel-size", "3", bind="0|1|0")


def pipeline_parallel() -> str:
    """Compiled: on a CPU and without a graph, vLLM 0.32 skips the warm-up that its own pipeline stages need."""
    return _same_as_one(POLICY, "--pipeline-parallel-size", "2", bind="0|1", graph=True)


def _same_as_one(policy: str, *options: str, bind: str, graph: bool = False) -> str:
    texts = _texts(4, 200)
    memory = ("--kv-cache-memory-bytes", str(128 << 20))
    with server(policy, *memory) as (url, _):
        alone = asyncio.run(_answers(url, texts, at_once=1))
    spread = {"VLLM_CPU_OMP_THREADS_BIND": bind}
    with server(policy, *memory, *options, environment=spread, graph=graph) as (url, _):
        together = asyncio.run(_answers(url, texts, at_once=4))
    assert together == alone, f"{together} != {alone}"
    return f"{' '.join(options)}: {len(texts)} answers equal those of one process"


def many(count: int = 200, memory: int = 192 << 20) -> str:
    """Stock vLLM preempts at this memory; with states nobody is, nobody is lost, and every answer is as if alone."""
    texts = _texts(count, 280)
    with server(None, "--kv-cache-memory-bytes", str(memory)) as (url, _):
        asyncio.run(_answers(url, texts[:60], at_once=60))
        preempted = _metric(url, "vllm:num_preemptions_total")
    assert preempted > 0, "stock vLLM did not preempt; take less memory"
    with server(POLICY, "--kv-cache-memory-bytes", str(memory)) as (url, _):
        together = asyncio.run(_answers(url, texts, at_once=count))
        assert _metric(url, "vllm:num_preemptions_total") == 0, "a bounded request was preempted"
        held = _metric(url, "msrnn_request_tokens_held_max")
        assert held <= 64, f"a request held {held} tokens"
        sample = range(0, count, 10)
        alone = asyncio.run(_answers(url, [texts[number] for number in sample], at_once=1))
    assert all(len(answer) == NEW for answer in together), "answers were cut short"
    different = [number for number, answer in zip(sample, alone, strict=True) if together[number] != answer]
    assert not different, f"answers {different} differ from single runs"
    return (
        f"{count} at once: none lost, none preempted (stock: {preempted:.0f} among 60), {len(alone)} equal single runs"
    )


def killed() -> str:
    """A worker is gone: the client gets an error, and the server ends by itself."""
    with server(POLICY, "--kv-cache-memory-bytes", str(64 << 20)) as (url, process):
        worker = _descendant(process.pid, "Worker")
        request = asyncio.run(_broken(url, _texts(1, 200)[0], worker))
        code = process.wait(60)  # raises if the server hangs
    assert request >= 500 or request == 0, f"the request ended with status {request}"
    return f"the request failed (status {request or 'connection closed'}), the server ended with {code}"


@contextmanager
def server(
    policy: str | None, *options: str, environment: dict[str, str] | None = None, graph: bool = False
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`msrnn serve` with the bundled model, or vLLM's own server where there is no policy."""
    from msrnn.models import bundled

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = ["--dtype", "float32", "--max-model-len", "1024", "--port", str(port)]
    common += [] if graph else ["--enforce-eager"]
    if policy is None:
        command = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(bundled())]
    else:
        command = ["-m", "msrnn", "serve", str(bundled()), "--policy", policy]
    process = subprocess.Popen(
        [sys.executable, *command, *common, "--served-model-name", "smol", "--max-num-seqs", "256", *options],
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"} | (environment or {}),
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(url, process)
        yield url, process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def _wait(url: str, process: subprocess.Popen[bytes], patience: int = 300) -> None:
    for _ in range(patience):
        assert process.poll() is None, f"the server ended with {process.returncode}"
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
            return
        except OSError:
            time.sleep(1)
    raise AssertionError("the server did not start")


async def _answers(url: str, texts: list[list[int]], at_once: int) -> list[list[int]]:
    """The tokens written for each text, streamed, so many requests at a time."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=1200)
    gate = asyncio.Semaphore(at_once)

    async def answer(ids: list[int]) -> list[int]:
        extra = {"ignore_eos": True, "return_token_ids": True}
        async with gate:
            stream = await client.completions.create(
                model="smol", prompt=ids, max_tokens=NEW, temperature=0, stream=True, extra_body=extra
            )
            parts = [part.choices[0].model_extra.get("token_ids") or [] async for part in stream if part.choices]
        return [token for part in parts for token in part]

    return list(await asyncio.gather(*map(answer, texts)))


async def _broken(url: str, ids: list[int], worker: int) -> int:
    """The status of a request during which a worker is killed; 0 if the connection just ends."""
    import openai

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    asking = client.completions.create(model="smol", prompt=ids, max_tokens=500, extra_body={"ignore_eos": True})
    task = asyncio.ensure_future(asking)
    await asyncio.sleep(3)
    os.kill(worker, signal.SIGKILL)
    try:
        await task
    except openai.APIStatusError as error:
        return error.status_code
    except openai.APIError:
        return 0
    return 200


def _descendant(root: int, name: str) -> int:
    """The process below `root` whose title has `name`."""
    import psutil

    for child in psutil.Process(root).children(recursive=True):
        if name in " ".join(child.cmdline()) or name in child.name():
            return int(child.pid)
    raise AssertionError(f"no process called {name}")


def _texts(count: int, length: int) -> list[list[int]]:
    """So many different texts, of about that many tokens."""
    from transformers import AutoTokenizer

    from msrnn.models import bundled

    text = " ".join((HERE.parent / "LICENSE").read_text().split())
    ids = AutoTokenizer.from_pretrained(bundled())(text)["input_ids"]
    starts = range(0, len(ids) - length, max(1, (len(ids) - length) // count))
    return [ids[start : start + length - start % 40] for start in starts][:count]


def _metric(url: str, name: str) -> float:
    text = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
    found = re.search(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+]+)$", text, re.MULTILINE)
    assert found, f"{name} is not among the metrics"
    return float(found[1])


if __name__ == "__main__":
    sys.exit(main())

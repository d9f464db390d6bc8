"""The longer proofs of msrnn inside vLLM: `python benchmarks/vllm_long.py [part ...]`, in .venv-vllm.

Parts: tp (3 processes share the heads), pp (2 share the layers), many (200 requests at once over HTTP at a memory
where stock vLLM preempts, among clients that leave or ask wrongly), killed (a worker dies in the middle). Each prints
one line and adds a record to results/vllm.jsonl; the script ends with 1 if any failed. Small model, float32, greedy:
equal means token for token. On a GPU: many and killed, with CUDA graphs of a few sizes, RESULTS=FILE for the records
and COMMIT=... where there is no git. There a matmul's rounding depends on the size of the batch: an answer may differ
from its single run only from a token on whose two best log-probabilities are closer than 1e-4; they are counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from conditions import conditions, write

from msrnn.system.provenance import machine

HERE = Path(__file__).resolve().parent
RESULTS = Path(os.environ.get("RESULTS", HERE.parent / "results" / "vllm.jsonl"))
NEW = 12
POLICY = "tova:64"
GRAPHS = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256]}
NEAR = 1e-4 if torch.cuda.is_available() else 0.0
Result = dict[str, object]


class Answer(NamedTuple):
    """The tokens of an answer, and for each how far apart the two best log-probabilities are."""

    tokens: list[int]
    margins: list[float]


def main() -> int:
    from msrnn.vllm.plugin import vllm_version

    parts = {"tp": tensor_parallel, "pp": pipeline_parallel, "many": many, "killed": killed}
    failed = 0
    for name in sys.argv[1:] or parts:
        about, started = (
            conditions(**{"what": name, "run": "vllm_long", "policy": POLICY, "vllm": vllm_version()} | _gpu()),
            time.time(),
        )
        try:
            result = parts[name]()
        except Exception as error:  # the other parts are to run all the same
            print(f"{name}: FAILED: {type(error).__name__}: {error}", flush=True)
            failed = 1
            continue
        record = about | {"seconds": round(time.time() - started)} | result
        write(RESULTS, [record])
        print(f"{name}: {', '.join(f'{key} {value}' for key, value in result.items())}", flush=True)
    return failed


def _gpu() -> Result:
    """What differs on a GPU machine: its name, and the commit where there is no git (COMMIT)."""
    if not torch.cuda.is_available():
        return {}
    about: Result = {"machine": machine(torch.device("cuda")), "run": "vllm_long on a GPU", "graphs": GRAPHS}
    return about | ({"commit": os.environ["COMMIT"]} if "COMMIT" in os.environ else {})


def tensor_parallel() -> Result:
    return _same_as_one("--tensor-parallel-size", "3", bind="0|1|0")


def pipeline_parallel() -> Result:
    """Compiled: on a CPU and without a graph, vLLM 0.32 skips the warm-up that its own pipeline stages need."""
    return _same_as_one("--pipeline-parallel-size", "2", bind="0|1", graph=True)


def _same_as_one(*options: str, bind: str, graph: bool = False) -> Result:
    texts = _texts(8, 200)
    memory = ("--kv-cache-memory-bytes", str(128 << 20))
    with server(POLICY, *memory) as (url, _):
        alone = asyncio.run(_answers(url, texts, at_once=1))
    spread = {"VLLM_CPU_OMP_THREADS_BIND": bind}
    with server(POLICY, *memory, *options, environment=spread, graph=graph) as (url, _):
        together = asyncio.run(_answers(url, texts, at_once=8))
    assert _tokens(together) == _tokens(alone), f"{_tokens(together)} != {_tokens(alone)}"
    return {"options": " ".join(options), "compiled": graph, "equal_answers": len(texts)}


def many(count: int = 200, memory: int = 48 << 20, policy: str = "tova:32") -> Result:
    """Stock vLLM preempts at this memory; with states nobody is, nobody is lost, and every answer is as if alone."""
    texts = _texts(count, 72)
    with ThreadPoolExecutor(1) as beside:
        stock = beside.submit(_preempted_by_stock, texts[:60], memory)
        preempted = None if torch.cuda.is_available() else stock.result()  # on a GPU both start at once
        result = _bounded_crowd(texts, memory, policy)
        preempted = stock.result() if preempted is None else preempted
    assert preempted > 0, "stock vLLM did not preempt; take less memory"
    return result | {"preempted_by_stock_of_60": preempted, "clients_that_left": 10, "bad_requests_answered": 20}


def _preempted_by_stock(texts: list[list[int]], memory: int) -> float:
    """How many requests stock vLLM preempts at this memory."""
    small_blocks = ("--block-size", "32")  # stock's memory goes in steps of so many tokens
    with server(None, "--kv-cache-memory-bytes", str(memory), *small_blocks) as (url, _):
        asyncio.run(_answers(url, texts, at_once=60))
        return _metric(url, "vllm:num_preemptions_total")


def _bounded_crowd(texts: list[list[int]], memory: int, policy: str) -> Result:
    count = len(texts)
    with server(policy, "--kv-cache-memory-bytes", str(memory)) as (url, _):
        started = time.time()
        together, most = asyncio.run(_crowd(url, texts))
        seconds = time.time() - started
        assert all(len(answer.tokens) == NEW for answer in together), "answers were cut short"
        assert _metric(url, "vllm:num_preemptions_total") == 0, "a bounded request was preempted"
        assert _metric(url, "vllm:num_requests_running") == 0, "requests of clients that left still run"
        held = _metric(url, "msrnn_request_tokens_held_max")
        assert held <= 32, f"a request held {held} tokens"
        alone = asyncio.run(_answers(url, texts, at_once=1))
    different = differences(together, alone)
    far = {number: margin for number, margin in different.items() if margin >= NEAR}
    assert not far, f"answers differ from single runs, by number with the margin there: {far}"
    return {
        "policy": policy,
        "requests": count,
        "memory_bytes": memory,
        "prompt_tokens": [min(map(len, texts)), max(map(len, texts))],
        "new_tokens": NEW,
        "crowd_s": round(seconds, 1),
        "running_max": most,
        "equal_to_single_runs": count - len(different),
        "near_ties": len(different),
        "preempted": 0,
    }


def _tokens(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def differences(ours: list[Answer], theirs: list[Answer]) -> dict[int, float]:
    """Answers that differ, by number: the larger of the margins at the first token that does."""
    margins = {}
    for number, (one, two) in enumerate(zip(ours, theirs, strict=True)):
        if one.tokens != two.tokens:
            at = next(at for at, pair in enumerate(zip(one.tokens, two.tokens, strict=True)) if pair[0] != pair[1])
            margins[number] = max(one.margins[at], two.margins[at])
    return margins


async def _crowd(url: str, texts: list[list[int]]) -> tuple[list[Answer], float]:
    """All texts at once, with clients among them that leave or ask wrongly; also the most that ran at once."""
    most, watching = 0.0, True

    async def watch() -> None:
        nonlocal most
        while watching:
            most = max(most, await asyncio.to_thread(_metric, url, "vllm:num_requests_running", 0))
            await asyncio.sleep(2)

    watcher = asyncio.create_task(watch())
    leaving = asyncio.gather(*(_leaving(url, text) for text in texts[:5]))  # these leave while they read
    answering = asyncio.create_task(_answers(url, texts, at_once=len(texts)))
    codes = await asyncio.gather(*(_wrong(url, number) for number in range(20)))
    assert all(400 <= code < 500 for code in codes), f"bad requests were answered with {codes}"
    await leaving
    await asyncio.gather(*(_leaving(url, text) for text in texts[5:10]))  # and these while they wait
    answers = await answering
    watching = False
    await watcher
    return answers, most


async def _wrong(url: str, number: int) -> int:
    """The status of a request that is too long, or no JSON."""
    import httpx

    too_long = b'{"model": "smol", "prompt": [%s], "max_tokens": 4}' % b",".join([b"7"] * 5000)
    body = too_long if number % 2 else b"{not json"
    async with httpx.AsyncClient(timeout=600) as client:
        answer = await client.post(f"{url}/v1/completions", content=body, headers={"Content-Type": "application/json"})
    return answer.status_code


async def _leaving(url: str, ids: list[int]) -> None:
    """A client that goes away while it waits or reads."""
    from openai import APIError, AsyncOpenAI

    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=5)
    with suppress(APIError):
        stream = await client.completions.create(
            model="smol", prompt=ids, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        await stream.close()


def killed() -> Result:
    """A worker is gone: the client gets an error, and the server ends by itself and leaves no process behind."""
    import psutil

    with server(POLICY, "--kv-cache-memory-bytes", str(64 << 20)) as (url, process):
        family = psutil.Process(process.pid).children(recursive=True)
        worker = _worker(process)
        request = asyncio.run(_broken(url, _texts(1, 200)[0], worker))
        code = process.wait(60)  # raises if the server hangs
        _, left = psutil.wait_procs(family, 30)
    assert request >= 500 or request == 0, f"the request ended with status {request}"
    assert not left, f"processes were left behind: {left}"
    return {"request_ended_with": request or "connection closed", "server_ended_with": code}


def _worker(process: subprocess.Popen[bytes]) -> int:
    """The process that runs the model: the newest one of vLLM's server. On one GPU that is the engine's own process."""
    import psutil

    helpers = ("resource_tracker", "compile_worker", "msrnn.system.watch")
    family = psutil.Process(process.pid).children(recursive=True)
    family = [child for child in family if not any(name in " ".join(child.cmdline()) for name in helpers)]
    return int(max(family, key=lambda child: child.create_time()).pid)


@contextmanager
def server(
    policy: str | None, *options: str, environment: dict[str, str] | None = None, graph: bool = False
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`msrnn serve` with the bundled model, or vLLM's own server where there is no policy."""
    from msrnn.hf.load import bundled

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = ["--dtype", "float32", "--max-model-len", "1024", "--port", str(port)]
    common += [] if graph or torch.cuda.is_available() else ["--enforce-eager"]
    if torch.cuda.is_available():  # a share of it, as others may use it at the same time
        common += ["--compilation-config", json.dumps(GRAPHS), "--gpu-memory-utilization", "0.05"]
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


async def _answers(url: str, texts: list[list[int]], at_once: int) -> list[Answer]:
    """What is written for each text, streamed, so many requests at a time."""
    from openai import AsyncOpenAI

    gate = asyncio.Semaphore(at_once)

    async def answer(client: AsyncOpenAI, ids: list[int]) -> Answer:
        extra = {"ignore_eos": True, "return_token_ids": True}
        tokens, margins = [], []  # type: list[int], list[float]
        async with gate:
            stream = await client.completions.create(
                model="smol", prompt=ids, max_tokens=NEW, temperature=0, stream=True, logprobs=2, extra_body=extra
            )
            async for part in stream:
                if part.choices:
                    tokens += part.choices[0].model_extra.get("token_ids") or []
                    logprobs = part.choices[0].logprobs
                    margins += [_margin(best) for best in logprobs.top_logprobs] if logprobs else []
        return Answer(tokens, margins)

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=1200) as client:
        return list(await asyncio.gather(*(answer(client, text) for text in texts)))


def _margin(best: dict[str, float]) -> float:
    """Between the two best; tokens with the same text are one entry, and then it is not known."""
    first, *others = sorted(best.values(), reverse=True)
    return first - others[0] if others else float("inf")


async def _broken(url: str, ids: list[int], worker: int) -> int:
    """The status of a request during which a worker is killed; 0 if the connection just ends."""
    import openai

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    # a hundred answers: a GPU writes one before the worker is killed
    asking = client.completions.create(model="smol", prompt=ids, max_tokens=500, n=100, extra_body={"ignore_eos": True})
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


def _texts(count: int, length: int) -> list[list[int]]:
    """So many different texts, of about that many tokens."""
    from transformers import AutoTokenizer

    from msrnn.hf.load import bundled

    text = " ".join((HERE.parent / "LICENSE").read_text().split())
    ids = AutoTokenizer.from_pretrained(bundled())(text)["input_ids"]
    starts = range(0, len(ids) - length, max(1, (len(ids) - length) // count))
    return [ids[start : start + length - start % 40] for start in starts][:count]


def _metric(url: str, name: str, unknown: float | None = None) -> float:
    """A number of /metrics; `unknown` where there is none yet."""
    text = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
    match = re.search(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+]+)$", text, re.MULTILINE)
    assert match or unknown is not None, f"{name} is not among the metrics"
    return float(match[1]) if match else unknown


if __name__ == "__main__":
    sys.exit(main())

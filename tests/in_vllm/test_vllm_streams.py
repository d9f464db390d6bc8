"""200 clients of `msrnn serve` in the memory of 8 states, then a worker that is killed under those who read.

The model is tiny and random: another token evicted, and the answer is another one.
"""

import asyncio
import os
import random
import signal
import socket
import time

import httpx
import openai
import psutil
import pytest

from tests.in_vllm.belongings import Belongings
from tests.in_vllm.engines import generate_alone
from tests.in_vllm.test_vllm_server import metric, serve
from tests.support.commands import save
from tests.support.models import tiny_llama
from tests.support.tiny_eval import tokenizer

CAPACITY, STATES, CLIENTS, NEW = 32, 8, 200, 8
MEMORY = 84 << 10  # 9 blocks of 9.1 KiB: vLLM keeps one to itself
POOL = 20 << 10  # two states
LENGTH = 1 << 17
ENDLESS = 100_000  # tokens of a stream that ends only with its client or its server
PATIENCE = 240.0
WRONG = [{"prompt": [10**9]}, {"max_tokens": 10**6}, {"model": "other"}, {"temperature": -1}]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> str:
    """No token is the end of a text to it: generate() would avoid that one, where vLLM ignores what it means."""
    model = tiny_llama(vocab_size=257, num_hidden_layers=2, max_position_embeddings=LENGTH)
    return save(tmp_path_factory.mktemp("tiny"), model, tokenizer())


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    log = tmp_path_factory.mktemp("streams") / "log"
    options = ("--max-model-len", str(LENGTH), "--kv-cache-memory-bytes", str(MEMORY), "--prefix-pool", str(POOL))
    with serve(tiny_model, f"tova:{CAPACITY}", log, *options) as started:
        yield started


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """All longer than the capacity before they end, some of them many times as long; no two are alike."""
    rng = random.Random(0)
    lengths = [27 + number % 40 + 250 * (number % 25 == 0) for number in range(CLIENTS)]
    return [[rng.randrange(1, 257) for _ in range(length)] for length in lengths]


def test_two_hundred_streams_equal_their_single_runs(server, tiny_model, texts):
    """All wait at once while others hold every state, leave in mid-stream or in the queue, or ask wrongly."""
    import msrnn

    model = msrnn.load(tiny_model, dtype="float32")[0]
    expected = [generate_alone(model, f"tova:{CAPACITY}", ids, NEW) for ids in texts]
    url = server[1]
    answers, codes = asyncio.run(crowd(url, texts))
    different = [number for number, (one, two) in enumerate(zip(answers, expected, strict=True)) if one != two]
    assert not different
    assert codes == [400, 400, 404, 400] * 5
    ended = metric(url, "msrnn_request_tokens_held_count")
    assert metric(url, "msrnn_request_tokens_held_bucket", f'le="{CAPACITY}.0"') == ended >= CLIENTS - STATES
    assert metric(url, "msrnn_request_tokens_seen_bucket", 'le="256.0"') < ended
    assert metric(url, "vllm:request_success_total", 'finished_reason="length"') == CLIENTS
    assert metric(url, "vllm:num_preemptions_total") == 0


async def crowd(url: str, texts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """An answer for every text, and what bad requests got, once all of them and some who leave have been in a queue."""
    async with client_of(url) as client:
        first = await asyncio.gather(*(begin(client, ids) for ids in texts[:STATES]))
        answers = [asyncio.ensure_future(read(client, ids)) for ids in texts]
        impatient = [asyncio.ensure_future(begin(client, ids)) for ids in texts[:5]]
        codes = await asyncio.gather(*(refused(client, changes) for changes in WRONG * 5))
        await until(url, running=STATES, waiting=CLIENTS + len(impatient))
        for task in impatient:
            task.cancel()
        await until(url, running=STATES, waiting=CLIENTS)
        for stream in first:
            await stream.close()
        async with asyncio.timeout(PATIENCE):
            tokens = await asyncio.gather(*answers)
    await until(url, running=0, waiting=0)
    return tokens, codes


def test_states_leave_a_full_pool(server, texts):
    """Four texts of 512 tokens and more, in a pool for two of them; each is answered as if none was kept."""
    url = server[1]
    assert metric(url, "msrnn_prefix_pool_states") == 0, "no text was so long"
    long = [[*texts[number], *range(256)] * 3 for number in range(4)]
    long = [ids[:600] for ids in long]
    answers = asyncio.run(in_turn(url, [*long, long[3], long[0]]))
    assert answers == [*answers[:4], answers[3], answers[0]]
    assert metric(url, "msrnn_prefix_pool_hits_total") == 1, "the last but one; the last's had left"
    assert metric(url, "msrnn_prefix_pool_states") == 2
    assert metric(url, "msrnn_prefix_pool_evictions_total") == 3


async def in_turn(url: str, texts: list[list[int]]) -> list[list[int]]:
    async with client_of(url) as client:
        return [await read(client, ids) for ids in texts]


def test_a_killed_worker_ends_the_streams_and_the_server(server, texts):
    """SIGKILL of the process that runs the model: errors, not silence, for those who read and those who wait."""
    process, url, _ = server
    belongings = Belongings(process)
    endings = asyncio.run(broken(url, texts[: STATES + 4], worker_of(process.pid)))
    assert [error for error in endings if not isinstance(error, (openai.APIError, httpx.HTTPError))] == []
    process.wait(90)
    assert belongings.gone_within(30), belongings.remaining
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=5)


async def broken(url: str, texts: list[list[int]], worker: int) -> list[object]:
    """How streams end, of which some have begun and the others wait, when the worker is killed."""
    async with client_of(url) as client:
        begun = await asyncio.gather(*(begin(client, ids) for ids in texts[:STATES]))
        others = [asyncio.ensure_future(read(client, ids, ENDLESS)) for ids in texts[STATES:]]
        await until(url, running=STATES, waiting=len(others))
        os.kill(worker, signal.SIGKILL)
        async with asyncio.timeout(60):
            return await asyncio.gather(*map(tokens_of, begun), *others, return_exceptions=True)


def worker_of(server: int) -> int:
    """The process that runs the model, which vLLM's engine starts last."""
    worker = max(psutil.Process(server).children(recursive=True), key=lambda child: child.create_time())
    assert "multiprocessing.spawn" in " ".join(worker.cmdline())
    return worker.pid


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


async def ask(client: openai.AsyncOpenAI, ids: list[int], tokens: int, **changes: object) -> openai.AsyncStream:
    request = {"model": "smol", "prompt": ids, "max_tokens": tokens, "temperature": 0, "stream": True} | changes
    return await client.completions.create(**request, extra_body={"ignore_eos": True, "return_token_ids": True})


async def read(client: openai.AsyncOpenAI, ids: list[int], tokens: int = NEW) -> list[int]:
    return await tokens_of(await ask(client, ids, tokens))


async def tokens_of(stream: openai.AsyncStream) -> list[int]:
    return [token async for part in stream for choice in part.choices for token in choice.model_extra["token_ids"]]


async def begin(client: openai.AsyncOpenAI, ids: list[int]) -> openai.AsyncStream:
    """A stream without an end, after its first part."""
    stream = await ask(client, ids, ENDLESS)
    await anext(stream)
    return stream


async def refused(client: openai.AsyncOpenAI, changes: dict[str, object]) -> int:
    """The status of a request with these mistakes; not of a stream, whose errors may come after its status."""
    try:
        await ask(client, [1, 2, 3], NEW, stream=False, **changes)
    except openai.APIStatusError as error:
        return error.status_code
    return 200


async def until(url: str, running: int, waiting: int) -> None:
    """Until so many requests run and wait."""
    names, end = ("vllm:num_requests_running", "vllm:num_requests_waiting"), time.monotonic() + PATIENCE
    while (now := [await asyncio.to_thread(metric, url, name) for name in names]) != [running, waiting]:
        assert time.monotonic() < end, f"{now} run and wait, not {[running, waiting]}"
        await asyncio.sleep(0.1)

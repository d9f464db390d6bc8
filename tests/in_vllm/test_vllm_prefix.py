"""Requests that begin with a prefix start from its state, and answer as if they had read it."""

import json
import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.in_vllm.engines import build_prefix, connector, engine, external_hits, greedy, in_turn
from tests.in_vllm.test_vllm_server import metric, wait_for_server

POLICIES = ("tova:64", "h2o:64", in_turn("tova:64,gain=value_norm", "h2o:24|h2o:64|fade:104"))


@pytest.fixture(scope="session")
def texts(model) -> dict[str, list[int]]:
    """A prefix longer than any capacity here, a shorter one, and texts that may follow."""
    from pathlib import Path

    from transformers import AutoTokenizer

    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    ids = AutoTokenizer.from_pretrained(model)(" ".join(text.split()))["input_ids"]
    return {"long": ids[:150], "short": ids[400:430], "one": ids[700:701], "some": ids[800:840]}


@pytest.mark.parametrize("policy", POLICIES, ids=["tova", "h2o", "gains and budgets by head"])
def test_answers_equal_reading_it_afresh(model, hf_model, texts, tmp_path, policy):
    """Mixed in one batch: hits of both prefixes, whose rest is one token or many, and a text that begins otherwise."""
    long, short, one, some = (texts[name] for name in ("long", "short", "one", "some"))
    prompts = [long + some, short + some, long + one, some + long, long[:100], short + one, long + some[:7]]
    with engine(model, policy) as llm:
        afresh = greedy(llm, prompts)
    files = {name: build_prefix(hf_model, model, tmp_path, name, texts[name], policy) for name in ("long", "short")}
    with engine(model, policy, kv_transfer_config=connector(files)) as llm:
        assert greedy(llm, prompts) == afresh
        assert external_hits(llm) == 3 * len(long) + 2 * len(short)
        assert greedy(llm, prompts[:1]) == afresh[:1], "requests that start from the loaded state do not change it"


def test_a_name_that_does_not_fit_is_read_afresh(model, hf_model, texts, tmp_path):
    """`prefix_id` picks one prefix; a request that does not begin with it gets the right answer all the same."""
    from vllm import SamplingParams

    files = {name: build_prefix(hf_model, model, tmp_path, name, texts[name], "tova:64") for name in ("long", "short")}
    prompt = {"prompt_token_ids": texts["long"] + texts["some"]}

    def ask(llm, name: str) -> list[int]:
        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, extra_args={"prefix_id": name})
        return list(llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0].token_ids)

    with engine(model, "tova:64", kv_transfer_config=connector(files)) as llm:
        right = ask(llm, "long")
        assert external_hits(llm) == len(texts["long"])
        assert ask(llm, "short") == right
        assert ask(llm, "unknown") == right
        assert external_hits(llm) == len(texts["long"])
        find = llm.llm_engine.engine_core.engine_core.scheduler.connector.find
        request = SimpleNamespace(**prompt, request_id="0", sampling_params=None, lora_request=None, mm_features=[])
        assert find(request).name == "long"
        for other in ({"lora_request": object()}, {"mm_features": [object()]}):
            assert find(SimpleNamespace(**vars(request) | other)) is None, "its state would be another"


def test_over_http(model, tmp_path):
    """`msrnn state build`, `msrnn serve --prefix`, a chat whose system message is the prefix; /metrics has the hits.

    Budgets by KV head, from a profile. Then prompts that begin alike: the pool is on by default.
    """
    from openai import OpenAI

    (tmp_path / "system.txt").write_text("You are a careful clerk who answers in one short sentence. " * 8)
    state = str(tmp_path / "system.state")
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"capacities": [[40, 56 + layer, 96 - layer] for layer in range(30)]}))
    common = ["--policy", "fade:64", "--profile", str(profile), "--dtype", "float32"]
    command = [sys.executable, "-m", "msrnn"]
    build = [*command, "state", "build", model, "--text", str(tmp_path / "system.txt"), "--system", "-o", state]
    subprocess.run([*build, *common, "--device", "cpu"], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--enforce-eager", "--max-model-len", "1024", "--kv-cache-memory-bytes", str(64 << 20)]
    serve = [*command, "serve", model, *common, "--prefix", f"clerk={state}", *options, "--port", str(port)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_ENABLE_V1")}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [*serve, "--served-model-name", "smol"], stdout=log, stderr=subprocess.STDOUT, env=environment
        )
    try:
        wait_for_server(process, port, tmp_path / "log")
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        system = (tmp_path / "system.txt").read_text().strip()
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "What is a lighthouse for?"}]

        def ask(name: str) -> str:
            extra = {"vllm_xargs": {"prefix_id": name}}
            answer = client.chat.completions.create(
                model="smol", messages=messages, max_tokens=16, temperature=0, extra_body=extra
            )
            return answer.choices[0].message.content

        quick = ask("clerk")
        url = f"http://127.0.0.1:{port}"
        assert metric(url, "msrnn_capacity") == metric(url, "msrnn_request_tokens_held_max") == 40
        assert metric(url, "msrnn_prefix_hits_total") == 1
        assert metric(url, "msrnn_prefix_tokens_total") > 80
        assert ask("nobody") == quick, "read afresh"
        assert metric(url, "msrnn_prefix_hits_total") == 1
        for turn, ending in enumerate(([7] * 9, [8] * 40, [9])):
            client.completions.create(model="smol", prompt=[*range(100, 700), *ending], max_tokens=2)
            assert metric(url, "msrnn_prefix_pool_hits_total") == turn
            assert metric(url, "msrnn_prefix_pool_tokens_total") == 512 * turn
        assert metric(url, "msrnn_prefix_pool_states") == 1
        assert metric(url, "msrnn_prefix_pool_bytes") == metric(url, "msrnn_request_state_bytes")
        assert metric(url, "msrnn_prefix_pool_evictions_total") == 0
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)

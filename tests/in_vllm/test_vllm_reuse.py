"""Requests start from the states that earlier ones left in the pool, and answer as if they had read all afresh."""

import pytest

from tests.in_vllm.engines import build_prefix, connector, engine, external_hits, greedy

EVERY = 32
PIECES = {"max_num_batched_tokens": 96, "scheduler_cls": "msrnn.vllm.scheduler.scheduler"}


def pool(states: int, files: dict[str, str] | None = None) -> dict:
    """vLLM's options for a pool, as `msrnn serve --prefix-pool` passes them."""
    return {"kv_transfer_config": connector(files or {}, states=states, every=EVERY), **PIECES}


def index(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler.connector.index


@pytest.fixture(scope="session")
def ids(model) -> list[int]:
    from pathlib import Path

    from transformers import AutoTokenizer

    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    return AutoTokenizer.from_pretrained(model)(" ".join(text.split()))["input_ids"]


@pytest.fixture(scope="session")
def prompts(ids) -> list[list[int]]:
    """Two texts, each going on in several ways: within the capacity of 64, beyond it, by one token."""
    one, two = ids[:200], ids[400:450]
    tails = ids[800:840], ids[900:901], ids[1000:1100]
    return [text + tail for text in (one, two) for tail in tails] + [one[:33], one[:32], one[:100]]


@pytest.mark.parametrize("policy", ["tova:64", "h2o:64", "tova:64,gain=value_norm"])
def test_answers_equal_reading_afresh(model, prompts, policy):
    """First alone, one after the other, so that each finds what those before it left; then all at once."""
    with engine(model, policy) as llm:
        afresh = greedy(llm, prompts)
    with engine(model, policy, **pool(64)) as llm:
        assert [greedy(llm, [prompt])[0] for prompt in prompts] == afresh
        # 192 tokens of the first text for the second and third prompt, and so on; 32 of 33, and none of 32
        assert external_hits(llm) == 2 * 192 + 2 * 32 + 32 + 0 + 96
        assert greedy(llm, prompts) == afresh
        assert greedy(llm, prompts[::-1]) == afresh[::-1], "states in the pool are not changed by use"
        assert index(llm).evictions == 0

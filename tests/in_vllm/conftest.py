"""Inside vLLM. These tests need its own environment (.venv-vllm); elsewhere they are skipped with that reason."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.in_vllm.engines import generate_alone

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    if find_spec("vllm") is None:
        reason = pytest.mark.skip(reason="vllm is not installed here; run these with .venv-vllm/bin/python -m pytest")
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(reason)


@pytest.fixture(scope="session")
def model() -> str:
    from msrnn.hf.load import bundled

    return str(bundled())


@pytest.fixture(scope="session")
def prompts(model) -> list[list[int]]:
    """Prompts from one token to more than any capacity here."""
    from transformers import AutoTokenizer

    text = (HERE.parents[1] / "LICENSE").read_text()
    ids = AutoTokenizer.from_pretrained(model)(" ".join(text.split()))["input_ids"]
    return [ids[start : start + length] for start, length in ((0, 5), (100, 40), (300, 1), (500, 130), (700, 330))]


@pytest.fixture(scope="session")
def hf_model(model):
    """The same model in transformers."""
    import msrnn

    return msrnn.load(model, dtype="float32")[0]


@pytest.fixture(scope="session")
def alone(hf_model, prompts):
    """A policy -> the tokens that msrnn's transformers path generates after each prompt on its own."""
    return cache(lambda policy: [generate_alone(hf_model, policy, ids) for ids in prompts])

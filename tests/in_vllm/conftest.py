"""Inside vLLM. These tests need its own environment (.venv-vllm); elsewhere they are skipped with that reason."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.in_vllm.inside import NEW

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
    """Texts from a few tokens to more than any capacity here."""
    from transformers import AutoTokenizer

    text = (HERE.parents[1] / "LICENSE").read_text()
    ids = AutoTokenizer.from_pretrained(model)(" ".join(text.split()))["input_ids"]
    return [ids[start : start + length] for start, length in ((0, 5), (100, 40), (300, 1), (500, 130), (700, 330))]


@pytest.fixture(scope="session")
def loaded(model):
    """The same model with transformers."""
    import msrnn

    return msrnn.load(model, dtype="float32")[0]


@pytest.fixture(scope="session")
def alone(loaded, prompts):
    """What msrnn's path on transformers writes for each prompt, read on its own."""
    import torch

    import msrnn

    known: dict[str, list[list[int]]] = {}

    def write(policy: str) -> list[list[int]]:
        if policy not in known:
            known[policy] = []
            for ids in prompts:
                given = torch.tensor([ids])
                cache = msrnn.cache(loaded, policy)
                written = loaded.generate(
                    given,
                    attention_mask=torch.ones_like(given),
                    past_key_values=cache,
                    max_new_tokens=NEW,
                    min_new_tokens=NEW,
                    do_sample=False,
                )
                known[policy].append(written[0, len(ids) :].tolist())
        return known[policy]

    return write

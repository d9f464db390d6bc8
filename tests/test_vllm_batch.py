"""A layer's work inside vLLM, with blocks and metadata as vLLM makes them, on every device here; no vLLM needed."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "vllm_backend.py"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.fixture(scope="module")
def script():
    spec = spec_from_file_location("vllm_backend", SCRIPT)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["tova:48", "tova-query-head:48", "h2o:48", "tova+2:48,last=8,momentum=0.5"])
def test_mixed_batches_and_padded_steps_answer_as_each_text_alone(script, policy, device):
    found = script.check(policy, torch.device(device))
    assert found["error"] < 1e-5 * (1 if device == "cpu" else 10)
    assert found["held"] == 48
    assert found["graph"] == (device == "cuda")
    assert min(found["read"]) < 48 < max(found["read"]), "some begin, and some have forgotten"


def test_the_check_sees_another_policy(script, monkeypatch):
    """Or it would prove nothing."""
    real, other = script.attend, script.parse("window:48")
    monkeypatch.setattr(
        script, "attend", lambda blocks, batch, q, k, v, policy, *rest: real(blocks, batch, q, k, v, other, *rest)
    )
    assert not script.check("tova:48", torch.device("cpu"))["right"]

"""A layer's work inside vLLM, with blocks and metadata as vLLM makes them, on every device here; no vLLM needed."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "vllm_backend.py"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.fixture(scope="module")
def script():
    sys.path.append(str(SCRIPT.parent))  # where it finds what scripts share, on a GPU
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


def test_a_batch_of_steps_asks_nothing_of_the_device(script):
    """As vLLM replays a graph: what a batch is made of lies where that of the batch before lay."""
    fixed = script.Fixed(8, torch.device("meta"))
    steps = script.batch_of(*fixed.put(*torch.zeros(2, 4, device="meta")), [0, 1, 2, 3, 3])
    assert steps.steps == 4
    assert steps.begins
    assert steps.block_list == steps.seen_list == []
    real = script.Fixed(8, torch.device("cpu"))
    first, second = (real.put(*torch.full((2, 4), number, dtype=torch.int32)) for number in (3, 5))
    assert [tensor.data_ptr() for tensor in first] == [tensor.data_ptr() for tensor in second]
    assert first[0].tolist() == [5] * 4

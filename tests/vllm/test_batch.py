"""A layer's work inside vLLM, with blocks and metadata as vLLM builds them, on every device here; no vLLM needed."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from msrnn.policy import parse_policy
from msrnn.vllm.batch import StaticInputs, batch_of

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "vllm_backend.py"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
POLICIES = [
    *("tova:48", "tova-query-head:48", "h2o:48", "tova+2:48,last=8,momentum=0.5", "tova:48,gain=value_norm"),
    *("h2o:48,gain=value_norm", "tova-query-head:48,gain=value_norm", "tova:48,kv=int8", "h2o:48,kv=k8v4"),
    *("fade:48|fade:20|fade:31", "tova-head:30|tova-head:48|h2o:7,kv=int8"),
    *("blend:48", "blend-layer:48,kv=k8v4", "blend:48|blend:20|fade:31"),
]
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 2.5e-3}  # of the largest outputs, which are 4
IN_16_BITS = [text for text in POLICIES if "kv=" in text or text in ("tova:48", "fade:48|fade:20|fade:31")]
CASES = [
    *((text, torch.float32) for text in POLICIES),
    *((text, dtype) for text in IN_16_BITS for dtype in (torch.bfloat16, torch.float16)),
]


@pytest.fixture(scope="module")
def script():
    sys.path.append(str(SCRIPT.parent))  # where it finds what scripts share, on a GPU
    spec = spec_from_file_location("vllm_backend", SCRIPT)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy, dtype", CASES, ids=str)
def test_mixed_batches_and_padded_steps_answer_as_each_text_alone(script, policy, dtype, device):
    record = script.check(policy, torch.device(device), dtype)
    assert record["right"]
    assert record["error"] < ROUNDING[dtype] * (1 if device == "cpu" else 10)
    assert record["held"] == 48
    assert record["graph"] == (device == "cuda")
    assert min(record["read"]) < 48 < max(record["read"]), "some requests begin, and some have evicted tokens"


def test_the_check_sees_another_policy(script, monkeypatch):
    """Or it would prove nothing."""
    attend, other = script.attend, parse_policy("window:48")
    monkeypatch.setattr(
        script, "attend", lambda blocks, batch, q, k, v, policy, *rest: attend(blocks, batch, q, k, v, other, *rest)
    )
    assert not script.check("tova:48", torch.device("cpu"))["right"]


def test_a_batch_of_steps_does_not_wait_for_the_device():
    """As vLLM replays a CUDA graph: the inputs of every batch lie at the same addresses."""
    inputs = StaticInputs(8, torch.device("meta"))
    batch = batch_of(*inputs.put(*torch.zeros(2, 4, device="meta")), [0, 1, 2, 3, 3])
    assert batch.steps == 4
    assert batch.begins
    assert batch.rows == batch.seen_list == []
    inputs = StaticInputs(8, torch.device("cpu"))
    first, second = (inputs.put(*torch.full((2, 4), number, dtype=torch.int32)) for number in (3, 5))
    assert [tensor.data_ptr() for tensor in first] == [tensor.data_ptr() for tensor in second]
    assert first[0].tolist() == [5] * 4


@pytest.mark.parametrize(
    "seen, starts, steps, begins",
    [
        ([4, 7], [0, 1, 2], 2, False),
        ([4, 0], [0, 1, 2], 2, True),
        ([4, 0], [0, 1, 9], 1, False),  # the request that begins is a prefill
        ([0, 4], [0, 5, 9], 0, False),
        ([4, 7], [0, 1, 1], 2, False),  # padding has no tokens
    ],
)
def test_steps_come_before_prefill(seen, starts, steps, begins):
    batch = batch_of(torch.tensor([5, 2]), torch.tensor(seen), starts)
    assert (batch.steps, batch.begins) == (steps, begins)
    assert batch.seen_list == seen
    assert [row.number for row in batch.rows] == [row for row in range(2) if starts[row + 1] - starts[row] > 1]

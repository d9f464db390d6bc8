"""Memory is bounded, predicted and measured: peaks do not know the length of a text, and a state costs what was said.

Peaks are counted exactly, as the bytes of all tensors alive at one time, and once more as the system sees the process.
"""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import msrnn
from msrnn.eval.perplexity import score
from msrnn.hf.cost import Cost, cost
from msrnn.hf.geometry import geometry
from msrnn.hf.load import bundled

pytestmark = pytest.mark.usefixtures("one_thread")

BOUNDED = [
    *("tova:64", "tova-head:64", "tova-query-head:64", "window:64", "window+4:64", "h2o:64", "h2o-layer:64"),
    *("tova:64,kv=int8", "h2o:64,kv=k8v4"),
]
POLICIES = ["full", *BOUNDED]


class Live(TorchDispatchMode):
    """Counts the bytes of tensors made inside the block that are alive; `peak` is the most at any one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in given:
                self.add(leaf.untyped_storage())
        return result

    def add(self, storage: Any) -> None:
        if storage._cdata in self.known:
            return
        size, name = storage.nbytes(), storage._cdata
        self.known[name] = weakref.ref(storage, lambda _: self.drop(name, size))
        self.now += size
        self.peak = max(self.peak, self.now)

    def drop(self, name: int, size: int) -> None:
        self.now -= size
        del self.known[name]


def tiny(**changes: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 61} | changes
    config = LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3)
    return LlamaForCausalLM(config).eval()


def stream(length: int, vocabulary: int = 61) -> Iterator[int]:
    """Ids that take no memory of their own."""
    return ((i * i + 7 * i // 3) % vocabulary for i in range(length))


def peak_of_reading(model: PreTrainedModel, policy: str, length: int, piece: int = 512, vocabulary: int = 61) -> int:
    rnn = msrnn.RNN(model, policy, piece=piece)
    rnn.read(stream(2 * piece, vocabulary), rnn.start())  # kernels are compiled before anything is counted

    def read() -> int:
        with Live() as live:
            _, state = rnn.read(stream(length, vocabulary), rnn.start())
        assert state.seen == [length]
        return live.peak

    return alone(read)


def alone(work: Callable[[], int]) -> int:
    """In a thread of its own, which starts without scratch memory, so that this is counted every time."""
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return pool.submit(work).result()


def test_the_count_of_live_bytes_is_right() -> None:
    with Live() as live:
        one = torch.zeros(1000)
        view = one.view(10, 100)[:5]
        del one
        assert live.now == 4000
        del view
        assert live.now == 0
        for _ in range(5):
            torch.ones(500).add_(1)
    assert (live.now, live.peak) == (0, 4000)


def test_a_tiny_model_reads_8k_and_256k_with_the_same_peak() -> None:
    model = tiny()
    short, long = (peak_of_reading(model, "tova:64", length, 2048) for length in (8 << 10, 256 << 10))
    assert long == pytest.approx(short, rel=0.05)
    unbounded = cost(geometry(model), msrnn.RNN(model, "full").plan, torch.float32, 256 << 10).full
    assert long < unbounded / 4


@pytest.mark.parametrize("policy", BOUNDED)
def test_every_policy_is_bounded(policy: str) -> None:
    model = tiny(num_hidden_layers=2)
    short, long = (peak_of_reading(model, policy, length, 512) for length in (2 << 10, 12 << 10))
    assert long == pytest.approx(short, rel=0.05)


def test_the_full_policy_is_not_bounded_which_shows_that_the_count_sees_it() -> None:
    model = tiny()
    short, long = (peak_of_reading(model, "full", length, 512) for length in (2 << 10, 12 << 10))
    assert long > 2 * short


def test_the_peak_is_a_function_of_capacity_batch_and_chunk() -> None:
    model = tiny()

    def peak(capacity: int = 64, batch: int = 1, chunk: int = 64) -> int:
        rnn = msrnn.RNN(model, f"tova:{capacity}", chunk=chunk)
        text = torch.zeros(batch, 256, dtype=torch.long)

        def step() -> int:
            state = rnn.start()
            with Live() as live:
                for _ in range(4):
                    _, state = rnn.step(text, state)
            return live.peak

        return alone(step)

    base = peak()
    assert peak(capacity=1024) > 2 * base
    assert peak(capacity=512) > 1.3 * peak(capacity=512, chunk=8)
    assert peak(batch=4) == pytest.approx(4 * base, rel=0.1)


@pytest.mark.slow
def test_smollm2_reads_4k_and_32k_with_the_same_peak() -> None:
    """Three layers of the real weights: all 30 over 32K tokens would take minutes (benchmarks/memory.py runs them)."""
    model, _ = msrnn.load(bundled(progress=False), num_hidden_layers=3)
    short, long = (peak_of_reading(model, "tova:256", length, vocabulary=49_000) for length in (4 << 10, 32 << 10))
    assert long == pytest.approx(short, rel=0.05)
    predicted = cost(geometry(model), msrnn.RNN(model, "tova:256").plan, model.dtype, 32 << 10)
    assert predicted.state < long < predicted.full / 3


RESIDENT = """
import sys, torch
sys.path.insert(0, {tests!r})
from tests.hf.test_cost import msrnn, stream, tiny

torch.set_num_threads(1)
rnn = msrnn.RNN(tiny(hidden_size=128), "tova:64", piece=1024)

def high() -> int:
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

for length in (8 << 10, 8 << 10, 64 << 10):
    open("/proc/self/clear_refs", "w").write("5")  # the mark falls to what is resident now
    rnn.read(stream(length), rnn.start())
    print(high())
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_the_system_sees_it_too() -> None:
    code = RESIDENT.format(tests=str(Path(__file__).parents[2]))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    _, short, long = map(int, run.stdout.split())
    assert long == pytest.approx(short, rel=0.05)
    assert long - short < 8 << 10  # KiB; the keys and values of 64K tokens would be 32 MiB


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_costs_what_was_predicted(policy: str, dtype: torch.dtype) -> None:
    model = tiny(num_hidden_layers=2).to(dtype)
    made = msrnn.cache(model, policy)
    predicted = cost(geometry(model), made.plan, dtype, 256)
    with torch.no_grad():
        model(torch.tensor([list(stream(256))]), past_key_values=made)
        assert made.nbytes == predicted.state
        if policy != "full":
            model(torch.tensor([list(stream(500))]), past_key_values=made)
            assert made.nbytes == predicted.state
    assert predicted.full == 256 * predicted.slot


def test_layers_of_unequal_size_cost_what_was_predicted() -> None:
    model = tiny(num_hidden_layers=3)
    plan = msrnn.per_layer("tova", [4, 100, 30])
    rnn = msrnn.RNN(model, plan)
    _, state = rnn.read(stream(300), rnn.start())
    assert state.nbytes == cost(geometry(model), plan, torch.float32, 300).state
    per_slot = 2 * 16 * 4 + 8  # key, value, position
    assert state.nbytes == (5 + 101 + 31) * per_slot + 3 * (8 + 8)  # and the next slot and tokens seen, per layer


@pytest.mark.parametrize("policy", [*POLICIES, "tova:300", "h2o:300", "window+4:20", "h2o:20"])
def test_sliding_windows_cost_what_was_predicted(policy: str) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 61, "sliding_window": 40, "head_dim": 16}
    config = Gemma2Config(**shape, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1)
    model = Gemma2ForCausalLM(config).eval()
    assert [layer.window for layer in geometry(model)] == [40, None, 40, None]
    rnn = msrnn.RNN(model, policy)
    _, state = rnn.step(torch.tensor([list(stream(256))]), rnn.start())
    assert state.nbytes == cost(geometry(model), rnn.plan, torch.float32, 256).state


def test_largest_batches() -> None:
    predicted = Cost(state=100, full=1000, slot=10, length=100)
    assert predicted.largest_batch(10_000) == (100, 10)
    assert predicted.largest_batch(99) == (0, 0)


def test_reading_makes_the_logits_of_one_token_and_scoring_those_of_a_piece() -> None:
    model, rows = tiny(), []
    model.lm_head.register_forward_hook(lambda module, given, logits: rows.append(logits.shape[:-1].numel()))
    rnn = msrnn.RNN(model, "tova:16", piece=100)
    rnn.read(stream(1050), rnn.start())
    assert rows == [1] * 11
    rows.clear()
    score(model, stream(1050), msrnn.cache(model, "tova:16"), piece=100)
    assert max(rows) == 100


def test_a_stream_is_read_as_it_comes() -> None:
    """Not a token more is taken than the piece that is being read, so a stream may have no end."""
    model, taken, seen = tiny(), 0, []
    model.register_forward_pre_hook(lambda *_: seen.append(taken))

    def endless() -> Iterator[int]:
        nonlocal taken
        while True:
            taken += 1
            yield taken % 61

    rnn = msrnn.RNN(model, "tova:16", piece=64)
    rnn.read(islice(endless(), 300), rnn.start())
    assert seen == [64, 128, 192, 256, 300]

"""A call that is cut off, at any line and by a real signal: the cache says so, or nothing is missing."""

from __future__ import annotations

import dis
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import msrnn
from msrnn import BoundIgnored
from msrnn.core.trace import Recorder
from msrnn.hf.cache import BoundedCache
from tests.support.models import tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")
PACKAGE = str(Path(msrnn.__file__).parent)
IDS = torch.randint(3, 64, (1, 30), generator=torch.Generator().manual_seed(0))
SEED = 16
KINDS = {
    "chunks": ("tova:6", {"chunk": 4}, 14, False),
    "step": ("h2o:6", {}, 1, False),
    "recorded": ("tova-head:6", {"chunk": 5}, 9, True),
    "recorded step": ("tova:6", {}, 1, True),
    "oneshot": ("tova:6", {"prompt": "oneshot"}, 12, False),
    "by a rule": ("key_difference:6", {"chunk": 4}, 6, False),
}


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the tests were started in the background, which ignores it."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


def begun(model: LlamaForCausalLM, kind: str) -> tuple[BoundedCache, Tensor]:
    """A cache that has read some text, and the text that comes next."""
    policy, options, count, recorded = KINDS[kind]
    cache = msrnn.cache(model, policy, **options)
    for layer in cache.bounded:
        layer.recorder = Recorder() if recorded else None
    with torch.no_grad():
        model(IDS[:, :10], past_key_values=cache)
    return cache, IDS[:, 10 : 10 + count]


def snapshot(cache: BoundedCache) -> list[Any]:
    """All that a cache knows."""
    slots = [layer.slots for layer in cache.bounded]
    states = [({n: t.clone() for n, t in s.tensors().items()}, s.fed) for s in slots if s is not None]
    traces = [layer.recorder and (layer.recorder.deaths.clone(), layer.recorder.length) for layer in cache.bounded]
    return [states, traces]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return all(same(one[name], other[name]) for name in one) if isinstance(one, dict) else one == other


class Interrupter:
    """Raises in our own code, at the line with this number, as a signal handler would."""

    def __init__(self, line: int, error: type[BaseException]) -> None:
        self.left, self.error, self.place = line, error, ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line" and not ends_with_block(frame):
            self.left -= 1
            if self.left == 0:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise self.error
        return self


def ends_with_block(frame: FrameType) -> bool:
    """Whether the line is that of a `with` whose block has just ended, where no signal handler ever runs.

    Python calls `__exit__(None, None, None)` there, and an error in front of it would leave a lock locked for good.
    """
    code, at = frame.f_code.co_code, frame.f_lasti
    three = code[at : at + 6]
    return three == three[:2] * 3 and dis.opname[three[0]] == "LOAD_CONST"


def interrupted(call: Callable[[], Any], line: int, error: type[BaseException]) -> Interrupter:
    tracer = Interrupter(line, error)
    sys.settrace(tracer)
    try:
        call()
    except error:
        pass
    finally:
        sys.settrace(None)
    return tracer


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_at_any_line(model: LlamaForCausalLM, kind: str, error: type[BaseException]) -> None:
    """Every seventh line of the call or so: afterwards the cache is as before it, as after it, or refuses."""
    plain = model(IDS).logits
    cache, more = begun(model, kind)
    before = snapshot(cache)
    counter = interrupted(lambda: model(more, past_key_values=cache), 10**9, error)
    lines, after = 10**9 - counter.left, snapshot(cache)
    refused = 0
    for line in range(1, lines, max(1, lines // 60)):
        cache, _ = begun(model, kind)
        place = interrupted(lambda: model(more, past_key_values=cache), line, error).place  # noqa: B023 (called now)
        try:
            cache.check()
        except BoundIgnored as refusal:
            assert "cut off" in str(refusal), place  # noqa: PT017
            with pytest.raises(BoundIgnored, match="cut off"):
                model(more, past_key_values=cache)
            refused += 1
        else:
            now = snapshot(cache)
            assert same(now, before) or same(now, after), place
        assert torch.equal(model(IDS).logits, plain), place
        assert model.config._attn_implementation == "sdpa", place
        cache.reset()
        cache.check()
    assert refused > 10


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("moment", ["before", "after"])
@torch.no_grad()
def test_a_signal_in_every_layer(model: LlamaForCausalLM, layer: int, moment: str) -> None:
    cache, more = begun(model, "chunks")
    attention = model.model.layers[layer].self_attn
    register = attention.register_forward_pre_hook if moment == "before" else attention.register_forward_hook
    hook = register(lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        model(more, past_key_values=cache)
    hook.remove()
    if (layer, moment) in ((0, "before"), (2, "after")):  # nothing was read, or all of it
        model(more, past_key_values=cache)
        assert cache.get_seq_length() == 24 + 14 * (layer == 2)
        return
    with pytest.raises(BoundIgnored, match=r"cut off.*reset\(\)"):
        model(more, past_key_values=cache)
    with pytest.raises(BoundIgnored, match="cut off"):
        msrnn.rnn.RNNState(cache).fork()
    with pytest.raises(BoundIgnored, match="cut off"):
        msrnn.rnn.RNNState(cache).save("/dev/null")
    cache.reset()
    model(more, past_key_values=cache)
    assert cache.held == 6


@torch.no_grad()
def test_an_alarm_at_random_moments(model: LlamaForCausalLM) -> None:
    """A real timer, wherever it strikes."""
    moments = random.Random(SEED)
    cache, more = begun(model, "chunks")
    before = snapshot(cache)
    model(more, past_key_values=cache)
    after = snapshot(cache)
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(60):
            cache, _ = begun(model, "chunks")
            try:
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-5, 8e-3))
                model(more, past_key_values=cache)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                pass
            try:
                cache.check()
            except BoundIgnored as refusal:
                assert "cut off" in str(refusal)  # noqa: PT017
            else:
                assert same(snapshot(cache), before) or same(snapshot(cache), after)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert model(IDS).logits.isfinite().all()
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("kind", ["chunks", "step", "oneshot"])
@torch.no_grad()
def test_an_error_while_evictions_are_recorded(model: LlamaForCausalLM, kind: str, layer: int) -> None:
    cache, more = begun(model, kind)

    def broken(positions: Tensor, expiry: Tensor) -> None:
        raise OSError("no space left")

    cache.layers[layer].recorder = broken
    with pytest.raises(OSError, match="no space left"):
        model(more, past_key_values=cache)
    with pytest.raises(BoundIgnored, match="cut off inside a layer"):
        model(more, past_key_values=cache)


@torch.no_grad()
def test_a_state_whose_step_was_cut_off(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """It is used up and says so; a fork from before goes on as if nothing had happened."""
    rnn = msrnn.RNN(model, "tova:6", chunk=4)
    _, state = rnn.step(IDS[:, :10], rnn.start(trace=True))
    fork = state.fork()
    want, _ = rnn.step(IDS[:, 10:], state.fork())
    hook = model.model.layers[1].register_forward_hook(lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        rnn.step(IDS[:, 10:], state)
    hook.remove()
    for use in (
        lambda: state.trace,
        lambda: state.held,
        state.fork,
        lambda: state.save(tmp_path / "state"),
        lambda: rnn.step(IDS, state),
    ):
        with pytest.raises(msrnn.StateError, match="If that step failed, begin again"):
            use()
    got, after = rnn.step(IDS[:, 10:], fork)
    assert torch.equal(got, want)
    assert after.trace.length == 30

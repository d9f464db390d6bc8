"""Run by test_hostile_slots.py in a process of its own: slots that no text makes, given to every kernel.

A kernel may refuse them or do anything to their row, but it must not crash, hold more than the capacity, or touch the
rows beside.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from msrnn.core.attention import Attention
from msrnn.core.recurrence import read
from msrnn.core.slots import Slots
from msrnn.kernels.torch import step as torch_step
from msrnn.policy import Policy, parse_policy

HEADS, KV_HEADS, SIZE, ROWS = 4, 2, 8, 3
CLEAR = (ValueError, ArithmeticError, IndexError)  # and RuntimeError of PyTorch's own index checks


def tokens(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((ROWS, heads, count, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, key, value


def filled(policy: Policy) -> Slots:
    query, key, value = tokens(40, 0)
    slots = Slots.empty(policy, key, value, HEADS)
    read(slots, query, key, value, policy, Attention(0.3), chunk=16)
    return slots


def shift(by: int) -> Callable[[Slots], None]:
    return lambda slots: slots.positions[1].add_(by * (slots.positions[1] >= 0))


def put(name: str, value: float) -> Callable[[Slots], None]:
    def change(slots: Slots) -> None:
        tensor = getattr(slots, name)
        if tensor is not None:
            tensor[1] = value

    return change


CHANGES = {
    "shifted by 1,000": shift(1000),
    "shifted by 1,000,000": shift(1_000_000),
    "shifted past 32 bits": shift(2**33 + 5),
    "shifted to the end of 64 bits": shift(2**63 - 100),
    "shifted back": shift(-1000),
    "all the same position": put("positions", 7),
    "the position that comes next": put("positions", 40),
    "positions of the chunk to come": lambda slots: slots.positions[1].copy_(
        torch.arange(slots.positions.shape[2]) % 5 + 40
    ),
    "every slot full": lambda slots: slots.positions[1].copy_(torch.arange(slots.positions.shape[2])),
    "no slot full": put("positions", -1),
    "a next slot below 0": put("next", -3),
    "a next slot far below 0": put("next", -(2**62)),
    "a next slot at the end": lambda slots: slots.next[1].fill_(slots.positions.shape[2]),
    "a next slot far out": put("next", 2**62),
    "a next slot in use": lambda slots: slots.next[1].copy_((slots.positions[1] >= 0).long().argmax(-1)),
    "a count from elsewhere": put("seen", 5),
    "an enormous count": put("seen", 2**62),
    "the largest count": put("seen", 2**63 - 1),
    "NaN scores": put("scores", float("nan")),
    "infinite scores": put("scores", float("inf")),
    "negative scores": put("scores", -1e30),
    "NaN gains": put("gains", float("nan")),
    "NaN keys": put("keys", float("nan")),
    "infinite keys": put("keys", float("inf")),
    "NaN values": put("values", float("nan")),
    "a NaN residual": put("residual", float("nan")),
    "a residual of fewer than 0 tokens": put("residual", -3.0),
}
POLICIES = (
    "h2o:10",
    "tova:10",
    "tova-head+2:10,last=3",
    "tova:10,gain=value_norm",
    "window+2:10",
    "tova:1",
    "blend:10",
)


def kernels(interpreted: bool) -> dict[str, Callable[..., object]]:
    if interpreted:
        from msrnn.kernels.triton import step as triton_step

        return {"triton step": triton_step.step}

    from msrnn.kernels.numba import step as numba_step

    return {"numba step": numba_step.step, "torch step": torch_step.step}


def stepped(slots: Slots, kernel: Callable[..., object], policy: Policy) -> None:
    for number in range(4):
        query, key, value = (tensor[:, :, 0] for tensor in tokens(1, number + 1))
        kernel(slots, query, key, value, policy, Attention(0.3))
        slots.seen += 1


def in_chunks(slots: Slots, kernel: object, policy: Policy) -> None:
    for number in range(2):
        read(slots, *tokens(37, number + 1), policy, Attention(0.3), chunk=16)


def in_triton_chunks(slots: Slots, kernel: object, policy: Policy) -> None:
    """The chunks of a GPU, in the interpreter: Triton's scan and compact around PyTorch's matmuls."""
    from msrnn import kernels
    from msrnn.kernels.triton import compact, scan

    def triton_scan(*given: object) -> object:
        return scan.scan(*given[:5])  # type: ignore[arg-type]

    before = kernels.scan, kernels.compact
    kernels.scan, kernels.compact = triton_scan, compact.compact
    try:
        read(slots, *tokens(4, 1), policy, Attention(0.3), chunk=4)
    finally:
        kernels.scan, kernels.compact = before


def one(policy: Policy, change: Callable[[Slots], None], run: Callable[..., None], kernel: object) -> str:
    slots, undisturbed = filled(policy), filled(policy)
    change(slots)
    run(undisturbed, kernel, policy)
    try:
        run(slots, kernel, policy)
    except CLEAR as error:
        return type(error).__name__
    except RuntimeError as error:
        assert "index" in str(error) or "out of" in str(error), error  # noqa: PT017
        return "RuntimeError"
    for name, tensor in slots.tensors().items():
        for row in (0, 2):
            # but for rounding: exponentials that overflow in one row are taken anew for all
            assert torch.allclose(tensor[row], getattr(undisturbed, name)[row], atol=1e-5), f"{name} of row {row}"
    most = policy.capacity or 0
    held = int(slots.held.max())
    full = bool((slots.next[1] < 0).any() | (slots.next[1] >= slots.keys.shape[2]).any())  # then a step leaves it alone
    assert held <= most or (full and run is stepped), f"{held} tokens are held"
    return "ran"


# of the chunks in the interpreter, which take seconds each
SOME = ("shifted by 1,000,000", "shifted past 32 bits", "the position that comes next", "every slot full")
SOME += ("a next slot far out", "the largest count", "NaN scores")


def cases(operations: str) -> Iterator[tuple[Callable[..., None], str, object, str, str]]:
    """Which run, its name, kernel, policy and change."""
    if operations == "interpreted chunks":
        yield from ((in_triton_chunks, "triton chunks", None, "h2o:10", what) for what in SOME)
        return
    interpreted = operations == "interpreted"
    policies = POLICIES[::3] if interpreted else POLICIES  # the interpreter takes a second for each
    for (name, kernel), text, what in itertools.product(kernels(interpreted).items(), policies, CHANGES):
        yield stepped, name, kernel, text, what
    if not interpreted:
        for text, what in itertools.product(policies, CHANGES):
            yield in_chunks, "chunks", None, text, what


def main(operations: str) -> None:
    for run, name, kernel, text, what in cases(operations):
        try:
            result = one(parse_policy(text), CHANGES[what], run, kernel)
        except AssertionError as error:
            raise AssertionError(f"{name}, {text}, {what}: {error}") from None
        print(f"{name}, {text}, {what}: {result}")


if __name__ == "__main__":
    main(sys.argv[1])

"""What the kernels of `step` share: slots they take, where a row's state is, its tiles, which logits are visible."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from ...core.slots import Slots

NO_TOP = tl.constexpr(-1.0e30)  # the top of nothing: finite, so that a difference of two is a number
_MOST_SLOTS = 2**15 + 1  # that one program can choose among


def fits(slots: Slots) -> bool:
    """Whether the kernels can take them: not very many slots, nor codes of values that are not in pairs."""
    odd = slots.kv is not None and (slots.values.shape[3] % 2 or slots.values.stride(0) % 2)
    return not odd and slots.positions.shape[2] <= _MOST_SLOTS


def check(slots: Slots) -> None:
    """Anything may lie between the rows of a batch, but nothing between the parts of one."""
    if not all(tensor[0].is_contiguous() for name, tensor in slots.tensors().items() if name != "seen"):
        raise ValueError("slots are changed in place: each row's tensors must be contiguous, give whole buffers")


@triton.jit
def place_of(states, seen, slot, slot_b, b, count, slots, INDEXED: tl.constexpr):
    """Where row b's state is among all `count`, its token's number and slot, and whether the row is active.

    Row and slot are 0 where they are out of range, so that nothing outside is read.
    """
    home = b
    if INDEXED:
        home = tl.load(states + b)
    valid = (home >= 0) & (home < count)
    home = tl.where(valid, home, 0)
    now, spot = tl.load(seen + b), tl.load(slot + home * slot_b)
    active = valid & (now >= 0) & (spot >= 0) & (spot < slots)
    return home, now, tl.where(active, spot, 0), active


@triton.jit
def tile_columns(block, spot, slots, BLOCK: tl.constexpr):
    """A tile's columns, the slots they are in, and which of them there are."""
    column = block * BLOCK + tl.arange(0, BLOCK)
    return column, tl.where(column == spot, slots - 1, column), column < slots - 1


@triton.jit
def rows_of(rows, at, inside, D: tl.constexpr, DP: tl.constexpr, EVEN: tl.constexpr):
    """[BLOCK, DP]"""
    d = tl.arange(0, DP)
    if EVEN:
        return tl.load(rows + at[:, None] * D + d[None, :])
    return tl.load(rows + at[:, None] * D + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0)


@triton.jit
def cap(x, SOFTCAP: tl.constexpr):
    """tanh(x / cap) x cap, where there is a cap."""
    if SOFTCAP > 0:
        x = SOFTCAP * (1 - 2 / (tl.exp(x * (2 / SOFTCAP)) + 1))
    return x


@triton.jit
def hide(logit, born, now, active, window, WINDOW: tl.constexpr):
    """What is empty, or older than the model's own window, is out of sight."""
    visible = (born >= 0) & active
    if WINDOW:
        visible = visible & (born > now - window)
    return tl.where(visible, logit, -float("inf"))

"""The recurrent API with an explicit state: `logits, state = rnn.step(token_ids, state)`.

A state is used once: `step` moves it on and returns it. To continue two ways from one point, `fork` it first. A saved
state's size depends on the capacity only (`state_file.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from .core.heads import LayerSlots, recorder
from .core.recurrence import Prompt
from .core.trace import Trace
from .hf.cache import BoundedCache, BoundedLayer, cache
from .plan import PolicyLike
from .state_file import StateError, load_state, save_state

PIECE = 1024  # tokens per forward while reading: activations grow with this, not with the text


class RNN:
    """A loaded model bounded by a policy.

    `prompt`, `length` and `chunk` are those of `msrnn.cache`; `piece`: tokens per forward pass in `read`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: PolicyLike,
        *,
        prompt: Prompt = "recurrent",
        length: int | None = None,
        chunk: int | None = None,
        piece: int = PIECE,
    ) -> None:
        if piece < 1:
            raise ValueError(f"piece is {piece}; it must be at least 1")
        self.model, self.prompt, self.chunk, self.piece = model, prompt, chunk, piece
        self.plan = cache(model, policy, prompt=prompt, length=length, chunk=chunk).plan

    def start(self, *, trace: bool = False) -> RNNState:
        """The empty state; with `trace`, it records when each token leaves."""
        bounded = self._cache()
        if trace:
            for layer in bounded.bounded:
                layer.recorder = recorder(layer.policy)
        return RNNState(bounded)

    def step(self, token_ids: Tensor, state: RNNState, attention_mask: Tensor | None = None) -> tuple[Tensor, RNNState]:
        """token_ids [B, T], attention_mask [B, T] (0: padding, left or right) -> logits [B, vocabulary], state.

        The logits are those after each row's last real token. T may be 1 or a whole prompt.
        """
        token_ids = self._checked(token_ids)
        real = torch.ones_like(token_ids) if attention_mask is None else (attention_mask != 0).to(token_ids)
        if real.shape != token_ids.shape:
            raise ValueError(f"the mask has the shape {tuple(real.shape)}, the tokens {tuple(token_ids.shape)}")
        bounded = state.take(len(token_ids))
        seen = _seen(bounded, token_ids)
        positions = (seen[:, None] + real.cumsum(1) - 1).clamp(min=0)
        last = real.shape[1] - 1 - real.flip(1).argmax(1)  # the last real column of each row
        wanted = torch.unique(last)
        with torch.no_grad():
            logits = self.model(
                input_ids=token_ids,
                attention_mask=None
                if attention_mask is None
                else pad(real.bool(), (bounded.get_seq_length(), 0), value=True),
                position_ids=positions,
                past_key_values=bounded,
                use_cache=True,
                logits_to_keep=wanted,
            ).logits
        rows = torch.arange(len(token_ids), device=logits.device)
        return logits[rows, torch.searchsorted(wanted, last).to(logits.device)], RNNState(bounded)

    def read(self, token_ids: Tensor | Iterable[int], state: RNNState) -> tuple[Tensor, RNNState]:
        """One sequence of any length, in pieces, so that memory depends on the state and the piece only.

        A 1-D tensor, a list, or an iterator that yields ids as they come.
        """
        logits = None
        for piece in pieces(token_ids, self.piece):
            logits, state = self.step(torch.tensor([piece], device=self.device), state)
        if logits is None:
            raise ValueError("there is no token to read; give at least one")
        return logits, state

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.get_input_embeddings().weight.device)

    def _checked(self, token_ids: Tensor) -> Tensor:
        """Refuse bad ids before the state is touched."""
        if token_ids.ndim != 2 or token_ids.shape[1] == 0 or token_ids.is_floating_point():
            raise ValueError(f"token_ids must be whole numbers [B, T] with T > 0, not {tuple(token_ids.shape)}")
        size = self.model.get_input_embeddings().weight.shape[0]
        low, high = int(token_ids.min()), int(token_ids.max())
        if low < 0 or high >= size:
            raise ValueError(f"token ids run from {low} to {high}; the model knows 0 to {size - 1}")
        return token_ids.to(self.device)

    def load(self, path: str | Path) -> RNNState:
        """A state saved for this very model, policy and dtype; the first step moves slots to their layers' devices."""
        bounded = self._cache()
        load_state(path, bounded)
        return RNNState(bounded)

    def _cache(self) -> BoundedCache:
        return cache(self.model, self.plan, prompt=self.prompt, chunk=self.chunk)


class RNNState:
    """What the model remembers: every layer's slots. Made by `RNN.start`, `RNN.step` and `RNN.load`."""

    def __init__(self, bounded: BoundedCache) -> None:
        self._cache: BoundedCache | None = bounded

    @property
    def cache(self) -> BoundedCache:
        """The same memory as transformers' `past_key_values`."""
        if self._cache is None:
            raise StateError(
                "this state was used by an earlier step or moved by to(); use the state that call returned, or fork() "
                "before stepping. If that step failed, begin again"
            )
        return self._cache

    def take(self, batch: int) -> BoundedCache:
        """The cache for a step of `batch` sequences; the state is used up."""
        bounded = self.cache
        if self.batch not in (0, batch):
            raise StateError(f"this state holds {self.batch} sequences, {batch} were given")
        self._cache = None
        return bounded

    @property
    def layers(self) -> list[LayerSlots]:
        """The slots of every layer, or of every KV head of it where heads have budgets of their own."""
        return [layer.slots for layer in self.cache.bounded if layer.slots is not None]

    @property
    def batch(self) -> int:
        return len(self.layers[0].seen) if self.layers else 0

    @property
    def seen(self) -> list[int]:
        """Real tokens read, per sequence."""
        return self.layers[0].seen.tolist() if self.layers else []

    @property
    def held(self) -> int:
        return self.cache.held

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes

    @property
    def trace(self) -> Trace:
        self.cache.check()
        recorders = [layer.recorder for layer in self.cache.bounded]
        if None in recorders:
            raise StateError("this state keeps no trace; begin with rnn.start(trace=True)")
        deaths = [r.deaths[..., : r.length] for r in recorders if r is not None and r.deaths is not None]
        return Trace(deaths, str(self.cache.plan), self.cache.config.name_or_path)

    def fork(self) -> RNNState:
        """A second state from this point; each goes its own way."""
        self.cache.check()
        twin = copy.copy(self.cache)
        twin.layers = [_fork_layer(layer) for layer in self.cache.layers]
        return RNNState(twin)

    def to(self, device: torch.device | str) -> RNNState:
        """Moved to another device; the next step moves each layer's slots to the device of that layer."""
        bounded = self.cache
        self._cache = None
        for layer in bounded.bounded:
            layer.slots = None if layer.slots is None else layer.slots.to(device)
        return RNNState(bounded)

    def save(
        self, path: str | Path, *, tokens: Sequence[int] | None = None, notes: dict[str, str] | None = None
    ) -> None:
        """To a safetensors file, at once or not at all. `RNN.load` gives it back.

        `tokens`: all that was read, for those who must know what the state stands for; `notes`: more metadata.
        """
        save_state(path, self.cache, tokens, notes)


def pieces(token_ids: Tensor | Iterable[int], size: int) -> Iterator[list[int]]:
    """Lists of at most `size` ids, taken as they come."""
    ids = iter(token_ids.flatten().tolist() if isinstance(token_ids, Tensor) else token_ids)
    while piece := list(islice(ids, size)):
        yield piece


def _seen(bounded: BoundedCache, like: Tensor) -> Tensor:
    """[B]: real tokens read by each row so far."""
    slots = next(bounded.bounded).slots
    return like.new_zeros(len(like)) if slots is None else slots.seen.to(like.device)


def _fork_layer(layer: object) -> object:
    if not isinstance(layer, BoundedLayer):
        return copy.deepcopy(layer)
    twin = copy.copy(layer)
    twin.slots = None if layer.slots is None else layer.slots.fork()
    twin.recorder = copy.deepcopy(layer.recorder)
    return twin

"""The paper's sentence as an API: a decoder transformer is an RNN, `logits, state = rnn.step(token_ids, state)`.

A state is used once: `step` moves it on and returns it. To go two ways from one point, `fork` it first. States are
saved as safetensors whose size depends on the capacity only, and a file that does not fit is refused with the reason.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from .core.recurrence import CHUNK
from .core.reference import Prompt
from .core.slots import State
from .core.trace import Recorder, Trace
from .hf.cache import BoundedCache, BoundedLayer, Unsupported, cache
from .policy import PolicyLike, parse
from .system.files import save_tensors

PIECE = 1024  # tokens per forward while reading: activations grow with this, not with the text
_KIND = "msrnn state 1"


class StateError(ValueError):
    """A state that cannot be used, or a file that does not hold one."""


class RNN:
    """A loaded model bounded by a policy."""

    def __init__(
        self,
        model: PreTrainedModel,
        policy: PolicyLike,
        *,
        prompt: Prompt = "recurrent",
        length: int | None = None,
        chunk: int = CHUNK,
        piece: int = PIECE,
    ) -> None:
        if piece < 1:
            raise ValueError(f"piece is {piece}; it must be at least 1")
        self.model, self.prompt, self.chunk, self.piece = model, prompt, chunk, piece
        self.plan = cache(model, policy, prompt=prompt, length=length, chunk=chunk).plan

    def start(self, *, trace: bool = False) -> RNNState:
        """The empty state; with `trace`, it notes when each token leaves."""
        made = cache(self.model, self.plan, prompt=self.prompt, chunk=self.chunk)
        return RNNState(made, _record(made) if trace else None)

    def step(self, token_ids: Tensor, state: RNNState, attention_mask: Tensor | None = None) -> tuple[Tensor, RNNState]:
        """token_ids [B, T], attention_mask [B, T] (0: padding, left or right) -> logits [B, vocabulary], state.

        The logits are those after each row's last real token. T may be 1 or a whole prompt.
        """
        token_ids = self._checked(token_ids)
        real = torch.ones_like(token_ids) if attention_mask is None else attention_mask
        if real.shape != token_ids.shape:
            raise ValueError(f"the mask has the shape {tuple(real.shape)}, the tokens {tuple(token_ids.shape)}")
        made = state._take(len(token_ids))
        seen = _seen(made, token_ids)
        positions = (seen[:, None] + real.cumsum(1) - 1).clamp(min=0)
        last = real.shape[1] - 1 - real.flip(1).argmax(1)  # the last real column of each row
        wanted = torch.unique(last)
        with torch.no_grad():
            logits = self.model(
                input_ids=token_ids,
                attention_mask=None
                if attention_mask is None
                else pad(real.bool(), (made.get_seq_length(), 0), value=True),
                position_ids=positions,
                past_key_values=made,
                use_cache=True,
                logits_to_keep=wanted,
            ).logits
        rows = torch.arange(len(token_ids), device=logits.device)
        return logits[rows, torch.searchsorted(wanted, last).to(logits.device)], RNNState(made, state.trace_of)

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
        """A state saved for this very model, policy and dtype."""
        about, tensors = read_file(path)
        made = cache(self.model, self.plan, prompt=self.prompt, chunk=self.chunk)
        for name, mine in _identity(self.model, made).items():
            if about.get(name) != mine:
                raise StateError(f"{path} was made for another {name}: {_show(about.get(name))}, not {_show(mine)}")
        for index, layer in enumerate(made.bounded):
            named: dict[str, Any] = {
                name: tensors.get(f"{index}.{name}") for name in ("keys", "values", "positions", "scores", "seen")
            }
            limit, fed, packed, careful = tensors["counts"][index].tolist()
            counts: dict[str, Any] = {"limit": None if limit < 0 else limit, "fed": fed}
            layer.state = State(**named, **counts, packed=bool(packed), careful=bool(careful))
            layer.is_initialized = True
        loaded = RNNState(made, None)
        return loaded.to(self.device) if self.device.type != "cpu" else loaded


class RNNState:
    """What the model remembers: every layer's state. Made by `RNN.start`, `RNN.step` and `RNN.load`."""

    def __init__(self, made: BoundedCache, recorders: list[Recorder] | None) -> None:
        self._cache: BoundedCache | None = made
        self.trace_of = recorders

    @property
    def cache(self) -> BoundedCache:
        """The same memory as transformers' `past_key_values`."""
        if self._cache is None:
            raise StateError("this state has moved on; use the one that step returned, or fork() before stepping")
        return self._cache

    def _take(self, batch: int) -> BoundedCache:
        made = self.cache
        if self.batch not in (0, batch):
            raise StateError(f"this state holds {self.batch} sequences, {batch} were given")
        self._cache = None
        return made

    @property
    def layers(self) -> list[State]:
        return [layer.state for layer in self.cache.bounded if layer.state is not None]

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
        if self.trace_of is None:
            raise StateError("this state keeps no trace; begin with rnn.start(trace=True)")
        deaths = [r.deaths[..., : r.length] for r in self.trace_of if r.deaths is not None]
        return Trace(deaths, str(self.cache.plan), self.cache.config.name_or_path)

    def fork(self) -> RNNState:
        """A second state from this point; each goes its own way."""
        made, recorders = copy.copy(self.cache), copy.deepcopy(self.trace_of)
        made.layers = [_fork_layer(layer) for layer in self.cache.layers]
        for recorder, layer in zip(recorders or [], made.bounded, strict=False):
            layer.on_evict = recorder
        return RNNState(made, recorders)

    def to(self, device: torch.device | str) -> RNNState:
        """Moved to another device; a model spread over several devices keeps its states where its layers are."""
        made = self.cache
        self._cache = None
        for layer in made.bounded:
            layer.state = None if layer.state is None else layer.state.to(device)
        return RNNState(made, self.trace_of)

    def save(
        self, path: str | Path, *, tokens: Sequence[int] | None = None, notes: dict[str, str] | None = None
    ) -> None:
        """To a safetensors file, at once or not at all. `RNN.load` gives it back.

        `tokens`: all that was read, for those who must know what the state stands for; `notes`: more to say about it.
        """
        states = self.layers
        if not states:
            raise StateError("this state has read nothing yet; there is nothing to save")
        if len(states) != len(self.cache.layers):
            raise Unsupported("this model has layers without keys and values, whose state msrnn cannot save yet")
        tensors = {f"{i}.{k}": t.cpu().contiguous() for i, s in enumerate(states) for k, t in s.tensors().items()}
        counts = [[-1 if s.limit is None else s.limit, s.fed, s.packed, s.careful] for s in states]
        tensors["counts"] = torch.tensor(counts)
        if tokens is not None:
            if self.seen != [len(tokens)]:
                raise StateError(f"{len(tokens)} tokens were given for a state that has read {self.seen}; give all")
            tensors["tokens"] = torch.tensor(tokens)
        about = (notes or {}) | {"kind": _KIND} | _identity(self.cache.model, self.cache)
        save_tensors(path, tensors, about | {"digest": _digest(about, tensors)})


def pieces(token_ids: Tensor | Iterable[int], size: int) -> Iterator[list[int]]:
    """Lists of at most `size` ids, taken as they come."""
    ids = iter(token_ids.flatten().tolist() if isinstance(token_ids, Tensor) else token_ids)
    while piece := list(islice(ids, size)):
        yield piece


def _record(made: BoundedCache) -> list[Recorder]:
    recorders = []
    for layer in made.bounded:
        layer.on_evict = Recorder()
        recorders.append(layer.on_evict)
    return recorders


def _seen(made: BoundedCache, like: Tensor) -> Tensor:
    """[B]: real tokens read by each row so far."""
    state = next(made.bounded).state
    return like.new_zeros(len(like)) if state is None else state.seen.to(like.device)


def _fork_layer(layer: object) -> object:
    if not isinstance(layer, BoundedLayer):
        return copy.deepcopy(layer)
    twin = copy.copy(layer)
    twin.state = None if layer.state is None else layer.state.fork()
    twin.on_evict = None
    return twin


def _identity(model: PreTrainedModel, made: BoundedCache) -> dict[str, str]:
    """What a state belongs to, in the order in which a mismatch is reported."""
    policies = json.dumps([str(policy) for policy in made.plan.policies])
    return {"dtype": str(model.dtype), "policy": policies, "prompt mode": made.prompt, "model": fingerprint(model)}


def fingerprint(model: PreTrainedModel) -> str:
    """Architecture, shapes and a few numbers of every weight: cheap, and different for any other model."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        if weight.device.type != "meta":
            sample = weight.detach().flatten()[:: max(1, weight.numel() // 16)][:16]
            digest.update(sample.float().cpu().numpy().tobytes())
    return f"{model.config.model_type}, {model.num_parameters()} parameters, {digest.hexdigest()[:16]}"


def _digest(about: dict[str, str], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(f"{name}{tensors[name].dtype}{tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].view(torch.uint8).numpy().tobytes() if tensors[name].numel() else b"")
    return digest.hexdigest()


def read_file(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The parts of a state file, once it is known to be whole and unaltered."""
    if not Path(path).is_file():
        raise StateError(f"{path} is not a file; save a state there first")
    try:
        with safe_open(path, framework="pt") as file:
            about = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, ValueError) as error:
        raise StateError(f"{path} is cut short or is not a state file: {error}") from error
    if about.get("kind") != _KIND:
        raise StateError(f"{path} is not a state file of this version of msrnn; save it again")
    if about.pop("digest", None) != _digest(about, tensors):
        raise StateError(f"{path} was altered after it was saved: its contents do not match its checksum")
    return about, tensors


def _show(text: str | None) -> str:
    """A policy per layer is shown once if all are the same."""
    if text and text.startswith("["):
        each = json.loads(text)
        return each[0] if len(set(each)) == 1 else f"{len(each)} layers, {parse(each[0])} to {parse(each[-1])}"
    return text or "unknown"

"""One text read under one or more policies at once, piece by piece; each piece becomes one message for the page.

A message says, for every unit of every layer and every step, how old the token was that left and what it scored; the
negative log-likelihood of every token; and the bytes of the state. The page rebuilds everything else from these.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from ..core.heads import units_of
from ..core.trace import ALIVE, Trace
from ..hf.cost import cost
from ..hf.geometry import geometry
from ..plan import HeadPolicies, Plan, PolicyLike, parts
from ..policy import full
from ..rnn import RNN, RNNState
from .observe import LayerObserver, observe

PIECE = 64  # tokens per forward: a page at full speed gets several messages a second on two cores
NOBODY = 0xFFFF  # age of "nothing left in this step"
MAX_TOKENS = 0xFFFE  # ages are 16 bits
TEXT, TEMPLATE, USER, MODEL = range(4)  # where a token comes from

Message = dict[str, Any]


@dataclass
class Lane:
    """One policy reading the text: its state, what left in the last piece, and the logits for the next token."""

    name: str
    rnn: RNN
    state: RNNState = field(init=False)
    observers: list[LayerObserver] = field(init=False)
    seen: int = 0
    _next: Tensor | None = None  # [1, vocabulary]

    def __post_init__(self) -> None:
        self.state = self.rnn.start()
        self.observers = [] if self.full else observe(self.state)

    @property
    def full(self) -> bool:
        """Nothing ever leaves, so there is nothing to observe."""
        return all(policy.capacity is None for policy in self.rnn.plan.parts)

    @torch.no_grad()
    def read(self, ids: Sequence[int]) -> Message:
        """Read a piece; its message."""
        piece = torch.tensor([list(ids)], device=self.rnn.device)
        logits = self.rnn.model(piece, past_key_values=self.state.cache, use_cache=True).logits[0]
        self.seen += len(ids)
        message: Message = {"nll": encode(self._nll(logits, piece[0])), "bytes": self.state.nbytes}
        if not self.full:
            message |= self._evictions()
        return message

    @property
    def logits(self) -> Tensor | None:
        """[1, vocabulary], for the token to come; None before the first."""
        return self._next

    def _nll(self, logits: Tensor, ids: Tensor) -> NDArray[np.float32]:
        """[C]: how surprising each token was; NaN for the very first."""
        before = logits[:-1] if self._next is None else torch.cat([self._next, logits[:-1]])
        self._next = logits[-1:].clone()
        loss = cross_entropy(before.float(), ids[-len(before) :], reduction="none") if len(before) else ids.new_zeros(0)
        missing = np.full(len(ids) - len(before), np.nan, np.float32)
        return np.concatenate([missing, loss.float().cpu().numpy()])

    def _evictions(self) -> Message:
        """Ages and scores, uint16 [R, C]: R counts the units of all layers."""
        each = [observer.evictions for observer in self.observers if observer.evictions is not None]
        positions = torch.cat([one.positions for one in each]).cpu().numpy()
        scores = torch.cat([one.scores for one in each]).cpu().numpy()
        steps = np.arange(self.seen - positions.shape[1], self.seen)
        ages = np.where(positions < 0, NOBODY, steps - positions).astype("<u2")
        return {"left": encode(ages), "scores": encode(pack_scores(scores))}

    def slots(self, layer: int) -> Message:
        """What a layer holds now, by unit: positions in order, and their scores."""
        held = self.observers[layer].held if self.observers else None
        if held is None:
            return {"seen": self.seen, "units": []}
        units = []
        for positions, scores in zip(held.positions.cpu(), held.scores.cpu(), strict=True):
            order = positions.argsort()[(positions < 0).sum() :]
            units.append({"positions": positions[order].tolist(), "scores": scores[order].tolist()})
        return {"seen": self.seen, "units": units}


@dataclass
class Reading:
    """Several lanes over the same tokens. `full`, where there is one, stops after `full_tokens`."""

    model: PreTrainedModel
    lanes: list[Lane]
    full: Lane | None
    full_tokens: int
    seen: int = 0

    @classmethod
    def start(
        cls, model: PreTrainedModel, policies: Sequence[PolicyLike], *, length: int | None = None, full_tokens: int = 0
    ) -> Reading:
        """A lane for every policy, and one with full attention for the first `full_tokens` tokens, where asked for."""
        lanes = [Lane(f"lane{i}", RNN(model, policy, length=length)) for i, policy in enumerate(policies)]
        return cls(model, lanes, Lane("full", RNN(model, "full")) if full_tokens else None, full_tokens)

    def describe(self, policies: Sequence[str]) -> Message:
        """What the page must know before the first piece."""
        layers = geometry(self.model)
        return {
            "model": _name(self.model),
            "context": getattr(self.model.config, "max_position_embeddings", None),
            "layers": [layer.index for layer in layers],
            "lanes": [
                describe_plan(lane.rnn.plan, self.model, text) for lane, text in zip(self.lanes, policies, strict=True)
            ],
            "full_tokens": self.full_tokens,
        }

    def feed(self, ids: Sequence[int], texts: Sequence[str], kind: int = TEXT) -> Message:
        """Read a piece in every lane."""
        start, self.seen = self.seen, self.seen + len(ids)
        message: Message = {"start": start, "tokens": list(texts), "kind": kind}
        message["lanes"] = [lane.read(ids) for lane in self.lanes]
        if self.full is not None and self.full.seen == start and self.seen <= self.full_tokens:
            message["full"] = self.full.read(ids)  # a lane that missed a piece has lost the thread
        message["full_bytes"] = full_bytes(self.model, self.seen)
        return message


def describe_plan(plan: Plan, model: PreTrainedModel, text: str) -> Message:
    """A policy as the page shows it: its text, the units of each layer, and what they keep and protect."""
    layers = geometry(model)
    return {
        "policy": text,
        "capacities": plan.capacities,
        "first": _by_unit(plan, "first"),
        "last": _by_unit(plan, "last"),
        "units": [units_of(p, layer.heads, layer.kv_heads) for p, layer in zip(plan.policies, layers, strict=True)],
        "by_age": all(policy.blind for policy in plan.parts),
    }


def _by_unit(plan: Plan, name: str) -> list[int | list[int]]:
    """A setting of every layer, or of each of its KV heads where they have slots of their own."""
    by_layer = [[getattr(part, name) for part in parts(policy)] for policy in plan.policies]
    pairs = zip(plan.policies, by_layer, strict=True)
    return [values if isinstance(policy, HeadPolicies) else values[0] for policy, values in pairs]


def full_bytes(model: PreTrainedModel, length: int) -> int:
    """What an unbounded cache takes after so many tokens."""
    layers = geometry(model)
    return cost(layers, Plan((full(),) * len(layers)), model.dtype, length).full


def record(
    rnn: RNN, tokenizer: Any, ids: Iterable[int], policy: str, progress: Callable[[int], object] = lambda _: None
) -> tuple[Message, Trace]:
    """Read a text to its end under one policy, without a page: the recording for `export`, and the trace."""
    from .tokens import TokenText

    reading = Reading(rnn.model, [Lane("lane0", rnn)], None, 0)
    decode, tokens, pieces = TokenText(tokenizer), list(ids), []
    for start in range(0, len(tokens), PIECE):
        part = tokens[start : start + PIECE]
        pieces.append(reading.feed(part, [decode(token) for token in part]))
        progress(len(part))
    meta = reading.describe([policy])
    trace = Trace(_deaths(meta["lanes"][0]["units"], pieces), policy, _name(rnn.model), torch.tensor([tokens]))
    slots = [[lane.slots(layer) for layer in range(len(meta["layers"]))] for lane in reading.lanes]
    return {"meta": meta, "pieces": pieces, "answers": [], "slots": slots}, trace


def _deaths(units: Sequence[int], pieces: Sequence[Message]) -> list[Tensor]:
    """[1, U, T] per layer from the messages' ages."""
    length = sum(len(piece["tokens"]) for piece in pieces)
    deaths = np.full((sum(units), length), ALIVE, np.int32)
    for piece in pieces:
        count = len(piece["tokens"])
        ages = np.frombuffer(base64.b64decode(piece["lanes"][0]["left"]), "<u2").reshape(-1, count).astype(np.int64)
        row, step = np.nonzero(ages != NOBODY)
        when = piece["start"] + step
        deaths[row, when - ages[row, step]] = when
    return [layer[None] for layer in torch.split(torch.from_numpy(deaths), list(units))]


def encode(array: NDArray[Any]) -> str:
    """Little-endian bytes as base64 text."""
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def pack_scores(scores: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Scores as bfloat16: the upper half of a float32, rounded; three digits over the whole range."""
    return ((np.ascontiguousarray(scores, "<f4").view("<u4") + 0x8000) >> 16).astype("<u2")


def _name(model: PreTrainedModel) -> str:
    return str(model.config.name_or_path).rstrip("/").split("/")[-1] or str(model.config.model_type)

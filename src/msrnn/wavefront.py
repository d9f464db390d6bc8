"""A long prompt at a small batch: several chunks under way at once, each a layer behind the one before it.

A layer may take a chunk as soon as it is done with the last one, whatever the layers above are at. So a few chunks go
through the whole model on a stream each, and every layer's states are handed on from stream to stream. A round of such
chunks is one CUDA graph; a prompt is a few rounds. Without a GPU the same rounds run one chunk after the other.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from transformers import Cache

from . import recurrence
from .adapters.hf import BoundedCache, BoundedLayer, BoundIgnored
from .attention import Attention
from .rnn import RNN
from .state import State

LANES = 6  # chunks under way: beyond this the scans would have to wait for multiprocessors


class RelayLayer(BoundedLayer):
    """A layer whose state goes from one chunk to the next, on whatever stream that is."""

    def __init__(self, like: BoundedLayer, chunk: int) -> None:
        super().__init__(like.policy, "recurrent", chunk)
        assert like.state is not None
        self.relayed: State = like.state.fork()  # not `state`: what is asked of that waits for the device
        self.handed_on: torch.cuda.Event | None = None
        self.is_initialized = True

    def attend(self, query: Tensor, attention: Attention, real: Tensor | None) -> Tensor:
        key, value = self.pending, self.values_pending
        if key is None or value is None:
            raise BoundIgnored("attention was asked for keys that this cache did not hand out")
        self.pending = self.values_pending = None
        stream = torch.cuda.current_stream() if query.is_cuda else None
        if stream is not None and self.handed_on is not None:
            stream.wait_event(self.handed_on)
        output = recurrence.run(self.relayed, query, key, value, self.policy, attention, None, "recurrent", self.chunk)
        if stream is not None:
            self.handed_on = stream.record_event()
        return output

    def take(self, state: State) -> None:
        """Begin again from a state that was read elsewhere, in the same memory."""
        for name, mine in self.relayed.tensors().items():
            mine.copy_(state.tensors()[name])
        self.relayed.fed, self.relayed.packed = state.fed, state.packed

    def get_seq_length(self) -> int:
        return self.relayed.fed


class Wavefront:
    """Reads prompts of one shape, `batch` rows without padding. Made once; captured at the first long prompt."""

    def __init__(self, rnn: RNN, batch: int = 1, lanes: int = LANES) -> None:
        if lanes < 1:
            raise ValueError(f"lanes is {lanes}; it must be at least 1")
        capacities = [policy.capacity for policy in rnn.plan.policies]
        if None in capacities:
            raise ValueError(f"{rnn.plan} keeps every token; only bounded states are read in a wavefront")
        self.rnn, self.batch, self.lanes, self.chunk = rnn, batch, lanes, rnn.chunk
        self.round = lanes * self.chunk
        self.before = max(c + 1 for c in capacities if c is not None)  # from here on every layer's shapes stay the same
        self.cache: BoundedCache | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        device = rnn.device
        self.tokens = torch.zeros(batch, self.round, dtype=torch.int64, device=device)
        self.start = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.streams = [torch.cuda.Stream(device) for _ in range(lanes)] if device.type == "cuda" else []

    def fits(self, batch: int, length: int) -> bool:
        """Whether a prompt is long enough for a round, after which at least a token is left."""
        return batch == self.batch and length > self.before + self.round

    @torch.no_grad()
    def read(self, ids: Tensor) -> tuple[Tensor, BoundedCache]:
        """ids [B, T] -> logits [B, vocabulary] after the last token, and the states."""
        if not self.fits(*ids.shape):
            raise ValueError(f"{tuple(ids.shape)} tokens are too few for rounds of {self.round} after {self.before}")
        state = self.rnn.start()
        _, state = self.rnn.step(ids[:, : self.before], state)
        rounds = (ids.shape[1] - self.before - 1) // self.round
        self._take(state.cache)
        for index in range(rounds):
            at = self.before + index * self.round
            self.tokens.copy_(ids[:, at : at + self.round])
            self.start.fill_(at)
            self._round()
        done = state.cache
        self._give(done)
        rest = ids[:, self.before + rounds * self.round :]
        for part in rest.split(self.rnn.piece, 1):
            logits, state = self.rnn.step(part, state)
        return logits, state.cache

    def _take(self, read: BoundedCache) -> None:
        if self.cache is None:
            self.cache = _relay(read, self.chunk)
        for mine, theirs in zip(self._layers, read.bounded, strict=True):
            assert theirs.state is not None
            mine.take(theirs.state)

    def _give(self, read: BoundedCache) -> None:
        for mine, theirs in zip(self._layers, read.bounded, strict=True):
            theirs.state = mine.relayed.fork()

    @property
    def _layers(self) -> list[RelayLayer]:
        assert self.cache is not None
        return [layer for layer in self.cache.layers if isinstance(layer, RelayLayer)]

    def _round(self) -> None:
        """The chunks of one round; captured the second time, when every kernel has been compiled."""
        if self.rnn.device.type != "cuda":
            self._chunks()
            return
        if self.graph is None:
            kept = [(layer.relayed.fork(), layer) for layer in self._layers]
            self._chunks()
            for state, layer in kept:
                layer.take(state)
            torch.cuda.synchronize()
            self._capture()
        else:
            for layer in self._layers:
                layer.relayed.fed += self.round
        assert self.graph is not None
        self.graph.replay()

    def _capture(self) -> None:
        for layer in self._layers:
            layer.handed_on = None  # nothing from outside of the graph
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._chunks()
        for layer in self._layers:
            layer.handed_on = None

    def _chunks(self) -> None:
        """Each chunk through all layers on its own stream. What one needs of another, the layers hand on."""
        streams, main = self.streams, torch.cuda.current_stream() if self.streams else None
        for lane in range(self.lanes):
            part = slice(lane * self.chunk, (lane + 1) * self.chunk)
            if main is not None:
                streams[lane].wait_stream(main)
            with _on(streams[lane] if streams else None):
                offsets = torch.arange(part.start, part.stop, device=self.rnn.device)
                self._forward(self.tokens[:, part], self.start + offsets)
        for stream in streams:
            assert main is not None
            main.wait_stream(stream)

    def _forward(self, tokens: Tensor, positions: Tensor) -> None:
        self.rnn.model(
            input_ids=tokens, position_ids=positions, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _relay(read: BoundedCache, chunk: int) -> BoundedCache:
    """A cache like the one that was read, whose layers hand their states on."""
    made = object.__new__(BoundedCache)
    made.model, made.plan, made.prompt, made.config = read.model, read.plan, read.prompt, read.config
    Cache.__init__(made, layers=[RelayLayer(layer, chunk) for layer in read.bounded])
    return made

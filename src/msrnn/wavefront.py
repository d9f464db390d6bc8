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

LANES = 7  # chunks under way: beyond this the scans would have to wait for multiprocessors


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
    """Reads prompts of `batch` rows without padding. Made once; captured at the first long prompt."""

    def __init__(self, rnn: RNN, batch: int = 1, lanes: int = LANES) -> None:
        if lanes < 1:
            raise ValueError(f"lanes is {lanes}; it must be at least 1")
        capacities = [policy.capacity for policy in rnn.plan.policies]
        if None in capacities:
            raise ValueError(f"{rnn.plan} keeps every token; only bounded states are read in a wavefront")
        self.rnn, self.batch, self.lanes, self.chunk = rnn, batch, lanes, rnn.chunk
        self.before = max(c for c in capacities if c is not None)  # from here on every layer's shapes stay the same
        self.cache: BoundedCache | None = None
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # by lanes, with the logits they leave
        device = rnn.device
        self.tokens = torch.zeros(batch, lanes * self.chunk, dtype=torch.int64, device=device)
        self.start = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        streams = lanes if device.type == "cuda" else 0
        self.streams = [torch.cuda.Stream(device) for _ in range(streams)]  # type: ignore[no-untyped-call]

    def fits(self, batch: int, length: int) -> bool:
        """Whether a prompt is long enough to fill every lane once."""
        return batch == self.batch and length >= self.before + self.lanes * self.chunk

    @torch.no_grad()
    def read(self, ids: Tensor) -> tuple[Tensor, BoundedCache]:
        """ids [B, T] -> logits [B, vocabulary] after the last token, and the states."""
        if not self.fits(*ids.shape):
            raise ValueError(f"{tuple(ids.shape)} tokens are too few for {self.lanes} chunks of {self.chunk} at once")
        logits, state = self.rnn.step(ids[:, : self.before], self.rnn.start())
        self._take(state.cache)
        at = self.before
        while lanes := min(self.lanes, (ids.shape[1] - at) // self.chunk):
            logits = self._round(lanes, ids[:, at : at + lanes * self.chunk], at)
            at += lanes * self.chunk
        self._give(state.cache)
        if at < ids.shape[1]:
            logits, state = self.rnn.step(ids[:, at:], state)
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

    def _round(self, lanes: int, tokens: Tensor, at: int) -> Tensor:
        """So many chunks, from position `at` on: the logits after them."""
        self.tokens[:, : tokens.shape[1]] = tokens
        self.start.fill_(at)
        if not self.streams:
            return self._chunks(lanes)
        if lanes not in self.graphs:
            self._capture(lanes)
        else:
            for layer in self._layers:
                layer.relayed.fed += tokens.shape[1]
        graph, logits = self.graphs[lanes]
        graph.replay()
        return logits.clone()

    def _capture(self, lanes: int) -> None:
        """A graph of a round. Before the first, all is run once and undone, so that every kernel is compiled."""
        if not self.graphs:
            kept = [(layer, layer.relayed.fork()) for layer in self._layers]
            self._chunks(lanes)
            for layer, state in kept:
                layer.take(state)
        torch.cuda.synchronize()
        self._forget_events()  # a graph may not wait for what is outside of it
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._chunks(lanes)
        self._forget_events()
        self.graphs[lanes] = graph, logits

    def _forget_events(self) -> None:
        for layer in self._layers:
            layer.handed_on = None

    def _chunks(self, lanes: int) -> Tensor:
        """Each chunk through all layers on its own stream. What one needs of another, the layers hand on."""
        streams, main = self.streams[:lanes], torch.cuda.current_stream() if self.streams else None
        for lane in range(lanes):
            part = slice(lane * self.chunk, (lane + 1) * self.chunk)
            if main is not None:
                streams[lane].wait_stream(main)
            with _on(streams[lane] if streams else None):
                offsets = torch.arange(part.start, part.stop, device=self.rnn.device)
                logits = self._forward(self.tokens[:, part], self.start + offsets)
        for stream in streams:
            assert main is not None
            main.wait_stream(stream)
        return logits

    def _forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = self.rnn.model(
            input_ids=tokens, position_ids=positions, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        ).logits
        return logits[:, -1]


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _relay(read: BoundedCache, chunk: int) -> BoundedCache:
    """A cache like the one that was read, whose layers hand their states on."""
    made = object.__new__(BoundedCache)
    made.model, made.plan, made.prompt, made.config = read.model, read.plan, read.prompt, read.config
    Cache.__init__(made, layers=[RelayLayer(layer, chunk) for layer in read.bounded])
    return made

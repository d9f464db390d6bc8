"""A long prompt alone: several chunks under way at once, each a layer behind the one before it.

A layer may take a chunk as soon as it is done with the last one, whatever the layers above are at. So chunks go through
the whole model on a few streams, the lanes, and every layer's states are handed on from stream to stream. A round of
chunks is one CUDA graph, in which a lane goes on to its next chunk without waiting for the others; a prompt is a few
rounds. Without a GPU the same rounds run one chunk after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property

import torch
from torch import Tensor
from transformers import Cache

from ..core import recurrence
from ..core.attention import Attention
from ..core.slots import State
from ..core.workspace import Columns
from ..hf.cache import BoundedCache, BoundedLayer, BoundIgnored
from ..kernels.triton import concurrency as beside
from ..rnn import RNN
from .compiled import fused
from .projections import Joined

CHUNK = 256  # tokens: the weights are read once for each chunk
LANES = 12  # chunks under way at once: more would leave the matmuls too few processors
LAPS = 4  # chunks that a lane takes in the longest round: at both of a round's ends lanes stand idle


class Standing(Columns):
    """Columns that stay open from chunk to chunk, in memory of their own, so that nothing is copied in between."""

    def __init__(self, state: State, chunk: int) -> None:
        assert state.limit is not None
        self.state, self.used = state, state.limit - 1

        def wide(rows: Tensor, dim: int, value: int = 0) -> Tensor:
            shape = (*rows.shape[:dim], self.used + chunk, *rows.shape[dim + 1 :])
            return rows.new_full(shape, value)

        self._keys, self._values = wide(state.keys, 2), wide(state.values, 2)
        self._births = wide(state.positions, 2, -1)
        self._scores = None if state.scores is None else wide(state.scores, 2)

    def open(self) -> None:
        """Begin again from the state, which is full."""
        self.used = self.state.filled
        pairs = [(self._keys, self.state.keys), (self._values, self.state.values), (self._births, self.state.positions)]
        if self._scores is not None and self.state.scores is not None:
            pairs.append((self._scores, self.state.scores))
        for mine, theirs in pairs:
            mine[:, :, : self.used] = theirs[:, :, : self.used]


class RelayLayer(BoundedLayer):
    """A layer whose state goes from one chunk to the next, on whatever stream that is."""

    def __init__(self, like: BoundedLayer, chunk: int) -> None:
        super().__init__(like.policy, "recurrent", chunk)
        assert like.state is not None
        self.relayed: State = like.state.fork()  # not `state`: what is asked of that waits for the device
        self.columns = Standing(self.relayed, chunk)
        self.offsets = torch.arange(chunk, device=self.relayed.seen.device)
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
        output = self._advance(query, key, value, attention)
        if stream is not None:
            self.handed_on = stream.record_event()
        return output

    def _advance(self, query: Tensor, key: Tensor, value: Tensor, attention: Attention) -> Tensor:
        """A chunk of the recurrence in columns that stay open."""
        share = self.relayed.keys.shape[1] // key.shape[1]
        if share > 1:  # every query head decides alone, so each has rows of its own
            key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
        size = query.shape[2]
        steps = self.relayed.seen[:, None] + self.offsets
        self.columns.add(key, value, steps)
        output = value.new_empty(len(query), size, query.shape[1], value.shape[3]).transpose(1, 2)
        self.columns.keep(*recurrence._chunk(output, self.columns, query, steps, self.policy, attention, size))
        self.relayed.seen += size
        self.relayed.fed += size
        return output

    def take(self, state: State) -> None:
        """Begin again from a state that was read elsewhere, in the same memory."""
        for name, mine in self.relayed.tensors().items():
            mine.copy_(state.tensors()[name])
        self.relayed.fed, self.relayed.packed, self.relayed.careful = state.fed, state.packed, state.careful
        self.columns.open()

    def give(self) -> State:
        """What the state is now."""
        self.columns.close()
        return self.relayed.fork()

    def get_seq_length(self) -> int:
        return 0  # positions are given with the tokens


class Wavefront:
    """Reads one prompt at a time. Made once; rounds of each size are captured at first use."""

    def __init__(
        self,
        rnn: RNN,
        *,
        chunk: int = CHUNK,
        lanes: int = LANES,
        laps: int = LAPS,
        compiled: bool = False,
        joined: bool | None = None,
    ) -> None:
        """`compiled` lets torch.compile fuse what lies between the matmuls; `joined` (None: on a GPU) joins those."""
        for name, value in (("chunk", chunk), ("lanes", lanes), ("laps", laps)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        capacities = [policy.capacity for policy in rnn.plan.policies]
        if None in capacities:
            raise ValueError(f"{rnn.plan} keeps every token; only bounded states are read in a wavefront")
        self.rnn, self.chunk, self.lanes, self.laps = rnn, chunk, lanes, laps
        self.before = max(2, *(c for c in capacities if c is not None))  # from here on all shapes stay the same
        self._call = fused(self._forward) if compiled else self._forward
        self.cache: BoundedCache | None = None
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # by chunks, with the logits they leave
        device = rnn.device
        self.tokens = torch.zeros(1, laps * lanes * chunk, dtype=torch.int64, device=device)
        self.start = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self.joined = device.type == "cuda" if joined is None else joined
        self._weights = Joined(rnn.model) if self.joined else nullcontext()

    @cached_property
    def streams(self) -> list[torch.cuda.Stream]:
        """The lanes on a GPU. Taken when first needed: PyTorch has 32 streams for all, and many never read so."""
        lanes = self.lanes if self.rnn.device.type == "cuda" else 0
        return [torch.cuda.Stream(self.rnn.device) for _ in range(lanes)]  # type: ignore[no-untyped-call]

    @cached_property
    def _aside(self) -> torch.cuda.Stream:
        """Not PyTorch's own for captures: who destroys a graph frees the workspace of all that its stream captured."""
        return torch.cuda.Stream(self.rnn.device)  # type: ignore[no-untyped-call]

    def fits(self, length: int) -> bool:
        """Whether a prompt is long enough to fill every lane once."""
        return length >= self.before + self.lanes * self.chunk

    @torch.no_grad()
    def read(self, ids: Tensor, on_read: Callable[[int], None] | None = None) -> tuple[Tensor, BoundedCache]:
        """ids [1, T] -> logits [1, vocabulary] after the last token, and the state; `on_read` hears how many at once.

        A prompt that does not fit is read, too, in fewer chunks.
        """
        told = on_read or (lambda _: None)
        logits, state = self.rnn.step(ids[:, : self.before], self.rnn.start())
        at = min(self.before, ids.shape[1])
        told(at)
        if size := self._size(ids.shape[1] - at):
            self._take(state.cache)
            while size:
                tokens = ids[:, at : at + size * self.chunk]
                logits, at = self._round(size, tokens, at), at + tokens.shape[1]
                told(tokens.shape[1])
                size = self._size(ids.shape[1] - at)
            self._give(state.cache)
        if at < ids.shape[1]:
            logits, state = self.rnn.step(ids[:, at:], state)
            told(ids.shape[1] - at)
        return logits, state.cache

    def _size(self, left: int) -> int:
        """Chunks of the next round: few sizes, so that few graphs are captured."""
        chunks = left // self.chunk
        if chunks <= self.lanes:
            return chunks
        return self.lanes * min(self.laps, 1 << (chunks // self.lanes).bit_length() - 1)

    def _take(self, read: BoundedCache) -> None:
        if self.cache is None:
            self.cache = _relay(read, self.chunk)
        for mine, theirs in zip(self._layers, read.bounded, strict=True):
            assert theirs.state is not None
            mine.take(theirs.state)

    def _give(self, read: BoundedCache) -> None:
        for mine, theirs in zip(self._layers, read.bounded, strict=True):
            theirs.state = mine.give()

    @property
    def _layers(self) -> list[RelayLayer]:
        assert self.cache is not None
        return [layer for layer in self.cache.layers if isinstance(layer, RelayLayer)]

    def _round(self, size: int, tokens: Tensor, at: int) -> Tensor:
        """So many chunks, from position `at` on: the logits after them."""
        self.tokens[:, : tokens.shape[1]] = tokens
        self.start.fill_(at)
        if not self.streams:
            return self._chunks(size)
        if size not in self.graphs:
            self._capture(size)
        else:
            for layer in self._layers:
                layer.relayed.fed += tokens.shape[1]
        graph, logits = self.graphs[size]
        graph.replay()
        return logits.clone()

    def _capture(self, size: int) -> None:
        """A graph of a round. Before the first, all is run once and undone, so that every kernel is compiled."""
        if not self.graphs:
            kept = [(layer, layer.give()) for layer in self._layers]
            self._chunks(min(size, self.lanes), apart=True)
            for layer, state in kept:
                layer.take(state)
        torch.cuda.synchronize()
        self._forget_events()  # a graph may not wait for what is outside of it
        graph, others = torch.cuda.CUDAGraph(), [graph for graph, _ in self.graphs.values()]
        pool = others[0].pool() if others else None  # one is done before the next begins
        with torch.cuda.graph(graph, pool=pool, stream=self._aside):
            logits = self._chunks(size)
        self._forget_events()
        self.graphs[size] = graph, logits

    def _forget_events(self) -> None:
        for layer in self._layers:
            layer.handed_on = None

    def _chunks(self, size: int, apart: bool = False) -> Tensor:
        """Each chunk through all layers on a lane. What one needs of another, the layers hand on.

        `apart`: none begins before the last is done, for the only reading that is no graph.
        """
        lanes, mains = self.streams[:size], [torch.cuda.current_stream()] if self.streams else []
        for stream in lanes:
            stream.wait_stream(mains[0])
        with beside.together(min(size, self.lanes)), self._weights:
            for index in range(size):
                part = slice(index * self.chunk, (index + 1) * self.chunk)
                with _on(lanes[index % len(lanes)] if lanes else None):
                    offsets = torch.arange(part.start, part.stop, device=self.rnn.device)
                    logits = self._call(self.tokens[:, part], self.start + offsets)
                if apart:
                    torch.cuda.synchronize()
        for stream in lanes:
            mains[0].wait_stream(stream)
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

"""The layer-by-token map as a small HTML fragment for notebooks: a PNG made here, a caption and a legend.

A notebook shows it without running any script, also where it is not trusted. The colours are those of the page.
"""

from __future__ import annotations

import base64
import html
import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.heads import parts_of
from ..core.trace import Trace
from ..hf.cost import cost
from ..hf.geometry import geometry
from ..plan import Plan
from ..policy import full
from ..system.sizes import human

if TYPE_CHECKING:
    from ..hf.cache import BoundedCache

WIDTH = 960  # pixels at most; longer texts have several tokens in a column
NOT_HELD = (238, 241, 244)
_LEVELS = np.array([(214, 230, 246), (176, 208, 238), (94, 155, 211), (47, 116, 181), (15, 69, 128)])


def trace_html(trace: Trace) -> str:
    """What every layer still held at the end of a trace; row 0 of a batch."""
    if not trace.length:
        return f"<p>Trace of {html.escape(trace.policy)}: nothing was read yet</p>"
    last = trace.length - 1
    held = torch.stack([trace.held(layer, last)[0].float().mean(0) for layer in range(len(trace.deaths))])
    ages = torch.cat([trace.ages(layer)[0].flatten().float() for layer in range(len(trace.deaths))])
    title = f"{trace.policy}{_of(trace.model)}: {trace.length:,} tokens read"
    about = f"a layer holds {held.sum(1).mean():,.0f} on average; a token stays {ages.mean():,.0f} steps on average"
    return _figure(held.numpy(), title, about)


def cache_html(cache: BoundedCache) -> str:
    """What every layer of a cache holds now, and what that takes; row 0 of a batch."""
    layers = [layer.slots for layer in cache.bounded if layer.slots is not None]
    read = cache.get_seq_length()
    title = f"{cache.plan}{_of(str(cache.config.name_or_path))}: {read:,} tokens read"
    if not layers or not read:
        return f"<p>{html.escape(title)}</p>"
    held = torch.zeros(len(layers), read)
    for row, slots in enumerate(layers):
        units = [unit for part in parts_of(slots) for unit in part.positions[0].cpu()]
        for unit in units:
            held[row, unit[unit >= 0]] += 1 / len(units)
    every = cost(geometry(cache.model), Plan((full(),) * len(layers)), cache.model.dtype, read).full
    sizes = f"{human(cache.nbytes)}; a full cache takes {human(every)}"
    return _figure(held.numpy(), title, f"a layer holds {held.sum(1).mean():,.0f} on average, in all {sizes}")


def _of(model: str) -> str:
    name = model.rstrip("/").split("/")[-1]
    return f" on {name}" if name else ""


def _figure(held: NDArray[np.float32], title: str, about: str) -> str:
    """held [L, T]: the share of each layer's units that hold a token."""
    data = base64.b64encode(map_png(held)).decode()
    layers, tokens = held.shape
    swatch = "display:inline-block;width:1em;height:.8em;margin:0 .3em 0 1em;border:1px solid #8888"
    legend = "".join(
        f'<span style="{swatch};background:rgb{tuple(int(c) for c in colour)}"></span>{label}'
        for colour, label in ((_LEVELS[-1], "held"), (NOT_HELD, "dropped"))
    )
    alt = f"Map of {layers} layers by {tokens} tokens: {about}"
    return (
        f'<figure style="margin:0"><figcaption><b>{html.escape(title)}</b><br>{html.escape(about)}</figcaption>'
        f'<img src="data:image/png;base64,{data}" alt="{html.escape(alt)}" '
        f'style="width:100%;max-width:{WIDTH}px;height:{max(4 * layers, 60)}px;image-rendering:pixelated;margin:6px 0">'
        f'<div style="font-size:smaller">down: layer 0 to {layers - 1}; across: token 0 to {tokens - 1:,}{legend}</div>'
        "</figure>"
    )


def map_png(held: NDArray[Any]) -> bytes:
    """held [L, T] with shares from 0 to 1 -> a PNG with a row a layer and a column a token, or several."""
    layers, tokens = held.shape
    columns = min(tokens, WIDTH)
    edges = np.arange(columns) * tokens // columns
    share = np.add.reduceat(held, edges, axis=1) / np.diff(np.append(edges, tokens))
    # a few held tokens among many dropped ones must stay visible
    level = np.clip(np.ceil(share * len(_LEVELS)) - 1, 0, len(_LEVELS) - 1).astype(int)
    pixels = np.where(share[..., None] > 0, _LEVELS[level], NOT_HELD).astype(np.uint8)
    rows = b"".join(b"\x00" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", columns, layers, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

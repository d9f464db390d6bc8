"""Rich display in notebooks."""

import base64
import re
import zlib

import numpy as np
import torch

import msrnn
from msrnn.plan import per_layer
from msrnn.play.display import NOT_HELD, cache_html, map_png, trace_html
from tests.support.models import tiny_llama


def pixels(page: str) -> np.ndarray:
    """The picture of a fragment, [rows, columns, 3]."""
    data = base64.b64decode(re.search(r"base64,([^\"]+)\"", page)[1])
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    start = data.index(b"IDAT")
    rows = zlib.decompress(data[start + 4 : start + 4 + int.from_bytes(data[start - 4 : start], "big")])
    return np.frombuffer(rows, np.uint8).reshape(height, 1 + 3 * width)[:, 1:].reshape(height, width, 3)


def test_trace_and_cache_show_which_tokens_every_layer_holds():
    model = tiny_llama()
    rnn = msrnn.RNN(model, "tova:6")
    _, state = rnn.step(torch.arange(40)[None], rnn.start(trace=True))
    held = torch.stack([state.trace.held(layer, 39)[0, 0] for layer in range(3)]).numpy()
    for page in (trace_html(state.trace), cache_html(state.cache)):
        assert ((pixels(page) != NOT_HELD).any(-1) == held).all()
        assert "40 tokens read" in page
        assert "6 on average" in page


def test_heads_with_slots_of_their_own():
    rnn = msrnn.RNN(tiny_llama(), per_layer("fade", [[3, 20], [30, 6], [9, 9]]))
    _, state = rnn.step(torch.arange(60)[None], rnn.start(trace=True))
    held = torch.stack([state.trace.held(layer, 59)[0].any(0) for layer in range(3)]).numpy()
    for page in (trace_html(state.trace), cache_html(state.cache)):
        assert ((pixels(page) != NOT_HELD).any(-1) == held).all()
        assert "fade:avg=12.8333" in page
        assert "a layer holds 13 on average" in page


def test_a_long_map_keeps_single_tokens_visible():
    held = np.zeros((2, 10_000), np.float32)
    held[1, 7777] = 1
    picture = pixels(f'base64,{base64.b64encode(map_png(held)).decode()}"')
    assert picture.shape == (2, 960, 3)
    assert ((picture != NOT_HELD).any(-1).sum(1) == [0, 1]).all()


def test_nothing_read_yet_and_names_with_markup():
    cache = msrnn.cache(tiny_llama(), "tova:6")
    assert "0 tokens read" in cache_html(cache)
    trace = msrnn.Trace([torch.full((1, 1, 3), 5, dtype=torch.int32)], "tova:2", "<b>model</b>")
    assert "<b>model" not in trace_html(trace)

"""A run as one HTML file that needs nothing else: the page's own scripts and styles, and the run's messages.

The file's Content-Security-Policy allows exactly these scripts and styles by their hashes, and no request to anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from ..core.trace import Trace
from ..rnn import RNN
from ..system.console import progress
from ..system.files import write_text
from .reading import Message, encode, record
from .tokens import TokenText

_SCRIPT = re.compile(r'<script defer src="([\w.]+)"></script>')
_STYLE = re.compile(r'<link rel="stylesheet" href="([\w.]+)">')
_ICON = re.compile(r'<link rel="icon"[^>]*>')


def page_html(recording: Message) -> str:
    """The self-contained page of a recording."""
    page = _asset("index.html")
    style = "\n".join(_asset(name) for name in _STYLE.findall(page))
    script = "\n".join(_asset(name) for name in _SCRIPT.findall(page))
    data = json.dumps(recording, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    policy = f"default-src 'none'; img-src data: blob:; script-src '{_hash(script)}'; style-src '{_hash(style)}'"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
    body = f'<script type="application/json" id="recording">{data}</script>\n<script>{script}</script>\n</body>'
    page = _ICON.sub("", _SCRIPT.sub("", _STYLE.sub("", page)))
    page = page.replace("<html ", '<html class="static" ', 1)
    # parts are put in by position, never through a pattern: their own text may hold anything
    before, after = page.split("</head>", 1)
    middle, end = after.rsplit("</body>", 1)
    return f"{before}{head}\n</head>{middle}{body}{end}"


def write_page(
    path: str | Path, rnn: RNN, tokenizer: Any, ids: Iterable[int], *, total: int | None = None, quiet: bool = True
) -> Trace:
    """Read a text, write its page and return its trace; a prompt read at once has no scores and no perplexity."""
    tokens = list(ids)
    with progress(total or len(tokens), "reading", "tok", quiet) as done:
        if rnn.prompt == "recurrent":
            recording, trace = record(rnn, tokenizer, tokens, str(rnn.plan), done.update)
        else:
            _, state = rnn.step(torch.tensor([tokens]), rnn.start(trace=True))
            trace = state.trace
            trace.tokens = torch.tensor([tokens])
            recording = from_trace(trace, tokenizer)
    write_text(path, page_html(recording))
    return trace


def from_trace(trace: Trace, tokenizer: Any) -> Message:
    """A recording from a trace alone: what left when, without scores, memory and perplexity. Row 0 of a batch."""
    if trace.tokens is None:
        raise ValueError("the trace does not know its tokens, so there is no text to show; make it with `msrnn trace`")
    decode = TokenText(tokenizer)
    texts = [decode(token) for token in trace.tokens[0].tolist()]
    units = [layer.shape[1] for layer in trace.deaths]
    deaths = torch.cat([layer[0] for layer in trace.deaths]).to(torch.int32).numpy()
    lane = {"policy": trace.policy, "units": units, "capacities": [], "by_age": False}
    name = trace.model.rstrip("/").split("/")[-1]
    meta = {"model": name, "layers": list(range(len(units))), "lanes": [lane], "total": len(texts), "kind": "text"}
    piece = {"start": 0, "tokens": texts, "kind": 0, "lanes": [{"deaths": encode(deaths)}]}
    return {"meta": meta, "pieces": [piece], "answers": [], "slots": None}


def _asset(name: str) -> str:
    return (resources.files("msrnn.play") / "page" / name).read_text("utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"

"""A run as one HTML file that needs nothing else: the page's own scripts and styles, and the run's messages.

The file's Content-Security-Policy allows exactly these scripts and styles by their hashes, and no request to anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from importlib import resources
from typing import TYPE_CHECKING, Any

from .reading import Message, describe_plan, encode, full_bytes

if TYPE_CHECKING:
    from ..core.trace import Trace

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


def from_trace(trace: Trace, texts: list[str], model: Any = None) -> Message:
    """A recording from a trace alone: what left when, without scores and perplexity. Row 0 of a batch."""
    import torch

    deaths = torch.cat([layer[0] for layer in trace.deaths]).to(torch.int32)
    units = [layer.shape[1] for layer in trace.deaths]
    lane: Message = {"policy": trace.policy, "units": units, "capacities": [], "by_age": False, "momentum": 0}
    meta: Message = {"model": trace.model, "layers": list(range(len(units))), "full_tokens": 0, "kind": "text"}
    piece: Message = {"start": 0, "tokens": texts, "kind": 0, "lanes": [{"deaths": encode(deaths.numpy())}]}
    if model is not None:
        from ..rnn import RNN

        lane = describe_plan(RNN(model, trace.policy).plan, model, trace.policy)
        piece["full_bytes"] = full_bytes(model, len(texts))
    return {"meta": meta | {"lanes": [lane], "total": len(texts)}, "pieces": [piece], "answers": [], "slots": None}


def _asset(name: str) -> str:
    return (resources.files("msrnn.play") / "page" / name).read_text("utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"

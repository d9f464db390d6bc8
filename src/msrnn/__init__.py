"""msrnn: any Hugging Face decoder LLM as a bounded multi-state RNN, with a memory of at most k tokens per layer.

model, tokenizer = msrnn.load()
model.generate(**inputs, past_key_values=msrnn.cache(model, "tova:512"))
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core.trace import Trace
    from .engine.engine import Engine, Finished, Request
    from .hf.cache import BoundedCache, BoundIgnored, Unsupported, cache
    from .hf.load import load
    from .policy import Plan, Policy, fade, full, h2o, parse, read_profile, spread, tova, window
    from .rnn import RNN, RNNState, StateError

__version__ = "0.1.0"
__all__ = [
    "RNN",
    "BoundIgnored",
    "BoundedCache",
    "Engine",
    "Finished",
    "Plan",
    "Policy",
    "RNNState",
    "Request",
    "StateError",
    "Trace",
    "Unsupported",
    "cache",
    "fade",
    "full",
    "h2o",
    "load",
    "parse",
    "read_profile",
    "spread",
    "tova",
    "window",
]

# Where each name lives. It is imported when first asked for: torch and transformers take seconds, `--help` must not.
_HOME = {
    "hf.cache": ("BoundIgnored", "BoundedCache", "Unsupported", "cache"),
    "engine.engine": ("Engine", "Finished", "Request"),
    "hf.load": ("load",),
    "policy": ("Plan", "Policy", "fade", "full", "h2o", "parse", "read_profile", "spread", "tova", "window"),
    "rnn": ("RNN", "RNNState", "StateError"),
    "core.trace": ("Trace",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOME.items():
        if name in names:
            found = globals()[name] = getattr(import_module(f".{home}", __name__), name)
            return found
    if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""msrnn: Hugging Face decoder LLMs as bounded multi-state RNNs, with a memory of at most k tokens per layer.

model, tokenizer = msrnn.load()
model.generate(**inputs, past_key_values=msrnn.cache(model, "tova:512"))
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .budgets.profile import read_profile
    from .core.trace import Trace
    from .engine.engine import Engine, EngineOptions
    from .engine.request import Finished, Request
    from .hf.attention import BoundIgnored
    from .hf.cache import BoundedCache, cache
    from .hf.geometry import Unsupported
    from .hf.load import load
    from .plan import Plan, per_layer
    from .policy import Policy, blend, fade, full, h2o, parse_policy, tova, window
    from .rnn import RNN, RNNState
    from .state_file import StateError

__version__ = "0.1.0"
__all__ = [
    "RNN",
    "BoundIgnored",
    "BoundedCache",
    "Engine",
    "EngineOptions",
    "Finished",
    "Plan",
    "Policy",
    "RNNState",
    "Request",
    "StateError",
    "Trace",
    "Unsupported",
    "blend",
    "cache",
    "fade",
    "full",
    "h2o",
    "load",
    "parse_policy",
    "per_layer",
    "read_profile",
    "tova",
    "window",
]

# Where each name lives. It is imported when first asked for: torch and transformers take seconds, `--help` must not.
_HOME = {
    "budgets.profile": ("read_profile",),
    "core.trace": ("Trace",),
    "engine.engine": ("Engine", "EngineOptions"),
    "engine.request": ("Finished", "Request"),
    "hf.attention": ("BoundIgnored",),
    "hf.cache": ("BoundedCache", "cache"),
    "hf.geometry": ("Unsupported",),
    "hf.load": ("load",),
    "plan": ("Plan", "per_layer"),
    "policy": ("Policy", "blend", "fade", "full", "h2o", "parse_policy", "tova", "window"),
    "rnn": ("RNN", "RNNState"),
    "state_file": ("StateError",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f".{module}", __name__), name)
            return value
    if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

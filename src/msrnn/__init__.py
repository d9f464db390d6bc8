"""msrnn: any Hugging Face decoder LLM as a bounded multi-state RNN, with a memory of at most k tokens per layer.

model, tokenizer = msrnn.load()
model.generate(**inputs, past_key_values=msrnn.cache(model, "tova:512"))
"""

from .adapters.hf import BoundedCache, BoundIgnored, Unsupported, cache
from .models import load
from .policy import Plan, Policy, full, h2o, parse, read_profile, spread, tova, window
from .rnn import RNN, RNNState, StateError
from .trace import Trace

__version__ = "0.1.0"
__all__ = [
    "RNN",
    "BoundIgnored",
    "BoundedCache",
    "Plan",
    "Policy",
    "RNNState",
    "StateError",
    "Trace",
    "Unsupported",
    "cache",
    "full",
    "h2o",
    "load",
    "parse",
    "read_profile",
    "spread",
    "tova",
    "window",
]

"""The transformers adapter: bounded caches, the attention hook, what models look like, loading them."""

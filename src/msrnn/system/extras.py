"""Where optional packages come from: the one command that messages name."""


def install(extra: str) -> str:
    """What to type where the packages of an extra are missing; msrnn is on no package index."""
    return f'pip install ".[{extra}]" in a clone of msrnn'

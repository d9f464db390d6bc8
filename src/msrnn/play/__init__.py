"""The playground: a local page that shows what each layer of a bounded model still holds, while it reads.

`observe` sees evictions and scores, `reading` reads a text under a policy, `runs` and `scheduler` queue the work,
`server` serves the page, `export` writes a run into one HTML file, `display` draws the map for notebooks. The page
itself is in `page/`.
"""

from importlib import resources


def example_text() -> str:
    """A short story, about 1,500 tokens: what the page begins with."""
    return (resources.files(__name__) / "page" / "example.txt").read_text("utf-8")

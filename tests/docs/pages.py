"""The pages of the documentation and what stands in them: code blocks, links, anchors, tables."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
_BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


def text(name: str) -> str:
    return (ROOT / name).read_text()


def prose(name: str) -> str:
    """The page without its code blocks."""
    return _BLOCK.sub("", text(name))


def blocks(name: str, language: str) -> list[str]:
    return [body for kind, body in _BLOCK.findall(text(name)) if kind == language]


def commands(name: str) -> list[str]:
    """Lines of code blocks that run msrnn, and whole command lines within sentences.

    Continued lines are joined; what another command would print, `$(...)`, is left out.
    """
    joined = [re.sub(r"\\\n\s*|\$\([^)]*\)", "", body) for body in blocks(name, "")]
    lines = [line.strip() for body in joined for line in body.splitlines()]
    spans = [" ".join(span.split()) for span in re.findall(r"`(msrnn [^`]+)`", prose(name))]
    whole = [span for span in spans if re.search(r"--|\.\w", span) and not re.search(r"\b(N|SIZE)\b", span)]
    return [line for line in lines if line.startswith("msrnn ")] + whole


def links(name: str) -> list[str]:
    """Targets within the repository."""
    return sorted({target for target in re.findall(r"\]\(([^)]+)\)", prose(name)) if "://" not in target})


def anchors(name: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    return {anchor(heading) for heading in re.findall(r"^#+ (.+)$", prose(name), re.MULTILINE)}


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def links_to_their_own_section(name: str) -> list[str]:
    """Links that lead to a heading under which they stand themselves."""
    above: list[tuple[int, str]] = []
    lost = []
    for line in prose(name).splitlines():
        if heading := re.fullmatch(r"(#+) (.+)", line):
            above = [one for one in above if one[0] < len(heading[1])] + [(len(heading[1]), anchor(heading[2]))]
        own = re.findall(rf"\]\((?:{re.escape(Path(name).name)})?#([^)]+)\)", line)
        lost += [target for target in own if target in [title for _, title in above]]
    return lost


def tables(name: str, heading: str) -> list[list[list[str]]]:
    """The tables of one section, header first: rows of cells."""
    section = re.search(rf"^##+ {re.escape(heading)}\n(.*?)(?=^## |\Z)", text(name), re.DOTALL | re.MULTILINE)
    assert section is not None, f"{name} has no section {heading!r}"
    found = re.findall(r"(?:^\|.*\n)+", section[1], re.MULTILINE)
    return [[_cells(line) for line in table.splitlines() if not line.startswith("|---")] for table in found]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]

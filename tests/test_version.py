"""The version number stands in one place, src/msrnn/__init__.py; nothing else names one."""

import re
from importlib.metadata import version
from pathlib import Path

import msrnn

ROOT = Path(__file__).parents[1]


def test_the_installed_package_has_it():
    assert version("msrnn") == msrnn.__version__


def test_no_other_file_names_one():
    for name in ("CITATION.cff", "pyproject.toml"):
        assert not re.findall(r"^version\b.*$", (ROOT / name).read_text(), re.MULTILINE), name

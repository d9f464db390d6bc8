"""The notebooks run from top to bottom and show what they promise."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
WORDS = {
    "bound.ipynb": ("BoundedCache", "<figure", "bytes after 600 tokens"),
    "capacity.ipynb": ("full attention: perplexity", "tova:256", "window:64"),
    "kept.ipynb": ("<figure", "layers", "run.html"),
}


def test_all_notebooks_are_tested():
    assert sorted(path.name for path in FOLDER.glob("*.ipynb")) == sorted(WORDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", WORDS)
def test_a_notebook_runs(name, tmp_path):
    notebook = nbformat.read(FOLDER / name, as_version=4)
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = "".join(output.get("text", "") + "".join(map(str, output.get("data", {}).values())) for output in outputs)
    for word in WORDS[name]:
        assert word in shown
    assert not any(output["output_type"] == "error" for output in outputs)

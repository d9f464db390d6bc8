"""A wheel built from the tree, installed into an environment of its own outside the checkout, does what it says.

The new environment sees the packages of this one, so that torch is not installed again, but not this one's msrnn.
"""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import msrnn
from msrnn.hf.load import bundled
from tests.support.records import everything

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
# folders of the other packages; a .pth file in them, such as that of an editable install, is not run
PACKAGES = site.getsitepackages()
CLEAN = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", str(folder), str(ROOT)], check=True, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment with the wheel."""
    folder = tmp_path_factory.mktemp("elsewhere") / "venv"
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text("".join(f"{path}\n" for path in PACKAGES))
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "-q", "--no-deps"]
    subprocess.run([*pip, "--ignore-installed", "--no-index", str(wheel)], check=True)
    return folder / "bin"


def run(environment: Path, program: str, *arguments: str) -> str:
    """Standard output of a program of the environment, run outside the checkout."""
    settings = CLEAN | {"HF_HUB_OFFLINE": "1"}
    command = [str(environment / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=environment.parent, env=settings)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_has_all_package_data(wheel: Path) -> None:
    """Profiles, templates and pages, too."""
    package = ROOT / "src" / "msrnn"
    files = {path.relative_to(ROOT / "src").as_posix() for path in package.rglob("*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name and not name.endswith((".pyc", ".nbi", ".nbc"))}
    assert files <= set(zipfile.ZipFile(wheel).namelist())


def test_it_is_not_the_checkout_that_runs(environment: Path) -> None:
    code = "import msrnn, sys; print(msrnn.__file__, any('src' in path.split('/')[-1:] for path in sys.path))"
    file, checkout = run(environment, "python", "-c", code).split()
    assert Path(file).is_relative_to(environment.parent)
    assert checkout == "False"


def test_the_version(environment: Path) -> None:
    assert run(environment, "msrnn", "--version") == f"msrnn {msrnn.__version__}\n"


def test_generate_with_the_shipped_profile(environment: Path) -> None:
    """The bundled model, its profile and the command line, with the same text as here."""
    bundled(progress=False)  # downloaded once for both
    policy = ("--policy", "tova:256,profile=SmolLM2-135M-Instruct")
    out = run(environment, "msrnn", "generate", "The capital of France is", *policy, "--max-new-tokens", "4", "--json")
    facts = json.loads(out)
    assert facts["text"].strip().startswith("Paris")
    assert sum(facts["capacities"]) == 256 * 30
    assert len(set(facts["capacities"])) > 1


def test_load_from_python(environment: Path) -> None:
    code = """
import msrnn
model, tokenizer = msrnn.load()
inputs = tokenizer("The capital of France is", return_tensors="pt")
out = model.generate(**inputs, past_key_values=msrnn.cache(model, "tova:4"), max_new_tokens=3, do_sample=False)
print(out.shape[1] - inputs.input_ids.shape[1])
"""
    assert run(environment, "python", "-c", code).strip() == "3"


def test_the_report_has_its_template(environment: Path, tmp_path: Path) -> None:
    from msrnn.eval.record import write_records

    write_records(tmp_path / "all.jsonl", everything())
    page = tmp_path / "report.html"
    run(environment, "msrnn", "report", str(tmp_path / "all.jsonl"), "-o", str(page))
    html = page.read_text()
    assert html.lstrip().lower().startswith("<!doctype html>")
    assert "<table" in html

"""Unlucky users: processes that are killed, two on one output, a disk that is full. Nothing that was there is lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import msrnn
from msrnn.budgets.profile import dump
from msrnn.cli import main
from msrnn.eval.record import append_lines, read_lines, read_records, write_records
from msrnn.system.files import atomic_write, write_text
from tests.support import records, tiny_eval
from tests.support.models import tiny_llama

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("killed.py")


@pytest.mark.slow
@pytest.mark.parametrize("work", ["saving", "eval", "calibrate"])
def test_killed_at_100_moments(work: str) -> None:
    """In memory where there is such a file system: every line is synced, and a busy disk takes 0.1 s for each."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        command = [sys.executable, str(SCRIPT), work, folder, "100"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]


APPEND = """
import sys
from msrnn.eval.record import append_lines
for number in range(300):
    append_lines(sys.argv[1], [{"who": sys.argv[2], "number": number, "padding": "x" * 3000}])
"""


def test_two_processes_append_to_one_file(tmp_path: Path) -> None:
    """Every line of both is there, whole."""
    path = tmp_path / "r.jsonl"
    command = [sys.executable, "-c", APPEND, str(path)]
    writers = [subprocess.Popen([*command, name]) for name in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    lines = [(line["who"], line["number"]) for _, line in read_lines(path)]
    assert sorted(lines) == [(name, number) for name in "ab" for number in range(300)]


def test_two_runs_on_one_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second is told so in one line, and the first is not disturbed."""
    from msrnn.eval.sample_log import exclusive

    folder, data = tiny_eval.save(tmp_path / "model"), tiny_eval.texts(tmp_path / "data")
    (tmp_path / "e.toml").write_text('task = "pg19"\npolicies = ["full", "tova:16"]\nchunk = 64\n')
    out = tmp_path / "r.jsonl"
    command = ["eval", str(tmp_path / "e.toml"), "--model", str(folder), "--data", str(data), "--out", str(out), "-q"]
    capsys.readouterr()
    with exclusive(out.with_suffix(".samples.jsonl")):
        assert main([*command, "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "another process writes to" in error
    assert error.count("\n") == 1
    assert main([*command, "--device", "cpu"]) == 0
    assert len(read_records(out)) == 2


def test_two_threads_save_one_state(tmp_path: Path) -> None:
    rnn = msrnn.RNN(tiny_llama(), "tova:8")
    states = [rnn.read([token] * 12, rnn.start())[1] for token in (5, 9)]
    saves = [threading.Thread(target=lambda s=s: [s.save(tmp_path / "state") for _ in range(20)]) for s in states]
    for thread in saves:
        thread.start()
    for thread in saves:
        thread.join()
    keys = rnn.load(tmp_path / "state").layers[0].keys
    assert any(torch.equal(keys, state.layers[0].keys) for state in states)
    assert os.listdir(tmp_path) == ["state"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder with room for 512 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = shutil.which("mount") and os.geteuid() == 0
    if not mounted or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]).returncode:
        pytest.skip("a small file system can be mounted by root only")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, leave: int) -> None:
    """Leave so many bytes free."""
    filler = folder / "filler"
    filler.unlink(missing_ok=True)
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(bytes(4096))
            file.flush()
    if leave:
        os.truncate(filler, max(0, filler.stat().st_size - leave))


def test_a_full_disk_loses_no_state(small_disk: Path) -> None:
    rnn = msrnn.RNN(tiny_llama(), "tova:64")
    old, new = (rnn.read([token] * 80, rnn.start())[1] for token in (5, 9))
    path = small_disk / "state"
    old.save(path)
    before = path.read_bytes()
    for leave in range(0, len(before) + 4096, 8192):
        fill(small_disk, leave)
        if leave < len(before):
            with pytest.raises((OSError, ValueError)) as error:
                new.save(path)
            assert "No space left" in str(error.value) or "cannot be written" in str(error.value)
            assert path.read_bytes() == before
            assert sorted(os.listdir(small_disk)) == ["filler", "state"]
    (small_disk / "filler").unlink()
    new.save(path)
    assert torch.equal(rnn.load(path).layers[0].keys, new.layers[0].keys)


def test_a_full_disk_loses_no_trace_and_no_profile(small_disk: Path) -> None:
    rnn = msrnn.RNN(tiny_llama(), "tova:64")
    _, state = rnn.read(list(range(3, 63)) * 20, rnn.start(trace=True))
    writes = {
        "trace": state.trace.save,
        "profile.json": lambda path: write_text(path, dump({"capacities": list(range(1, 5001))})),
    }
    for name, write in writes.items():
        path = small_disk / name
        write(path)
        before = path.read_bytes()
        for leave in (0, 4096, 8192):
            assert leave < len(before)
            fill(small_disk, leave)
            with pytest.raises(OSError, match="No space left"):
                write(path)
            assert path.read_bytes() == before
            (small_disk / "filler").unlink()
        write(path)
    assert sorted(os.listdir(small_disk)) == sorted(writes)


def test_a_full_disk_loses_no_record(small_disk: Path) -> None:
    path, lines = small_disk / "r.jsonl", records.pg19()
    write_records(path, lines[:2])
    for leave in (0, 4096, 8192):
        fill(small_disk, leave)
        kept = read_records(path)
        with pytest.raises(OSError, match="No space left"):
            write_records(path, [*lines, *records.everything()])
        assert read_records(path)[: len(kept)] == kept
    (small_disk / "filler").unlink()
    write_records(path, lines)
    assert sorted(one.policy for one in read_records(path)) == sorted(one.policy for one in lines)


def test_a_full_disk_at_an_append_is_undone(small_disk: Path) -> None:
    path = small_disk / "r.jsonl"
    append_lines(path, [{"a": 1}])
    fill(small_disk, 4096)
    with pytest.raises(OSError, match="No space left"):
        append_lines(path, [{"b": "x" * 30_000}])
    assert [line for _, line in read_lines(path)] == [{"a": 1}]


@pytest.mark.parametrize("command", ["plot", "report"])
def test_a_full_disk_loses_no_figure_and_no_report(
    small_disk: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "r.jsonl"
    write_records(source, records.pg19())
    target = small_disk / ("report.html" if command == "report" else "figures")
    options = ["--figure", "perplexity"] if command == "plot" else []
    assert main([command, str(source), "-o", str(target), *options]) == 0
    capsys.readouterr()
    before = {path: path.read_bytes() for path in small_disk.rglob("*") if path.is_file()}
    for leave in (0, 4096, 16384):
        fill(small_disk, leave)
        assert main([command, str(source), "-o", str(target), *options]) == 2
        error = capsys.readouterr().err
        assert "No space left" in error
        assert error.count("\n") == 1
        after = {path: path.read_bytes() for path in small_disk.rglob("*") if path.is_file()}
        after.pop(small_disk / "filler")
        assert after == before


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """Temporary files of processes that live are left alone, and so are those of other machines."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    target, host = tmp_path / "r.txt", os.uname().nodename
    stale, live = (tmp_path / f".r.txt.{host}.{pid}.abc.part" for pid in (dead.pid, os.getppid()))
    other, foreign = tmp_path / f".s.txt.{host}.{dead.pid}.abc.part", tmp_path / f".r.txt.elsewhere.{dead.pid}.a.part"
    for path in (stale, live, other, foreign):
        path.write_text("half")
    write_text(target, "whole")
    assert target.read_text() == "whole"
    assert {path.name for path in tmp_path.iterdir()} == {target.name, live.name, other.name, foreign.name}
    with pytest.raises(KeyError), atomic_write(target):
        raise KeyError
    assert target.read_text() == "whole"

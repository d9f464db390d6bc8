"""The conditions of a measurement: what a record says of the machine."""

from pathlib import Path

import pytest
import torch

from msrnn.system import provenance


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(provenance, "_cpu_name", lambda: "Some CPU 9000")
    return "Some CPU 9000"


def test_on_a_gpu_its_name_and_the_cpus(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU launches the kernels: two machines with one GPU differ by it."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert provenance.machine(torch.device("cuda")) == "NVIDIA H200, Some CPU 9000"


def test_on_a_cpu_its_name_and_the_threads(cpu: str) -> None:
    assert provenance.machine(torch.device("cpu")) == f"{cpu}, {torch.get_num_threads()} threads"


def test_the_name_of_this_cpu() -> None:
    name = provenance.machine(torch.device("cpu")).rpartition(", ")[0]
    assert name
    assert not Path("/proc/cpuinfo").exists() or "\n" not in name

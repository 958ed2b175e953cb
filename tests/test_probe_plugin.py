"""The pytest plugin, in test runs of its own."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, PYTHON

NAMES = [e.name for e in importlib.metadata.entry_points(group="pytest11")]
pytestmark = pytest.mark.skipif("whynan" not in NAMES, reason="whynan was installed before it had a pytest plugin; pip install -e . again")

TRAINING = """
import pytest, torch
from torch import nn

def train(values):
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for value in values:
        x = torch.full((4, 2), value)
        loss = torch.sqrt((net(x) - net(x)).square() + value).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

def test_healthy():
    train([1.0, 2.0])

def test_bad():
    train([1.0, 0.0, 1.0])

@pytest.mark.whynan
def test_marked():
    train([1.0, 0.0])

@pytest.mark.whynan
def test_marked_and_healthy():
    train([1.0])

@pytest.mark.whynan
def test_marked_and_failing_by_itself():
    assert 1 == 2

def gradient(value):
    weight = torch.full((3,), value, requires_grad=True)
    torch.sqrt(weight).sum().backward()  # no optimizer anywhere
    return weight.grad

@pytest.mark.whynan
@pytest.mark.parametrize("value", [1.0, 0.0])
def test_by_hand(value):
    gradient(value)

@pytest.mark.whynan
def test_derivative_by_hand():
    weight = torch.zeros(2, requires_grad=True)
    torch.autograd.grad(weight.sqrt().sum(), weight)

@pytest.mark.whynan
class TestClass:
    def test_expected(self):
        with pytest.raises(ValueError):
            raise ValueError("meant")

    def test_bad_one(self):
        gradient(0.0)

def test_torch_is_as_it_was():
    assert torch._C._len_torch_function_stack() == 0
    assert "whynan" not in torch.Tensor.backward.__code__.co_filename
    assert "whynan" not in torch.nn.Module.__call__.__code__.co_filename

def ratio(out, batch):
    return (out.squeeze(-1) / batch[1]).mean()

def test_probe_finds(probe):
    probe(nn.Linear(2, 1), ratio, (torch.randn(4, 2), torch.linspace(0.1, 0.9, 4)), budget=0)

def test_probe_is_content(probe):
    report = probe(nn.Linear(2, 1), nn.MSELoss(), (torch.randn(4, 2), torch.rand(4, 1)), budget=0)
    assert report.ok
"""


def _run(folder: Path, *options: str) -> tuple[int, str]:
    (folder / "test_training.py").write_text(TRAINING)
    command = [PYTHON, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *options, "test_training.py"]
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout + done.stderr


def _ended(out: str, test: str) -> str:
    return next(line.split()[0] for line in out.splitlines() if line.startswith(("PASSED", "FAILED", "ERROR")) and line.split("::")[-1].split()[0] == test)


def test_only_what_asks_for_it_is_watched(tmp_path: Path) -> None:
    status, out = _run(tmp_path)
    assert status == 1
    assert _ended(out, "test_bad") == "PASSED"
    assert _ended(out, "test_marked") == "FAILED"
    assert _ended(out, "test_marked_and_healthy") == "PASSED"
    assert "error[WN501]" in out
    assert "test_training.py:11" in out
    assert "assert 1 == 2" in out
    assert _ended(out, "test_probe_finds") == "FAILED"
    assert "whynan probe: Linear" in out
    assert _ended(out, "test_probe_is_content") == "PASSED"


def test_gradients_are_looked_at_without_an_optimizer(tmp_path: Path) -> None:
    status, out = _run(tmp_path, "-k", "by_hand or TestClass or as_it_was")
    assert status == 1
    ends = {line.split("::", 1)[1].split(" - ")[0].strip(): line.split()[0] for line in out.splitlines() if line.startswith(("PASSED", "FAILED"))}
    assert ends == {
        "test_by_hand[1.0]": "PASSED",
        "test_by_hand[0.0]": "FAILED",
        "test_derivative_by_hand": "FAILED",
        "TestClass::test_expected": "PASSED",
        "TestClass::test_bad_one": "FAILED",
        "test_torch_is_as_it_was": "PASSED",
    }
    assert "# no optimizer anywhere" in out


def test_several_processes_give_the_same(tmp_path: Path) -> None:
    pytest.importorskip("xdist", reason="pytest-xdist is not installed here")
    status, out = _run(tmp_path, "-n", "2", "-k", "by_hand or as_it_was")
    assert status == 1
    assert "2 failed, 2 passed" in out
    assert "error[WN501]" in out


def test_with_the_option_every_test_is_watched(tmp_path: Path) -> None:
    status, out = _run(tmp_path, "--whynan", "-k", "healthy or bad")
    assert status == 1
    assert _ended(out, "test_bad") == "FAILED"
    assert _ended(out, "test_healthy") == "PASSED"
    assert "error[WN501]" in out


def test_the_plugin_loads_no_torch_by_itself(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text("import sys\n\ndef test_nothing():\n    assert 'torch' not in sys.modules\n")
    command = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_nothing.py"]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout


def test_the_marker_is_known(tmp_path: Path) -> None:
    done = subprocess.run([PYTHON, "-m", "pytest", "--markers"], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=100)
    assert "@pytest.mark.whynan" in done.stdout

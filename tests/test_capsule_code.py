"""The user's code in a capsule: packages in every layout, callables of every sort, and what is not there said to be missing."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
from conftest import Sandbox
from test_capsules import moved, ran_repro, replayed

LOOP = """
torch.manual_seed(0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x = torch.randn(4, 3)
    x[2] *= step != 1
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
MODEL = """
from torch import nn
{head}
class Enc(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 1)
    def forward(self, x):
        return self.inner({unit}(x))
"""
UNIT = "def unit(x):\n    return x / (x.norm(dim=-1, keepdim=True) + {eps})\n"
MAIN = "import torch\n{head}\nmodel = {make}()" + LOOP


def enc(head: str, unit: str = "unit") -> str:
    return MODEL.format(head=head, unit=unit)


def main(head: str, make: str = "Enc") -> str:
    return MAIN.format(head=head, make=make)


OPS = UNIT.format(eps=0.0)
LAYOUTS: dict[str, dict[str, str]] = {
    "empty init": {
        "train.py": main("import nets.a.enc", "nets.a.enc.Enc"),
        "nets/__init__.py": "",
        "nets/a/__init__.py": "# of a\n",
        "nets/a/enc.py": enc("from .. import ops", "ops.unit"),
        "nets/ops.py": "from .conf import EPS\n" + UNIT.format(eps="EPS"),
        "nets/conf.py": "EPS = 0.0\n",
    },
    "no init": {
        "train.py": main("from enc import *"),
        "enc.py": enc("from a.ops import unit"),
        "a/ops.py": "from .deep.ops import unit\n",
        "a/deep/ops.py": OPS,
    },
    "imported in the call": {
        "train.py": main("from enc import Enc"),
        "enc.py": enc("def unit(x):\n    from lib.ops import unit\n    return unit(x)"),
        "lib/ops.py": OPS,
    },
    "module of the script": {
        "train.py": "import torch\nEPS = 0.0\nif __name__ == '__main__':\n    from enc import Enc\n    model = Enc()\n" + indent(LOOP, "    "),
        "enc.py": enc("from train import EPS\n" + UNIT.format(eps="EPS")),
    },
    "set from outside": {
        "train.py": main("import conf\nfrom enc import Enc\nconf.EPS = 0.0"),
        "conf.py": "EPS = 1.0\n",
        "enc.py": enc("import conf\n" + UNIT.format(eps="conf.EPS")),
    },
}


def capsule_of(box: Sandbox, files: dict[str, str], *argv: str) -> Path:
    """Run a program of several files, delete it, and move its capsule away."""
    for name, text in files.items():
        box.write(text, name)
    done = box.forked("run", "--run-dir", str(box.run_dir), *(argv or ("train.py",)))
    assert "internal error" not in done.err, done.err
    assert "capsule" not in done.err, done.err
    return moved(box)


def head_of(capsule: Path) -> dict[str, Any]:
    head: dict[str, Any] = json.loads((capsule / "capsule.json").read_text())
    return head


def comes_back(box: Sandbox, capsule: Path) -> None:
    """The capsule plays elsewhere, with whynan and alone."""
    done = replayed(box, capsule, "--trust")
    assert done.status == 0, done.err + done.out
    alone = ran_repro(box, capsule)
    assert alone.status == 1, alone.err
    assert "not finite" in alone.out, alone.err


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_local_package_comes_along(box: Sandbox, layout: str) -> None:
    """Every file of the user's that an import of the program needs is in the capsule, in whatever layout it lies."""
    capsule = capsule_of(box, LAYOUTS[layout])
    assert head_of(capsule)["lost"] == []
    comes_back(box, capsule)


def test_a_module_run_by_name_finds_its_package(box: Sandbox) -> None:
    """`whynan run -m pkg.train` whose relative imports end in a package without `__init__.py`."""
    files = {"pkg/train.py": main("from .enc import Enc"), "pkg/enc.py": enc("from .ops import unit"), "pkg/ops.py": OPS}
    comes_back(box, capsule_of(box, files, "-m", "pkg.train"))

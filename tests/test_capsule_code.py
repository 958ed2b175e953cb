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


CALLABLES = """
import functools, math, operator, types, collections, datetime, enum, random, numpy as np, torch
from torch import nn
EPS0 = float("0")
MODE = collections.OrderedDict(a=0.0)
@functools.lru_cache
def const(n): return n + EPS0
@functools.cache
def const2(n): return n + MODE["a"]
@functools.singledispatch
def area(x): return x
@area.register
def _(x: torch.Tensor): return x * (1 + EPS0)
def loud(f):
    @functools.wraps(f)
    def g(*a, **k):
        return f(*a, **k) * SCALE
    return g
SCALE = float("1")
@loud
def twice(x): return x * (TWO + 0)
TWO = float("2")
def bare(f):
    def g(*a): return f(*a)
    return g
@bare
def thrice(x): return x * (TWO + 1)
@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor: return x * 1.0
@torch.no_grad()
def quiet(x): return x.abs() + EPS0
class Memo:
    def __init__(self, f): self.f, self.n = f, 0
    def __call__(self, x): self.n += 1; return self.f(x)
@Memo
def called(x): return x + EPS0
def counted(x):
    counted.n += 1
    return x
counted.n = 0
class Cfg:
    eps = 1e-3
Cfg.eps = 0.0
class Name(str): pass
class Ordered(collections.OrderedDict):
    def __getattr__(self, k): return self[k]
a, b = lambda x: x, lambda x: x * 2
class Op:
    @classmethod
    def make(cls, x): return x * (TWO / 2)
    @staticmethod
    def keep(x): return x
    @functools.cached_property
    def one(self): return 1.0 + EPS0
    @functools.singledispatchmethod
    def sd(self, x): return x
    @sd.register
    def _(self, x: torch.Tensor): return x * SCALE
    @functools.lru_cache
    def lm(self, n): return n * TWO
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(3, 1)
        self.part = functools.partial(torch.mul, other=1.0)
        self.sqrt, self.add, self.get = math.sqrt, operator.add, operator.itemgetter(0)
        self.ufunc, self.join, self.ns = np.square, "-".join, types.SimpleNamespace(eps=0.0, f=b)
        self.cache, self.tens, self.when, self.name = functools.lru_cache(maxsize=3)(b), torch.Tensor.relu, datetime.timedelta(seconds=1), Name("q")
        self.lambdas = (a, b)
        self.od = Ordered(eps=0.0, z=1)
        self.op = Op()
        self.up = str.upper
        self.bm = self.op.make
        self.attr, self.mc = operator.attrgetter("eps"), operator.methodcaller("abs")
        self.length = len
        self.sc = scripted
        self.cnt = collections.Counter("ab")
    def forward(self, x):
        n = x.norm(dim=1, keepdim=True)
        n = n + const(0) + const2(0) + self.attr(self.ns) + Cfg.eps + self.od.eps + self.od["eps"]
        y = called(thrice(twice(area(x)))) * self.sqrt(4) + quiet(x) * 0
        y = self.part(self.add(y, 0)) * float(self.ufunc(2.0)) * self.cache(1) * self.lambdas[1](1)
        assert self.lambdas[1](1) == 2 and self.length([1]) == 1 and self.join(["a", "b"]) == "a-b" and self.up("a") == "A"
        assert list(self.od) == ["eps", "z"] and self.get([5]) == 5 and self.ns.f(1) == 2 and self.name == "q" and self.when.seconds == 1
        y = self.op.sd(self.op.keep(self.bm(y))) * self.op.one * self.op.lm(1)
        return self.l(scripted(counted(self.mc(y) / n)))
"""


def test_callables_of_every_sort_come_along(box: Sandbox) -> None:
    """Caches, dispatchers, decorated, scripted and bound functions, ufuncs, those of the standard library: a replay calls them as the step did."""
    capsule = capsule_of(box, {"train.py": CALLABLES + "\nmodel = M()\n" + LOOP})
    assert head_of(capsule)["lost"] == ["sc: TorchScript"]
    comes_back(box, capsule)


LACKING = """
import sys, threading, types
import torch
fast = sys.modules["fast"] = types.ModuleType("fast")
exec("def unit(x): return x / x.norm(dim=-1, keepdim=True)", vars(fast))
from enc import Enc
model = Enc()
model.lock = threading.Lock()
"""


def test_what_is_missing_is_told_and_named(box: Sandbox) -> None:
    """A module without Python source and an object made in C are `lost` when the capsule is written; a replay names them."""
    capsule = capsule_of(box, {"train.py": LACKING + LOOP, "enc.py": enc("from fast import unit")})
    assert head_of(capsule)["lost"] == ["lock: a lock of _thread", "module fast: its Python source was not found"]
    done = replayed(box, capsule, "--trust")
    assert done.status == 2
    assert "enc.py needs the package 'fast'" in done.err
    assert "not carried: lock: a lock of _thread, module fast: its Python source was not found" in done.err
    assert "damaged" not in done.err
    assert "not carried: lock" in ran_repro(box, capsule).err


def test_a_cached_function_is_not_made_without_trust(box: Sandbox) -> None:
    """A capsule whose only foreign part is made in C still asks before anything but torch is called."""
    loop = LOOP.replace("model(x)", "(model(x) / x.norm(dim=1, keepdim=True))")
    program = "import math\nimport torch\nmodel = torch.nn.Linear(3, 1)\nmodel.act = math.sqrt" + loop
    capsule = capsule_of(box, {"train.py": program})
    done = replayed(box, capsule)
    assert done.status == 2
    assert "--trust" in done.err
    assert "math: sqrt" in done.out
    comes_back(box, capsule)

"""`whynan lint`: what is known of a value, through names, helpers, methods, defaults, constants and guards."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from whynan.lint import Confidence, Finding, Settings, lint_paths, lint_text
from whynan.lint.facts import Fact
from whynan.lint.values import Values

ALL = Settings(min_confidence=Confidence.LOW)
HEAD = "import math\nimport numpy as np\nimport torch\nimport torch.nn.functional as F\nfrom torch import nn\n"


def found(source: str) -> list[Finding]:
    """The findings of a piece of source with the usual imports."""
    return lint_text(HEAD + textwrap.dedent(source), settings=ALL)


def codes(source: str) -> set[str]:
    """The codes found in a piece of source."""
    return {f.code for f in found(source)}


def test_alias_of_an_import_is_resolved() -> None:
    """The same operation is known under any name it is imported by."""
    for first, call in [
        ("import torch as t", "t.log(t.softmax(x, -1))"),
        ("from torch import log, softmax", "log(softmax(x, -1))"),
        ("from torch.nn import functional", "functional.softmax(x, -1).log()"),
    ]:
        assert [f.code for f in lint_text(f"{first}\nimport torch\ndef f(x):\n    return {call}\n")] == ["WN101"]


@pytest.mark.parametrize(
    "call", ["np.log(np.exp(x).sum())", "math.log(x - 1)", "np.sqrt((x ** 2).sum())", "x / np.linalg.norm(x)", "(x - np.mean(x)) / np.std(x)"]
)
def test_other_libraries_are_not_reported(call: str) -> None:
    """numpy and math have hazards of their own, which are not ours."""
    assert codes(f"def f(x: np.ndarray):\n    return {call}\n") == set()


def test_through_assignments_and_views() -> None:
    """A name stands for what it was assigned, also gathered, squeezed and unpacked."""
    assert "WN101" in codes("""
        def f(x, y):
            p = F.softmax(x, dim=-1)
            q, r = p.gather(1, y).squeeze(1), 3
            return q.log()
    """)


def test_last_assignment_counts() -> None:
    """A name that was made safe before its use is safe."""
    assert (
        codes("""
        def f(x):
            p = torch.softmax(x, -1)
            p = p + 1e-6
            return torch.log(p)
    """)
        == set()
    )


def test_branches_join() -> None:
    """A name that is safe in one branch only is not safe after it."""
    assert "WN104" in codes("""
        def f(v, scale):
            n = v.norm()
            if scale:
                v = v * 2
            return v / n
    """)


def test_helper_function_and_method() -> None:
    """What a helper of the file returns is known where it is called."""
    assert "WN101" in codes("""
        def probs(x):
            return torch.sigmoid(x)
        class M(nn.Module):
            def prob(self, x):
                return probs(x)
            def forward(self, x):
                return torch.log(self.prob(x))
    """)


def test_forward_of_an_instance() -> None:
    """Calling an instance of a class of the file is its forward pass."""
    assert "WN101" in codes("""
        class Net(nn.Module):
            def forward(self, x):
                return torch.softmax(x, -1)
        net = Net()
        def nll(x):
            return -net(x).log()
    """)


def test_layer_as_attribute() -> None:
    """An activation kept as a module does what its function does, also at the end of a Sequential."""
    assert "WN101" in codes("""
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid())
            def forward(self, x):
                return torch.log(self.body(x))
    """)


def test_helper_in_another_file(tmp_path: Path) -> None:
    """A helper imported from a file of the project is followed there."""
    (tmp_path / "helpers.py").write_text(
        "import torch\ndef probability(x):\n    return torch.softmax(x, -1)\ndef safe(x):\n    return torch.softmax(x, -1) + 1e-6\n"
    )
    user = tmp_path / "user.py"
    user.write_text(
        "import torch\nfrom helpers import probability, safe\ndef f(x):\n    return torch.log(probability(x))\ndef g(x):\n    return torch.log(safe(x))\n"
    )
    report = lint_paths([user], ALL)
    assert [(f.code, f.place.line) for f in report.findings] == [("WN101", 4)]


def test_relative_import_in_a_package(tmp_path: Path) -> None:
    """A relative import is resolved inside its package."""
    package = tmp_path / "pkg" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "pkg" / "maths.py").write_text("import torch\ndef length(v):\n    return v.norm()\n")
    user = package / "user.py"
    user.write_text("import torch\nfrom ..maths import length\ndef unit(v):\n    return v / length(v)\n")
    assert [f.code for f in lint_paths([user], ALL).findings] == ["WN104"]


@pytest.mark.parametrize(
    "guard",
    [
        "n.clamp_min(1e-6)",
        "n.clamp(min=1e-6)",
        "(n + 1e-6)",
        "(n + eps)",
        "(n + self.eps)",
        "torch.clamp(n, min=1e-8)",
        "max(n, 1e-6)",
        "torch.maximum(n, torch.tensor(1e-6))",
        "(n + torch.finfo(v.dtype).eps)",
        "torch.where(n == 0, 1.0, n)",
        "n.masked_fill(n == 0, 1.0)",
    ],
)
def test_guards_are_seen(guard: str) -> None:
    """What keeps a denominator from 0 is accepted in any of its usual forms."""
    assert (
        codes(f"""
        class U(nn.Module):
            def __init__(self, eps=1e-6):
                self.eps = eps
            def forward(self, v, eps=1e-6):
                n = v.norm(dim=-1, keepdim=True)
                return v / {guard}
    """)
        == set()
    )


@pytest.mark.parametrize(
    "body",
    [
        "if n == 0:\n            return v\n        return v / n",
        "if n > 0:\n            v = v / n\n        return v",
        "return v / n if n > 0 else v",
        "assert n > 0\n        return v / n",
        "ok = n > 0\n        if ok:\n            v = v / n\n        return v",
    ],
)
def test_conditions_guard(body: str) -> None:
    """A condition about the denominator before the division is a guard."""
    assert (
        codes(f"""
    def unit(v):
        n = v.norm()
        {body}
    """)
        == set()
    )


def test_patched_entries() -> None:
    """Zeros overwritten by a mask are no longer zeros."""
    assert "WN103" not in codes("""
        def f(y):
            c = torch.bincount(y).float()
            c[c == 0] = 1
            return 1.0 / c
    """)


def test_covered_infinity_is_less_sure() -> None:
    """The usual idiom for degrees, inverse power and then masked infinities, is not reported above low."""
    levels = [
        f.confidence
        for f in found("""
        def gcn(deg: torch.Tensor):
            inv = deg.sum(1).pow(-0.5)
            inv = inv.masked_fill(inv == float("inf"), 0)
            return inv
    """)
        if f.code == "WN106"
    ]
    assert all(level is Confidence.LOW for level in levels)


def test_default_argument_and_constant_as_epsilon() -> None:
    """A small number under another name is an epsilon, and one that is lost in half is said to be."""
    assert codes("""
        EPS = 1e-12
        def f(x: torch.Tensor, small=EPS):
            return torch.log(x.abs().half() + small)
    """) >= {"WN204"}


def test_dataclass_field_as_constant() -> None:
    """A constant that is the default of a class is known."""
    assert "WN204" in codes("""
        class Config:
            eps: float = 1e-9
            def apply(self, p: torch.Tensor):
                return torch.log(1 - p.clamp(self.eps, 1 - self.eps))
    """)


@pytest.mark.parametrize(
    ("made", "used"),
    [
        ('CONFIG = {"lr": 0.1, "small": 1e-9}', 'CONFIG["small"]'),
        ("class C:\n    small: float = 1e-9\ncfg = C()", "cfg.small"),
        (
            "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--small', type=float, default=1e-9)\nargs = parser.parse_args()",
            "args.small",
        ),
    ],
)
def test_configuration_constants(made: str, used: str) -> None:
    """A constant in a dict, a configuration class or the defaults of argparse is known where it is used."""
    source = f"{HEAD}{made}\ndef f(p: torch.Tensor):\n    return torch.log(1 - p.clamp(1e-6, 1 - {used}))\n"
    assert "WN204" in {f.code for f in lint_text(source, settings=ALL)}


def test_no_gradient_no_slope() -> None:
    """Under no_grad, or after detach, the slope at 0 is nobody's trouble."""
    assert "WN501" not in codes("@torch.no_grad()\ndef d(a, b):\n    return ((a - b) ** 2).sum().sqrt()\n")
    assert "WN501" not in codes("def d(a, b):\n    return ((a - b) ** 2).sum().sqrt().item()\n")


def test_eps_outside_the_root_is_named() -> None:
    """An eps added after the root does not help its slope, and the note says so."""
    notes = [f.note for f in found("def distance_loss(a, b):\n    return ((a - b) ** 2).sum().sqrt() + 1e-8\n") if f.code == "WN501"]
    assert any("outside" in n for n in notes)


def test_softmax_minus_maximum_is_safe() -> None:
    """exp of what has its maximum subtracted is at most 1, also through a name, a detach and a temperature."""
    assert (
        codes("""
        def softmax(x, t):
            top = x.max(dim=1, keepdim=True).values.detach()
            e = ((x - top) / t).exp()
            return e / e.sum(dim=1, keepdim=True)
    """)
        & {"WN201", "WN303"}
        == set()
    )


def test_same_name_in_sibling_branches() -> None:
    """What the other branch assigns does not reach this one."""
    assert "WN101" not in codes("""
        def f(x, soft):
            if soft:
                p = torch.softmax(x, -1)
                return p
            else:
                p = x.abs() + 1.0
                return torch.log(p)
    """)


def test_a_name_defined_by_itself_ends() -> None:
    """A recursive function and a name that refers to itself do not hang."""
    assert isinstance(found("def f(x):\n    x = f(x)\n    return x / f(x).norm()\n"), list)


def test_a_clamp_that_lets_1_through_is_judged_by_what_comes_after_it() -> None:
    """1 - 1e-8 is 1 in float32: that matters before a logarithm, hardly for a difference, and in float64 it is not so."""
    for dtype, rest, expected in [("", "torch.log(1 - p)", "medium"), ("", "p - x", "low"), (".double()", "torch.log(1 - p)", None)]:
        seen = [f for f in found(f"def f(x):\n    p = torch.sigmoid(x){dtype}.clamp(1e-8, 1 - 1e-8)\n    return {rest}\n") if f.code == "WN204"]
        assert [str(f.confidence) for f in seen] == ([expected] if expected else [])


def test_no_gradient_is_taken_through_the_forward_pass_of_an_autograd_function() -> None:
    """A function with a backward pass of its own: the slope of its sqrt is nobody's."""
    body = "    @staticmethod\n    def forward(ctx, x):\n        return torch.sqrt((x ** 2).sum(-1))\n"
    assert "WN501" not in codes(f"class Root(torch.autograd.Function):\n{body}")
    assert "WN501" in codes("def loss(x):\n    return torch.sqrt((x ** 2).sum(-1))\n")


@pytest.mark.parametrize("lines", [50, 200])
def test_a_chain_of_patches_is_looked_at_once_each(lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries overwritten again and again in branches: the work grows with the number of lines, not with the ways through them."""
    calls = 0
    patched = Values._patched

    def counted(self: Values, *given: Any) -> Fact:
        nonlocal calls
        calls += 1
        return patched(self, *given)

    monkeypatch.setattr(Values, "_patched", counted)
    chain = "".join(f"    if a == {i}:\n        x[..., {i}] = x[..., {i}] > 0\n" for i in range(lines))
    found(f"def f(m, a):\n    x = torch.zeros(3)\n{chain}    return torch.log(x / x.sum())\n")
    assert 0 < calls <= 2 * lines

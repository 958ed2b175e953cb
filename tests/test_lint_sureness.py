"""`whynan lint`: what makes a finding sure, and what takes the sureness away; each pair differs in that alone."""

from __future__ import annotations

import textwrap

import pytest

from whynan.lint import Confidence, Settings, lint_text

HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
ALL = Settings(min_confidence=Confidence.LOW)

PAIRS = {
    "a quotient patched under a mask": (
        "WN104",
        """
        def frame(v: torch.Tensor):
            n = v.norm(dim=-1)
            v = v / n[..., None]
            return v
        """,
        """
        def frame(v: torch.Tensor):
            n = v.norm(dim=-1)
            v = v / n[..., None]
            v[n == 0] = 0.0
            return v
        """,
    ),
    "a result covered in a call over two lines": (
        "WN402",
        """
        def f(x: torch.Tensor, mask: torch.Tensor):
            mean = (x * mask).sum(-1) / mask.sum(-1)
            return torch.abs(
                mean.expand(3)
            )
        """,
        """
        def f(x: torch.Tensor, mask: torch.Tensor):
            mean = (x * mask).sum(-1) / mask.sum(-1)
            return torch.where(
                mask, mean.expand(3), 0.0
            )
        """,
    ),
    "a check of what was made from the result": (
        "WN104",
        """
        def f(d: torch.Tensor):
            d = d / d.norm()
            total = d.sum().item()
            return d if total > 3 else None
        """,
        """
        def f(d: torch.Tensor):
            d = d / d.norm()
            total = d.sum().item()
            return d if total - total == 0 else None
        """,
    ),
    "a slope of targets": (
        "WN501",
        "def flow_loss(pred, target):\n    return torch.sqrt((pred ** 2).sum(1)).mean()",
        "def flow_loss(pred, target):\n    return torch.sqrt((target ** 2).sum(1)).mean()",
    ),
    "where over an entry of the batch": (
        "WN502",
        """
        class Net(nn.Module):
            def forward(self, x: torch.Tensor):
                n = torch.norm(x, dim=-1)
                return torch.where(n > 0, x / n, torch.zeros_like(x))
        """,
        """
        class Net(nn.Module):
            def forward(self, batch):
                x = batch["frames"]
                n = torch.norm(x, dim=-1)
                return torch.where(n > 0, x / n, torch.zeros_like(x))
        """,
    ),
    "a count of a mask made elsewhere": (
        "WN103",
        "def mean_loss(x: torch.Tensor):\n    return x.sum() / torch.count_nonzero(x)",
        "def mean_loss(x: torch.Tensor):\n    real = atoms(x)\n    return x.sum() / torch.count_nonzero(real)",
    ),
    "the range of what was computed": (
        "WN404",
        "def f(x: torch.Tensor):\n    return (x - x.min()) / (x.max() - x.min())",
        "def f(x: torch.Tensor):\n    x = F.conv2d(x, x)\n    return (x - x.min()) / (x.max() - x.min())",
    ),
    "a mask of a drawn share": (
        "WN402",
        "def mae_loss(loss, mask):\n    return (loss * mask).sum() / mask.sum()",
        "def masks(x, mask_ratio):\n    return x\ndef mae_loss(loss, mask):\n    return (loss * mask).sum() / mask.sum()",
    ),
    "a guard for all rows before no softmax": (
        "WL114",
        "def f(s):\n    if (s == -float('inf')).all():\n        return s\n    return torch.softmax(s, -1)",
        "def f(s):\n    if (s == -float('inf')).all():\n        return s\n    return s + 1",
    ),
    "a bound of a loss that is not known": (
        "WL113",
        "def f(loss):\n    return torch.clamp(loss, max=1.0)",
        "def f(loss, top):\n    return torch.clamp(loss, max=top)",
    ),
    "a maximum subtracted further up": (
        "WN303",
        "def weights(s: torch.Tensor):\n    t = regroup(s)\n    e = torch.exp(t)\n    return e / e.sum(-1, keepdim=True)",
        "def weights(s: torch.Tensor, row_max):\n    s = s - row_max\n    t = regroup(s)\n    e = torch.exp(t)\n    return e / e.sum(-1, keepdim=True)",
    ),
    "a cosine over a temperature": (
        "WN101",
        "def loss(a: torch.Tensor, b: torch.Tensor, t):\n    return -torch.log(torch.sigmoid(a @ b / t)).mean()",
        "def loss(a: torch.Tensor, b: torch.Tensor, t):\n    return -torch.log(torch.sigmoid(F.cosine_similarity(a, b) / t)).mean()",
    ),
    "a clamp at 1 - eps before a logarithm of x alone": (
        "WN204",
        "def loss(p):\n    p = torch.clamp(p, 1e-8, 1 - 1e-8)\n    return torch.log(1 - p)",
        "def loss(p):\n    p = torch.clamp(p, 1e-8, 1 - 1e-8)\n    return torch.log(p)",
    ),
    "an array of numpy": (
        "WN404",
        "def f(x):\n    x = torch.relu(x)\n    return (x.new_zeros(3) + (x - x.min()) / (x.max() - x.min()))",
        "def f(x):\n    return ((x - x.min()) / (x.max() - x.min())).astype('int8')",
    ),
}


def surest(source: str, code: str) -> Confidence | None:
    """The highest confidence of a code in a piece of source."""
    levels = [f.confidence for f in lint_text(HEAD + textwrap.dedent(source), settings=ALL) if f.code == code]
    return max(levels, key=lambda c: c.rank, default=None)


@pytest.mark.parametrize("name", PAIRS)
def test_sureness_depends_on(name: str) -> None:
    """The first of a pair is found with more confidence than the second, and the second never with high confidence."""
    code, bad, good = PAIRS[name]
    first, second = surest(bad, code), surest(good, code)
    assert first is not None
    assert second is not Confidence.HIGH
    assert first.rank > (second.rank if second is not None else -1)


def test_a_patched_quotient_still_has_its_slope() -> None:
    """Where a gradient is wanted, the overwritten entry is told as a slope, not as a value."""
    source = "def loss(v: torch.Tensor):\n    n = v.norm(dim=-1, keepdim=True)\n    q = v / n\n    q[n == 0] = 0.0\n    return q.sum()"
    assert surest(source, "WN104") is None
    assert surest(source, "WN502") is Confidence.MEDIUM


def test_a_patch_that_does_not_hold_for_nan_mends_nothing() -> None:
    """nan > 1 is false: such a mask leaves the nan where it is."""
    source = "def unit_loss(v: torch.Tensor):\n    v = v / v.norm()\n    v[v > 1] = 1.0\n    return v"
    assert surest(source, "WN104") is Confidence.HIGH


@pytest.mark.parametrize("made", ["torch.zeros(3, requires_grad=True)", "torch.zeros(3).requires_grad_()"])
def test_a_weight_that_starts_at_zero_is_not_bounded(made: str) -> None:
    """Where a weight starts says nothing of where training takes it."""
    assert surest(f"skill = {made}\ndef loss(a):\n    return torch.log(1 - torch.sigmoid(skill[a]))", "WN101") is not None

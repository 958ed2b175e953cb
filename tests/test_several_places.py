"""Steps that one change does not mend: all places are told, and changes at all of them are tried at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Sandbox

from whynan.casebook.patching import patched
from whynan.causes import several
from whynan.causes.edits import edited, replaced

HEAD = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Linear(6, 6)
opt = torch.optim.Adam(net.parameters(), 1e-3)
"""
TAIL = """
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(loss.item())
"""
DISTANCES = """
def distances(a, p, n):
    near = ((a - p) ** 2).sum(-1).sqrt()
    far = ((a - n) ** 2).sum(-1).sqrt()
    return torch.relu(near - far + 0.5).mean()
for step in range(10):
    a, p, n = torch.randn(3, 8, 6)
    if step == 6:
        p[2], n[3] = a[2], a[3]
    loss = distances(net(a), net(p), net(n))
"""
SHARES = """
for step in range(10):
    x = torch.rand(8, 6) + 0.1
    if step == 6:
        x[1] = 0
    h = torch.relu(net(x)) * (x.sum(1, keepdim=True) > 0)
    share = -(h / h.sum(1, keepdim=True)).clamp_min(1e-9).log().mean()
    loss = share + h.pow(2).sum(1).sqrt().mean()
"""
ROOTS = """
for step in range(10):
    x = torch.rand(8, 6) + 0.1
    if step == 6:
        x[1] = 0
    h = torch.relu(net(x)) * (x.sum(1, keepdim=True) > 0)
    loss = torch.sqrt(h.sum(1)).mean() + torch.sqrt((h * h).sum(1)).mean()
    loss = loss + (h.sum(1) ** 0.5).mean()
"""


@pytest.mark.parametrize(("body", "places"), [(DISTANCES, 2), (SHARES, 2), (ROOTS, 3)], ids=["two roots", "a share and a root", "two on one line, one below"])
def test_changes_are_proven_together(body: str, places: int, box: Sandbox) -> None:
    """Neither alone makes the step finite; the diff has them all, and the program it gives trains through."""
    source = HEAD + body + TAIL
    done = box.watched(source)
    (incident,) = done.incidents
    remedy = incident["remedies"][0]
    assert incident["step"] == 6
    assert incident["cause"]["confidence"] == "proven"
    assert any("without both" in e or "without them all" in e for e in incident["cause"]["evidence"])
    assert remedy["result"] == "proven"
    assert "gradient alive" in remedy["effect"] and "same loss" in remedy["effect"]
    assert "and at line" in remedy["title"]
    changed = patched(source, remedy["diff"])
    before, after = source.splitlines(), changed.splitlines()
    assert sum(a != b for a, b in zip(before, after, strict=True)) == min(places, 2)
    healed = box.plain(box.write(changed, "healed.py"))
    assert len(healed.out.splitlines()) == 10
    assert "nan" not in healed.out


def test_no_remedy_is_called_proven_where_a_place_is_left(box: Sandbox) -> None:
    """The second place has no change that could be tried: the first one's is told as not enough."""
    done = box.watched(f"""{HEAD}
class Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        return grad * float("nan")
for step in range(10):
    x = torch.rand(8, 6)
    h = net(x)
    loss = h.square().mean()
    if step == 6:
        loss = loss + (h * 0).sum(1).sqrt().mean() + Opaque.apply(h).mean()
{TAIL}""")
    (incident,) = done.incidents
    assert all(r["result"] != "proven" for r in incident["remedies"])


def test_texts_on_one_line_are_put_in_place_together() -> None:
    """Each keeps its own place; one inside another is refused."""
    lines = ["a = f(x) + g(ü)\n", "b = 1\n"]
    edits = replaced(lines, [((1, 11), (1, 16), "h(ü, 1)"), ((1, 4), (1, 8), "k(x)"), ((2, 4), (2, 5), "2")])
    assert edits is not None
    assert edited(lines, edits) == ["a = k(x) + h(ü, 1)\n", "b = 2\n"]
    assert replaced(lines, [((1, 4), (1, 16), "0"), ((1, 11), (1, 16), "1")]) is None


def test_changes_in_two_files(box: Sandbox, tmp_path: Path) -> None:
    """The diff names both."""
    box.write("def near(a, p):\n    return ((a - p) ** 2).sum(-1).sqrt()\n", "near.py")
    done = box.watched(f"""{HEAD}
from near import near
for step in range(10):
    a, p = torch.randn(2, 8, 6)
    if step == 6:
        p[2] = a[2]
    h, k = net(a), net(p)
    loss = near(h, k).mean() + ((h - k) ** 2).sum(1).sqrt().max()
    loss = loss + ((h - k) ** 2).sum(1).sqrt().mean()
{TAIL}""")
    (incident,) = done.incidents
    diff = incident["remedies"][0]["diff"]
    assert incident["remedies"][0]["result"] == "proven"
    assert "+++ b/near.py" in diff and "+++ b/train.py" in diff


def test_a_change_that_only_moves_the_damage_on_is_followed(box: Sandbox) -> None:
    """0 / 0 kept finite is a share of 0, and its logarithm is the next place."""
    done = box.watched(f"""{HEAD}
def divergence(p, q):
    p = p / p.sum(-1, keepdim=True)
    return torch.sum(p * torch.log(p / q), -1).mean()
for step in range(10):
    target = torch.rand(8, 6) + 0.01
    if step == 6:
        target[3] = 0
    loss = divergence(target, net(torch.randn(8, 6)).softmax(-1))
{TAIL}""")
    (incident,) = done.incidents
    remedy = incident["remedies"][0]
    assert incident["cause"]["code"] == "WN104"
    assert any("with a change there alone" in e for e in incident["cause"]["evidence"])
    assert (remedy["result"], "and at line" in remedy["title"]) == ("proven", True)
    assert "gradient alive" in remedy["effect"]
    assert remedy["diff"].count("\n+ ") == 2


EXPONENTIALS = """
def contrast(v1, v2):
    top = torch.exp(v1.diagonal() / 0.01)
    total = torch.sum(torch.exp(v1 / 0.01), dim=1)
    other = torch.exp(v2.diagonal() / 0.01)
    rest = torch.sum(torch.exp(v2 / 0.01), dim=1)
    return -(top / total).log1p().mean() - (other / rest).log1p().mean()
for step in range(8):
    x = torch.randn(8, 6)
    h = nn.functional.normalize(net(x), dim=1)
    far = 1.0 if step == 6 else 0.3
    loss = contrast(h @ h.T * far, h.detach() @ h.T * far)
"""
RECURSION = """
def spline(x, grid, k):
    if k == 0:
        return ((x >= grid[:-1]) & (x < grid[1:])).float()
    below = spline(x, grid, k - 1)
    left = (x - grid[: -(k + 1)]) / (grid[k:-1] - grid[: -(k + 1)]) * below[:, :-1]
    right = (grid[k + 1 :] - x) / (grid[k + 1 :] - grid[1:-k]) * below[:, 1:]
    return torch.nan_to_num(left) + torch.nan_to_num(right)
for step in range(8):
    x = torch.rand(8, 6)
    grid = torch.linspace(-2, 2, 12)
    if step == 6:
        grid[:4] = grid[0]
    loss = spline(net(x)[:, :1], grid, 3).square().mean() + net(x).square().mean()
"""


@pytest.mark.parametrize("body", [EXPONENTIALS, RECURSION], ids=["one change at four places", "lines that run several times"])
def test_what_is_wrong_in_the_same_way_at_several_places_takes_one_change(body: str, box: Sandbox) -> None:
    """The same change is tried at all of them first; a line that calls itself is one place however often it runs."""
    source = HEAD + body + TAIL
    (incident,) = box.watched(source).incidents
    remedy = incident["remedies"][0]
    assert (incident["step"], remedy["result"]) == (6, "proven"), incident
    assert "the same" in remedy["title"]
    healed = box.plain(box.write(patched(source, remedy["diff"]), "healed.py"))
    assert len(healed.out.splitlines()) == 8
    assert "nan" not in healed.out


def test_changes_that_are_finite_together_are_shown_together_though_not_proven(box: Sandbox) -> None:
    """One of them alone leaves the step as it is: it is no better advice than both."""
    hides_more = RECURSION.replace("nan_to_num(left) + torch.nan_to_num(right)", "nan_to_num(left + right)")
    (incident,) = box.watched(HEAD + hides_more + TAIL).incidents
    remedy = next(r for r in incident["remedies"] if r["diff"])
    assert (remedy["result"], remedy["effect"].partition(":")[0]) == ("failed", "finite, but the loss is another")
    assert "+    left = " in remedy["diff"] and "+    right = " in remedy["diff"]


def test_a_weight_that_the_step_sets_from_its_first_batch_may_take_two_changes(box: Sandbox) -> None:
    """The symptom is the weight then; the changes are in the lines that set it."""
    done = box.watched("""
import torch
from torch import nn
torch.manual_seed(0)
class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_scale, self.shift = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
        self.ready = False
    def forward(self, x):
        if not self.ready:
            with torch.no_grad():
                std = x.std(dim=0)
                mu = (x / std).mean(dim=0)
                self.log_scale.data = -torch.log(std)
                self.shift.data = -mu
                self.ready = True
        return x * self.log_scale.exp() + self.shift, self.log_scale.sum()
net = Norm()
opt = torch.optim.SGD(net.parameters(), 1e-3)
for step in range(3):
    x = torch.randn(16, 4) * torch.tensor([1.0, 2.0, 0.0, 3.0])
    z, volume = net(x)
    loss = z.square().mean() - 1e-3 * volume
    opt.zero_grad()
    loss.backward()
    opt.step()
""")
    remedy = done.incidents[0]["remedies"][0]
    assert remedy["result"] == "proven", done.err
    assert "mu = " in remedy["diff"] and "log_scale" in remedy["diff"]


def test_the_other_places_are_other_lines_each_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recurrence overflows by several operations of one line: that its own line is bad is no news."""
    monkeypatch.setattr(several, "_place", lambda line: ("train.py", line))
    monkeypatch.setattr(several, "_named", lambda line: f"train.py:{line} (WN503)")
    told = {tuple(more): several._others(14, more) for more in ([14, 14, 14], [9, 14], [9, 7, 9])}  # type: ignore[arg-type, list-item]
    assert list(told.values()) == [
        "this line makes non-finite values by more than one operation",
        "a second place makes non-finite values of its own: train.py:9 (WN503)",
        "2 more places make non-finite values of their own: train.py:9 (WN503), train.py:7 (WN503)",
    ]

"""`whynan lint`: what the callers of a function pass decides how sure a finding in it is; each pair differs in the caller alone."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from whynan.lint import Confidence, Settings, lint_paths, lint_text
from whynan.lint.model import Project

HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
ALL = Settings(min_confidence=Confidence.LOW)
UNIT = "def unit(v: torch.Tensor):\n    return v / v.norm(dim=-1, keepdim=True)\n"
MEAN = "def mean_over(x: torch.Tensor, mask: torch.Tensor):\n    return (x * mask).sum() / mask.sum()\n"

PAIRS = {
    "a norm of what a layer gives, or of a random vector": (
        "WN104",
        UNIT + "def step(x):\n    layer = nn.Linear(3, 3)\n    return unit(layer(x))",
        UNIT + "def step(n):\n    return unit(torch.randn(n, 3))",
    ),
    "a norm of a random vector made by a helper": (
        "WN104",
        UNIT + "def noise(x):\n    return torch.relu(x)\ndef step(x):\n    return unit(noise(x))",
        UNIT + "def noise(n):\n    return torch.randn(n, 3)\ndef step(n):\n    return unit(noise(n))",
    ),
    "a norm of what the caller asked about": (
        "WN104",
        UNIT + "def step(a, b):\n    d = torch.relu(a)\n    return unit(d)",
        UNIT + "def step(a, b):\n    d = torch.relu(a)\n    if (d == 0).any():\n        return d\n    return unit(d)",
    ),
    "a norm of rows the caller chose": (
        "WN104",
        UNIT + "def step(x):\n    h = torch.relu(x)\n    return unit(h)",
        UNIT + "def step(x):\n    h = torch.relu(x)\n    return unit(h[h.sum(1) != 0])",
    ),
    "one of two callers passes the edge": (
        "WN104",
        UNIT + "def a(n):\n    return unit(torch.randn(n))\ndef b(x):\n    return unit(torch.relu(x))",
        UNIT + "def a(n):\n    return unit(torch.randn(n))\ndef b(x):\n    return unit(F.normalize(x))",
    ),
    "a public function that is a loss, or not": (
        "WN104",
        "def cosine_loss(v: torch.Tensor):\n    return (v / v.norm()).sum()",
        "def symmetric_frame(v: torch.Tensor):\n    return (v / v.norm()).sum()",
    ),
    "a mask of ignored labels, or of padding, from the caller": (
        "WN402",
        MEAN + "def step(x, labels):\n    return mean_over(x, labels != -100)",
        MEAN + "def step(x, ids, pad_id):\n    return mean_over(x, ids != pad_id)",
    ),
    "a mask of ignored labels, or of padding, in the function": (
        "WN402",
        "def token_loss(x: torch.Tensor, y: torch.Tensor, ignore_index: int):\n    return x.sum() / y.ne(ignore_index).sum()",
        "def token_loss(x: torch.Tensor, y: torch.Tensor, pad_index: int):\n    return x.sum() / y.ne(pad_index).sum()",
    ),
    "a mask that is given, or made from lengths": (
        "WN402",
        "def token_loss(x: torch.Tensor, mask: torch.Tensor):\n    return (x * mask).sum() / mask.sum()",
        "def token_loss(x: torch.Tensor, lengths: torch.Tensor):\n"
        "    mask = torch.arange(9)[None] < lengths[:, None]\n    return (x * mask).sum() / mask.sum()",
    ),
    "a slope of what a module gives, or of what has no gradient": (
        "WN501",
        "class Net(nn.Module):\n    def __init__(self):\n        self.head = nn.Linear(3, 3)\n"
        "    def size(self, v):\n        return torch.sqrt((v ** 2).sum(-1))\n"
        "    def forward(self, x: torch.Tensor):\n        return self.size(self.head(x))",
        "class Net(nn.Module):\n    def __init__(self):\n        self.head = nn.Linear(3, 3)\n"
        "    def size(self, v):\n        return torch.sqrt((v ** 2).sum(-1))\n"
        "    def forward(self, x: torch.Tensor):\n        return self.size(self.head(x).detach())",
    ),
    "a slope under no_grad in the caller": (
        "WN501",
        "def size_loss(v):\n    return torch.sqrt((v ** 2).sum(-1))\ndef step(x, net):\n    return size_loss(net(x))",
        "def size_loss(v):\n    return torch.sqrt((v ** 2).sum(-1))\ndef step(x, net):\n    with torch.no_grad():\n        return size_loss(net(x))",
    ),
    "a slope in a class that says it has none": (
        "WN501",
        "class Rule(nn.Module):\n    def forward(self, v: torch.Tensor):\n        return torch.sqrt((v ** 2).sum(-1))",
        "class Rule(nn.Module, NonDifferentiable):\n    def forward(self, v: torch.Tensor):\n        return torch.sqrt((v ** 2).sum(-1))",
    ),
    "a slope of a tensor, or of an entry of a batch": (
        "WN501",
        "class Net(nn.Module):\n    def forward(self, x: torch.Tensor):\n        return torch.sqrt((x ** 2).sum(-1))",
        "class Net(nn.Module):\n    def forward(self, sample: dict, key):\n        x = sample[key]\n        return torch.sqrt((x ** 2).sum(-1))",
    ),
    "a slope of a result that is copied without its graph": (
        "WN501",
        "def size_loss(x: torch.Tensor):\n    return torch.log(torch.sqrt((x ** 2).sum(-1)))",
        "def size_loss(x: torch.Tensor):\n    return torch.tensor(torch.sqrt((x ** 2).sum(-1)))",
    ),
    "cross entropy of a probability with and without a gradient": (
        "WN101",
        "def d_loss(net, x, y):\n    return F.binary_cross_entropy(torch.sigmoid(net(x)), y)",
        "def d_loss(net, x, y):\n    return F.binary_cross_entropy(torch.sigmoid(net(x)).detach(), y)",
    ),
    "cross entropy of a network that is made anew in each call": (
        "WN101",
        "class D(nn.Module):\n    def forward(self, x):\n        return torch.sigmoid(x)\n"
        "def gap(x, y, d):\n    d = D()\n    o = torch.optim.SGD(d.parameters())\n    loss = nn.BCELoss()\n"
        "    p = d(x)\n    v = loss(p, y)\n    o.step()\n    return v",
        "class D(nn.Module):\n    def forward(self, x):\n        return torch.sigmoid(x)\n"
        "def gap(x, y, d):\n    d = D()\n    loss = nn.BCELoss()\n    p = d(x)\n    return loss(p, y)",
    ),
    "scores that the caller bounds": (
        "WN101",
        "def rank(s: torch.Tensor):\n    return -torch.log(torch.sigmoid(s)).mean()\ndef step(a, b):\n    return rank(a @ b)",
        "def rank(s: torch.Tensor):\n    return -torch.log(torch.sigmoid(s)).mean()\ndef step(a, b):\n    return rank(torch.tanh(a @ b))",
    ),
    "a script that trains in a loop, or runs once on fixed data": (
        "WN101",
        "x, w = torch.rand(3), torch.rand(3).requires_grad_()\ny = torch.ones(3)\nfor _ in range(9):\n"
        "    F.binary_cross_entropy(torch.sigmoid(x * w), y).backward()",
        "x, w = torch.rand(3), torch.rand(3).requires_grad_()\ny = torch.ones(3)\nF.binary_cross_entropy(torch.sigmoid(x * w), y).backward()",
    ),
    "a softmax at the target, or at its own largest entry": (
        "WN101",
        "def f(x, y):\n    p = torch.softmax(x, -1)\n    return torch.log(p.gather(1, y))",
        "def f(x, y):\n    p = torch.softmax(x, -1)\n    k = torch.argmax(p, 1, keepdim=True)\n    return torch.log(p.gather(1, k))",
    ),
    "a softmax at the target, or at what was drawn from it": (
        "WN101",
        "def f(x, y):\n    p = torch.softmax(x, -1)\n    return torch.log(p[y])",
        "def f(x, y):\n    p = torch.softmax(x, -1)\n    k = torch.multinomial(p, 1)\n    return torch.log(p[k])",
    ),
    "a softmax by hand in training, or for numpy": (
        "WN303",
        "def weights(s: torch.Tensor):\n    e = torch.exp(s)\n    return e / e.sum(-1, keepdim=True)",
        "def weights(s: torch.Tensor):\n    e = torch.exp(s)\n    p = e / e.sum(-1, keepdim=True)\n    return p.detach().cpu().numpy()",
    ),
}


def surest(source: str, code: str) -> Confidence | None:
    """The highest confidence of a code in a piece of source."""
    levels = [f.confidence for f in lint_text(HEAD + textwrap.dedent(source), settings=ALL) if f.code == code]
    return max(levels, key=lambda c: c.rank, default=None)


@pytest.mark.parametrize("name", PAIRS)
def test_the_first_is_sure_and_the_second_is_not(name: str) -> None:
    """The first of a pair is of high confidence, the second is not."""
    code, bad, good = PAIRS[name]
    assert surest(bad, code) is Confidence.HIGH
    assert surest(good, code) is not Confidence.HIGH


@pytest.mark.parametrize("index", ["torch.argmax(p, 1, keepdim=True)", "p.max(1, keepdim=True)[1]", "torch.multinomial(p, 1)", "Categorical(p).sample()"])
def test_a_picked_probability_is_no_finding_at_all(index: str) -> None:
    """The largest entry is at least 1 / n, and what was drawn has a probability above 0."""
    assert surest(f"def f(x):\n    p = torch.softmax(x, -1)\n    k = {index}\n    return torch.log(p.gather(1, k))", "WN101") is None


def test_the_largest_entry_of_another_tensor_is_not_picked() -> None:
    """Where the labels' largest entry is looked up, the probability there can be 0."""
    assert surest("def f(x, y):\n    p = torch.softmax(x, -1)\n    k = torch.argmax(y, 1)\n    return torch.log(p.gather(1, k))", "WN101") is Confidence.HIGH


def project(folder: Path, **files: str) -> dict[str, Confidence]:
    """The confidence of WN104 by file name in a folder of small files."""
    for name, text in files.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(HEAD + text)
    return {Path(f.path).stem: f.confidence for f in lint_paths([folder], ALL).findings if f.code == "WN104"}


@pytest.mark.parametrize(("given", "sure"), [("torch.randn(3)", Confidence.MEDIUM), ("torch.relu(x)", Confidence.HIGH)])
def test_callers_in_other_files_count(tmp_path: Path, given: str, sure: Confidence) -> None:
    """What another file of the project passes is read as well."""
    assert project(tmp_path, frames=UNIT, use=f"from frames import unit\ndef f(x):\n    return unit({given})\n")["frames"] is sure


def test_a_method_that_only_hands_on_is_followed_to_its_callers(tmp_path: Path) -> None:
    """An argument that is the caller's own parameter is judged by the callers of the caller."""
    between = "from frames import unit\ndef turn(v):\n    return unit(v)\n"
    assert project(tmp_path, frames=UNIT, turn=between, use="from turn import turn\ndef f(x):\n    return turn(torch.relu(x))\n")["frames"] is Confidence.HIGH
    assert (
        project(tmp_path, frames=UNIT, turn=between, use="from turn import turn\ndef f(x):\n    return turn(torch.randn(3))\n")["frames"] is Confidence.MEDIUM
    )


def test_a_function_of_the_same_name_elsewhere_is_not_this_one(tmp_path: Path) -> None:
    """A call means the function that the file imports."""
    use = "from torchvision.other import unit\ndef f(x):\n    return unit(torch.relu(x))\n"
    assert project(tmp_path, frames=UNIT, use=use)["frames"] is Confidence.MEDIUM


def test_what_a_test_passes_does_not_count(tmp_path: Path) -> None:
    """A test may pass anything; it says nothing of a run."""
    found = project(tmp_path, frames=UNIT, test_frames="from frames import unit\ndef test():\n    return unit(torch.relu(torch.zeros(3)))\n")
    assert found["frames"] is Confidence.MEDIUM


def test_instances_are_followed_to_the_forward_pass() -> None:
    """A call of an instance is a call of its forward method."""
    layer = "class Unit(nn.Module):\n    def forward(self, v: torch.Tensor):\n        return v / v.norm()\n"
    assert surest(layer + "def f(n):\n    u = Unit().to('cpu')\n    return u(torch.relu(n))", "WN104") is Confidence.HIGH
    assert surest(layer + "def f(n):\n    u = Unit().to('cpu')\n    return u(torch.randn(3))", "WN104") is Confidence.MEDIUM


def test_files_are_searched_and_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many findings ask about the callers; each file is searched for calls at most once."""
    parsed: list[Path] = []
    parse = Project._parse

    def counted(self: Project, path: Path) -> object:
        parsed.append(path)
        return parse(self, path)

    monkeypatch.setattr(Project, "_parse", counted)
    many = "".join(UNIT.replace("unit", f"unit{i}") for i in range(30))
    use = "from frames import *\nfrom frames import unit0\n" + "".join(f"def f{i}(x):\n    return unit{i}(torch.relu(x))\n" for i in range(30))
    project(tmp_path, frames=many, use=use)
    assert len(parsed) == len(set(parsed))


def test_a_call_of_itself_is_no_caller() -> None:
    """What a function passes to itself says nothing of what it is given first."""
    source = (
        "def rank_loss(s: torch.Tensor, n: int):\n    if n:\n        return rank_loss(torch.tanh(s), n - 1)\n    return -torch.log(torch.sigmoid(s)).mean()"
    )
    assert surest(source, "WN101") is Confidence.HIGH

"""The reason behind the reason: who decided the mask, which sample it was, what was handed in, what the optimizer would do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import Sandbox

import whynan
from whynan.causes import catalogue, trying
from whynan.causes.fixes import Fix

HEAD = """
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
torch.manual_seed(0)

class Scores(Dataset):
    def __init__(self):
        self.x = torch.rand(64, 6)
        self.x[:, 0] = 0.75
        self.x[37] = 0.25  # no entry of it is above one half
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return {"x": self.x[index], "mask": self.x[index] > 0.5, "name": f"file-{index}"}

net = torch.nn.Linear(6, 6)
opt = torch.optim.Adam(net.parameters(), lr=0.01)
"""

LOOP = """
for batch in DataLoader(Scores(), 8, WORKERS):
    x = batch["x"]
    DECIDE
    loss = scores.softmax(-1).square().sum()  # born here
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def first(box: Sandbox, decide: str, workers: str = "num_workers=0") -> dict[str, Any]:
    done = box.watched(HEAD + LOOP.replace("DECIDE", decide).replace("WORKERS", workers))
    assert "internal error" not in done.err
    return done.incidents[0]


@pytest.mark.parametrize(
    ("decide", "added"),
    [
        ("scores = net(x).masked_fill(~(x > 0.5), -torch.inf)", "((x > 0.5) | (x == x.amax(-1, keepdim=True)))"),
        ("scores = net(x).masked_fill(x <= 0.5, -torch.inf)", "(x <= 0.5) & (x != x.amax(-1, keepdim=True))"),
        ("scores = torch.where(x > 0.5, net(x), -torch.inf)", "(x > 0.5) | (x == x.amax(-1, keepdim=True))"),
    ],
)
def test_comparison_behind_a_mask_is_shown_and_mended(box: Sandbox, decide: str, added: str) -> None:
    incident = first(box, decide)
    assert incident["cause"]["code"] == "WN401"
    label = "decided here: in row 5 no entry counts: the largest value is 0.25, the limit 0.5"
    assert label in [span["label"] for span in incident["origin"]["from"]]
    remedy = incident["remedies"][0]
    assert remedy["result"] == "proven"
    assert any(line.startswith("+ ") and added in line for line in remedy["diff"].splitlines())


def test_mask_that_came_with_the_batch_is_said_to(box: Sandbox) -> None:
    incident = first(box, 'scores = net(x).masked_fill(~batch["mask"], -torch.inf)')
    assert "the mask came in with the batch: [8, 6], row 5 all False" in incident["cause"]["evidence"]


@pytest.mark.parametrize("workers", ["num_workers=0", "num_workers=2"])
def test_sample_is_named_by_its_number_in_the_data_set(box: Sandbox, workers: str) -> None:
    incident = first(box, "scores = net(x).masked_fill(x <= 0.5, -torch.inf)", workers)
    assert "sample 5 is number 37 of Scores, in batch 4 of this pass: name 'file-37'" in incident["cause"]["evidence"]


CONSTANT = """
import torch
torch.manual_seed(0)
table, head = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4)
opt = torch.optim.OPTIMIZER([*table.parameters(), *head.parameters()], lr=0.01)
for step in range(12):
    ids = torch.randint(9, (6,))
    if step in (5, 9):
        ids = torch.full((6,), 3)
    with torch.no_grad():
        y = 3 * table(ids).round()  # whole numbers: equal ones have a spread of exactly 0
    error = (head(y) - y).square().sum()
    loss = error / (y - y.mean(0)).square().sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def test_constant_ids_are_named_and_counted(box: Sandbox) -> None:
    done = box.watched(CONSTANT.replace("OPTIMIZER", "SGD"))
    incident = done.incidents[0]
    assert incident["cause"]["code"] == "WN404"
    assert {"6 rows, 1 unique", "input of Embedding: i64[6], all 6 are 3"} <= set(incident["cause"]["evidence"])
    assert "input of Embedding held one value only in 2 of 9 batches since step 3" in done.err
    assert incident["remedies"][0]["diff"].count(".where(") == 1  # without other batches to learn from: kept in the graph as 0
    assert any("SGD would make 20 of 56 weights non-finite" in e["answer"] for e in incident["experiments"])


def test_trial_of_the_update_leaves_the_run_as_it_was(box: Sandbox) -> None:
    """A run that observes goes on with the very same weights, and its optimizer counts one step for each of its own."""
    source = CONSTANT.replace("OPTIMIZER", "Adam").replace("(5, 9)", "(11,)") + "\nprint(float(opt.state[table.weight]['step']), torch.rand(1).item())\n"
    source = source.replace("with torch.no_grad():", "if True:")
    watched = box.watched(source, "--policy", "observe")
    plain = box.plain(box.folder / "train.py")
    assert watched.out == plain.out and watched.incidents


LIBRARY = """
import torch

def pairwise(a, b):
    return (a - b).pow(2).sum(-1).sqrt()

class Distance(torch.nn.Module):
    def forward(self, a, b):
        return pairwise(a, b).mean()
"""

USES = {
    "in the loop": "loss = library.pairwise(z, z if step == 3 else z.flip(0)).mean()",
    "a module of it": "loss = distance(z, z if step == 3 else z.flip(0))",
    "inside a model": "loss = model(x, step == 3)",
}


@pytest.mark.parametrize("line", USES.values(), ids=list(USES))
def test_the_line_that_called_a_library_is_named_beside_the_birth_in_it(box: Sandbox, line: str) -> None:
    """The birth is in an installed library; the program's own line that called it is shown with it."""
    packages = box.folder / "site-packages"
    packages.mkdir()
    (packages / "library.py").write_text(LIBRARY)
    done = box.watched(f"""
        import sys, torch
        sys.path.insert(0, {str(packages)!r})
        import library

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(4, 4)

            def forward(self, x, same):
                z = self.layer(x)
                return library.pairwise(z, z if same else z.flip(0)).mean()

        model, distance = Model(), library.Distance()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(5):
            x = torch.randn(8, 4)
            z = model.layer(x)
            {line}
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """)
    (incident,) = done.incidents
    assert incident["origin"]["file"].endswith("library.py")
    called = "return library.pairwise(z, z if same else z.flip(0)).mean()" if "model(" in line else line
    assert [(span["label"], span["code"]) for span in incident["origin"]["from"]] == [("called from here", called)]


@pytest.mark.parametrize("apart", [True, False])
def test_a_helper_of_a_library_is_told_with_the_file_that_uses_it(apart: bool, box: Sandbox) -> None:
    """What is wrong stands where the helper was given its arguments; within one file the line of the birth is enough."""
    packages = box.folder / "site-packages"
    packages.mkdir()
    helper = "def root(x):\n    return torch.sqrt(x)\n"
    (packages / "helping.py").write_text("import torch\n" + helper)
    (packages / "library.py").write_text(
        "import torch\n" + ("from helping import root\n" if apart else helper) + "\ndef length(x):\n    return root(x.square().sum(-1))\n"
    )
    done = box.watched(f"""
        import sys, torch
        sys.path.insert(0, {str(packages)!r})
        import library

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(4, 4, bias=False)

            def forward(self, x):
                return library.length(self.layer(x)).mean()

        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(5):
            loss = model(torch.zeros(3, 4) if step == 3 else torch.randn(3, 4))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """)
    incident = done.incidents[0]
    assert incident["origin"]["code"] == "return torch.sqrt(x)"
    called = [span["code"] for span in incident["origin"]["from"] if span["label"] == "called from here"]
    assert called == ["return root(x.square().sum(-1))"] * apart + ["return library.length(self.layer(x)).mean()"]


def test_a_rule_that_fails_does_not_cost_the_incident(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next rule that fits answers, the failure is noted beside it, and the watching goes on."""

    def fails(scene: object) -> None:
        raise KeyError("sum")

    monkeypatch.setattr(catalogue, "forgiving", True)
    monkeypatch.setitem(catalogue._rules, "WN101", replace(catalogue.rules()["WN101"], find=fails))
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with whynan.watch(model, optimizer, files=False) as guard:
        for step in range(4):
            loss = model(torch.ones(3, 2)).square().mean()
            loss = loss + torch.log(loss.detach() * 0) if step in (1, 3) else loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert [i.step for i in guard.incidents] == [1, 3]
    assert all(i.cause.code != "WN101" for i in guard.incidents)
    noted = [e for e in guard.incidents[0].experiments if e.question == "the rule for WN101"]
    assert [e.answer for e in noted] == ["failed, please report it: KeyError: 'sum'"]


def test_a_trial_that_fails_costs_neither_the_incident_nor_the_other_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first change tried breaks whynan: the next one is proven, and the step is skipped."""
    attempt, asked = trying._attempt, list[str]()

    def fails(scene: catalogue.Scene, finding: catalogue.Finding, fix: Fix, *rest: Any) -> Any:
        asked.append(fix.title)
        if len(asked) == 1:
            raise KeyError("of ours")
        return attempt(scene, finding, fix, *rest)

    monkeypatch.setattr(catalogue, "forgiving", True)
    monkeypatch.setattr(trying, "_attempt", fails)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with whynan.watch(model, optimizer, files=False) as guard:
        for step in range(4):
            distance = torch.sqrt((model(torch.ones(3, 2)) * (step != 2)).square().sum(-1))
            optimizer.zero_grad()
            distance.mean().backward()
            optimizer.step()
    (incident,) = guard.incidents
    assert (incident.step, incident.cause.code, incident.action.taken) == (2, "WN501", "skipped")
    assert len(asked) > 1
    assert incident.remedies[0].result == "proven"
    assert f"the change `{asked[0]}`" in [e.question for e in incident.experiments]

"""The end of a run: what the lines in the terminal say of a change, and of a stop that a batch gone over several times has made."""

from __future__ import annotations

import pytest
from conftest import Sandbox

from whynan.records import Remedy
from whynan.report import terminal

EPOCHS = """
import torch
torch.manual_seed(0)
net = torch.nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), 0.01)
for rollout in range(4):
    states, rewards = torch.randn(1 if rollout == {bad} else 6, 3), torch.randn(1 if rollout == {bad} else 6)
    for epoch in range({epochs}):
        advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-5)
        loss = (net(states).squeeze(1) * advantage).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
"""
HINT = "if that is one batch gone over several times (the epochs of PPO), --in-a-row 5 or more gets past it"


@pytest.mark.parametrize(("bad", "epochs", "options", "said"), [(2, 4, (), True), (0, 4, (), False), (2, 4, ("--in-a-row", "5"), False)])
def test_a_stop_by_one_batch_names_the_option_that_gets_past_it(bad: int, epochs: int, options: tuple[str, ...], said: bool, box: Sandbox) -> None:
    """The same bad values in every step of the row, behind healthy steps; a run that was bad from the start has no batch to get past."""
    done = box.watched(EPOCHS.format(bad=bad, epochs=epochs), *options)
    assert (HINT in done.err) == said, done.err
    assert done.status == (0 if options else 3)


def test_a_stop_by_what_every_step_is_put_back_to_says_that_skipping_cannot_help(box: Sandbox) -> None:
    """A mean that the loop carries is put back with each dropped step: the next one meets the same number again."""
    done = box.watched("""
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), 0.01)
mean = torch.tensor(1.0)
for s in range(20):
    out = net(torch.randn(8, 4))
    mean = 0.5 * mean + 0.5 * (out * (s < 2)).abs().mean().detach()
    loss = (out - 1).square().mean() + torch.log(mean - 1e-3)
    opt.zero_grad()
    loss.backward()
    opt.step()
""")
    assert done.status == 3
    assert "the next step meets them again, and skipping cannot help" in " ".join(done.err.split()), done.err


def test_the_lines_of_a_change_keep_their_depth() -> None:
    """What several lines share is left out, for each stretch of the diff."""
    one = "@@ -1,4 +1,2 @@\n     kept\n-        loss = f(\n-            x,\n-        )\n+        loss = g(x)\n"
    two = "@@ -20,2 +18,2 @@\n-    y = 1\n+    y = 2\n+\n"
    lines = terminal.changed_lines(Remedy("", f"--- a/train.py\n+++ b/train.py\n{one}{two}"))
    assert lines == ["- loss = f(", "-     x,", "- )", "+ loss = g(x)", "- y = 1", "+ y = 2", "+"]
    assert terminal.changed_lines(Remedy("advice")) == []


def test_a_diff_that_lies_outside_of_the_program_says_how_it_is_applied() -> None:
    """Its paths are below the root of the file system: patch has to be told."""
    there = Remedy("", "--- a/opt/kit/loss.py\n+++ b/opt/kit/loss.py\n@@ -1 +1 @@\n-x\n+y\n", safe=True)
    assert terminal._kind(there, "/opt/kit/loss.py") == " (same mathematics; its diff applies with patch -p1 -d /)"
    assert terminal._kind(there, "opt/kit/loss.py") == " (same mathematics)"


OUTLIER = """
import torch
import torch.nn.functional as F
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), 0.01)
batches = [torch.randn(8, 4) for _ in range(6)]
batches[4][3] = 1e5
for x in batches:
    out = net(x).squeeze(1)
    loss = {loss}.mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize(
    ("loss", "kept"),
    [("torch.log(torch.cosh(out))", ".abs() + torch.nn.functional.softplus(-2 * "), ("torch.log(1 + torch.exp(out.abs()))", "softplus(out.abs())")],
    ids=["log of cosh", "softplus by hand"],
)
def test_the_right_formula_is_shown_beside_an_input_that_is_far_off(loss: str, kept: str, box: Sandbox) -> None:
    """With it alone the loss of this batch is absurd: so it is no proof, and yet the change that the code wants."""
    told = box.watched(OUTLIER.format(loss=loss)).err
    assert "leave this sample out, which changes results" in " ".join(told.split())
    beside = told.partition(" = beside: ")[2]
    assert "(same mathematics); alone it leaves this step finite, but " in " ".join(beside.split())
    assert kept in beside
    assert "absurd: loss " in " ".join(beside.split())


def test_a_stop_by_the_total_names_the_limit_that_was_passed(box: Sandbox) -> None:
    """One bad step after several healthy ones is no row: the number in total is the reason."""
    program = EPOCHS.replace("rollout == {bad}", "rollout % 2 == 1").format(epochs=1).replace("range(4)", "range(40)")
    done = box.watched(program, "--in-total", "3")
    assert "whynan: training stopped after 4 bad steps in total, where 3 are allowed; weights are as before" in done.err, done.err

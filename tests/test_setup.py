"""Values that the program made before its first step, or in an earlier one: told at the line that made them, once a step suffers from them."""

from __future__ import annotations

import pytest
import torch
from conftest import Sandbox

import whynan

HEAD = """
    import torch
    from torch import nn

    torch.manual_seed(0)
"""

ADJACENCY = """
    A = (torch.rand(12, 12) < 0.5).float()
    A[7] = 0
    d = A.sum(1).pow(-0.5)
    S = d[:, None] * A * d
    net = nn.Linear(5, 3)
    optimizer = torch.optim.Adam(net.parameters())
    x, y = torch.randn(12, 5), torch.randint(0, 3, (12,))
    for step in range(6):
        rows = torch.arange(2 * step + 1, 2 * step + 2)
        loss = nn.functional.cross_entropy(S[rows] @ net(x), y[rows])
        optimizer.zero_grad(); loss.backward(); optimizer.step()
"""

WEIGHTS = """
    counts = torch.tensor([4.0, 5.0, 0.0])
    criterion = nn.CrossEntropyLoss(weight=counts.sum() / counts)
    net = nn.Linear(5, 3)
    optimizer = torch.optim.Adam(net.parameters())
    for step in range(4):
        loss = criterion(net(torch.randn(6, 5)), torch.randint(0, 2 + step // 2, (6,)))
        optimizer.zero_grad(); loss.backward(); optimizer.step()
"""

BUFFER = """
    class Schedule(nn.Module):
        def __init__(self):
            super().__init__()
            beta = torch.linspace(0, 0.5, 6)
            self.register_buffer("snr", (1 - beta) / beta)
            self.net = nn.Linear(4, 4)

        def forward(self, x, t):
            return (self.net(x) * self.snr[t][:, None]).square().mean()

    model = Schedule()
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(4):
        loss = model(torch.randn(3, 4), torch.tensor([1, 2, 3]) - step // 2)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
"""

MADE = {
    "adjacency": (ADJACENCY, None, "d = A.sum(1).pow(-0.5)", "WN106"),
    "weights": (WEIGHTS, None, "criterion = nn.CrossEntropyLoss(weight=counts.sum() / counts)", "WN103"),
    "buffer": (BUFFER, 2, 'self.register_buffer("snr", (1 - beta) / beta)', "WN103"),
}


@pytest.mark.parametrize("name", MADE)
def test_a_table_is_told_where_it_was_made(name: str, box: Sandbox) -> None:
    source, step, line, code = MADE[name]
    incident = box.watched(HEAD + source).incidents[0]
    assert incident["origin"]["code"] == line
    assert (incident["cause"]["code"], incident["origin"]["phase"]) == (code, "input")
    assert step is None or incident["step"] == step
    assert "loss" in incident["origin"]["from"][-1]["code"] or "snr" in incident["origin"]["from"][-1]["code"]
    assert any("made before the first step" in words for words in incident["cause"]["evidence"])


def test_a_missing_value_that_was_read_in_is_told_where_it_is_handed_in(box: Sandbox) -> None:
    """No computation made it: its line in the setup says nothing of a cause."""
    done = box.watched(
        HEAD
        + """
    data = torch.tensor([[1.0, 2.0], [float("nan"), 1.0]])
    scaled = data * 2
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(2):
        loss = net(scaled[step:step + 1]).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
    )
    [incident] = done.incidents
    assert (incident["step"], incident["cause"]["code"]) == (1, "WN701")
    assert incident["origin"]["code"].startswith("loss = net(")


def test_meant_infinities_of_the_setup_are_silent(box: Sandbox) -> None:
    done = box.watched(
        HEAD
        + """
    mask = torch.log(torch.tril(torch.ones(4, 4)))
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(3):
        loss = torch.softmax(net(torch.randn(4, 4)) + mask, -1).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
    )
    assert (done.status, done.incidents) == (0, [])


def test_a_change_before_the_first_step_is_proven_by_the_step(box: Sandbox) -> None:
    """The value is made again with it, and the step is played with that; only what fits the line, no variance where there is none."""
    (first, *_) = box.watched(HEAD + WEIGHTS).incidents[0]["remedies"]
    assert "counts" in first["diff"] and "max(" not in first["diff"]
    assert first["result"] == "proven" and "gradient alive" in first["effect"]
    roots = WEIGHTS.replace("counts.sum() / counts", "torch.sqrt(counts - 1)").replace("[4.0, 5.0, 0.0]", "[4.0, 5.0, 0.5]")
    (first, *_) = box.watched(HEAD + roots).incidents[-1]["remedies"]
    assert "clamp_min" in first["diff"] and "var" not in first["title"]


def test_changes_before_the_first_step_leave_the_step_as_it_is(box: Sandbox) -> None:
    """What the program holds is bad as before, in the next step and at its end, and a change that does not mend it is not proven."""
    at_the_end = "    import atexit; atexit.register(lambda: print(bool((S.isnan() == was).all()), bool(net.weight.isfinite().all())))\n"
    done = box.whynan(str(box.write(HEAD + ADJACENCY.replace("    net =", f"    was = S.isnan()\n{at_the_end}    net ="))))
    assert done.out.split() == ["True", "True"]
    (first, *_) = done.incidents[0]["remedies"]
    assert first["result"] == "proven" and ".pow(-0.5)" in first["diff"]


def test_a_change_that_is_not_enough_is_said_to_be_that(box: Sandbox) -> None:
    """Two of them: the step with the first mended is still bad."""
    twice = """
    counts = torch.tensor([4.0, 5.0, 0.0])
    first, second = counts.sum() / counts, counts.log()
    net = nn.Linear(5, 3)
    optimizer = torch.optim.Adam(net.parameters())
    for step in range(3):
        loss = (net(torch.randn(6, 5)).square() * first).mean() + (net(torch.randn(6, 5)) * second).mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
    remedies = box.watched(HEAD + twice).incidents[0]["remedies"]
    assert any(r["result"] == "failed" and "still not finite" in r["effect"] for r in remedies), remedies
    assert not any(r["result"] == "proven" for r in remedies)


def test_a_class_that_a_call_was_given_before_the_first_optimizer_has_no_size(box: Sandbox) -> None:
    """A subclass of a tensor has an attribute `nbytes`, which is no number: the watching was switched off."""
    done = box.watched(f"""{HEAD}
    class Pose(torch.Tensor):
        pass
    rest = torch.zeros(3).as_subclass(Pose)
    net = nn.Linear(5, 3)
    optimizer = torch.optim.Adam(net.parameters())
    for step in range(3):
        loss = net(torch.randn(6, 5)).log().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
""")
    assert "internal error" not in done.err
    assert done.incidents[0]["cause"]["code"] == "WN102"


def test_a_value_that_cannot_be_written_to_keeps_its_changes_untried(box: Sandbox) -> None:
    """An expanded tensor has one number for many elements."""
    done = box.watched(
        HEAD
        + """
    counts = torch.tensor([[4.0], [5.0], [0.0]])
    weights = (1.0 / counts).expand(3, 5)
    net = nn.Linear(5, 3)
    optimizer = torch.optim.Adam(net.parameters())
    for step in range(3):
        loss = (net.weight * weights).square().mean() + net(torch.randn(6, 5)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
    )
    assert "internal error" not in done.err
    assert done.incidents[0]["cause"]["code"] == "WN103"


ROLLOUT = """
    actor, critic = nn.Linear(3, 4), nn.Linear(3, 1)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], 3e-3)
    for turn in range(3):
        seen = torch.randn(32, 3)
        with torch.no_grad():
            said = torch.distributions.Categorical(logits=actor(seen))
            chosen = said.sample()
            before = said.log_prob(chosen)
            gain = -(chosen - seen.sum(-1)).abs()
            width = gain.abs().clone()
            if turn == 1:
                gain[20:] = width[20:] = 0.0
            gain = gain - 0.1 * gain.clamp_max(0)
            better = gain / width  # here
            reached = better + critic(seen).squeeze(-1)
        for rows in torch.arange(32).split(8):
            ratio = (torch.distributions.Categorical(logits=actor(seen[rows])).log_prob(chosen[rows]) - before[rows]).exp()
            loss = -(ratio * better[rows]).mean() + (critic(seen[rows]).squeeze(-1) - reached[rows]).square().mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
"""

TARGETS = """
    from torch.utils.data import DataLoader, TensorDataset
    net = nn.Linear(6, 1)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for turn in range(3):
        x = torch.randn(48, 6)
        with torch.no_grad():
            score = net(x).squeeze(-1) + x.sum(-1)
            if turn == 1:
                score[40:] = 2.0
            aim = torch.cat([(part - part.mean()) / part.std() for part in score.split(8)])  # here
        for xb, yb in DataLoader(TensorDataset(x, aim), batch_size=8):
            loss = (net(xb).squeeze(-1) - yb).square().mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def line_of(source: str) -> str:
    """The marked line."""
    return next(line.strip() for line in source.splitlines() if line.endswith("# here"))


@pytest.mark.parametrize(
    ("source", "code", "step"), [(ROLLOUT.replace("{rows}", "torch.arange(32).split(8)"), "WN104", 6), (TARGETS, "WN404", 11)], ids=["rollout", "loader"]
)
def test_what_an_earlier_step_computed_is_told_where_it_was_computed(source: str, code: str, step: int, box: Sandbox) -> None:
    """Several updates are made from values computed once, without gradients: the one that meets the bad rows is not the first."""
    first = box.watched(HEAD + source).incidents[0]
    assert (first["step"], first["cause"]["code"], first["origin"]["code"]) == (step, code, line_of(source))
    assert any("made in an earlier step" in words for words in first["cause"]["evidence"])
    assert "handed in here" in [span["label"] for span in first["origin"]["from"]]


def test_a_change_to_what_an_earlier_step_computed_is_proven_with_all_that_came_of_it(box: Sandbox) -> None:
    """Advantages and returns come of one division; what was drawn and what the model said then are taken as they were."""
    (remedy, *_) = box.watched(HEAD + ROLLOUT).incidents[0]["remedies"]
    assert remedy["result"] == "proven" and "better = gain / " in remedy["diff"]


def test_only_what_is_still_held_is_remembered() -> None:
    """A loop that prepares each batch by calls of its own keeps no batches: a few calls, whatever the number of steps."""
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    table = torch.zeros(8, 4)
    with whynan.watch(net, optimizer, files=False) as guard:
        counts = []
        for step in range(200):
            x = (torch.rand(16, 4) * 2 - 1) / 3
            x[0] = 0.5  # written into a tensor that a call has made
            table[step % 8] = x.mean(0)
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
            counts.append(len(guard._guard.recorder.beside.setup.held))
    assert 0 < max(counts[100:]) <= max(counts[:100]) < 200

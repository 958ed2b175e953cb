"""Counts below a fraction line: of nothing, of one, of the members of a group; guards and gradients that are gone one step further on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from conftest import Sandbox
from going_bad import first
from torch import Tensor, nn

import whynan
from whynan.records import Incident

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def first_incident(loss_of: Callable[[Tensor, bool], Tensor], build: Callable[[], nn.Module] = lambda: nn.Linear(3, 4), bad: int = 3) -> Incident:
    """Train for a few steps and return what is said of the bad one."""
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with whynan.watch(model, optimizer, files=False) as guard:
        for step in range(bad + 1):
            optimizer.zero_grad()
            loss_of(model(torch.randn(6, 3)), step == bad).backward()
            optimizer.step()
    assert guard.incidents
    return guard.incidents[0]


def selecting(loss: Loss) -> Incident:
    """The error of each sample, a mask that selects nothing in the bad step, and what it selects."""

    def loss_of(out: Tensor, bad: bool) -> Tensor:
        mask = torch.full((6,), not bad)
        return loss(out.square().sum(1), mask, mask.nonzero()[:, 0])

    return first_incident(loss_of)


NUMBERS: dict[str, Loss] = {
    "len": lambda err, m, idx: err[m].sum() / len(err[m]),
    "numel": lambda err, m, idx: err[idx].sum() / idx.numel(),
    "item of a mask": lambda err, m, idx: (err * m).sum() / m.sum().item(),
    "item of a float mask": lambda err, m, idx: (err * m.float()).sum() / m.float().sum().item(),
    "a weight before it": lambda err, m, idx: 0.5 * (err * m).sum() / int(m.sum()),
    "where": lambda err, m, idx: torch.where(m, err, 0.0).sum() / int(m.sum()),
    "masked_fill": lambda err, m, idx: err.masked_fill(~m, 0.0).sum() / int(m.sum()),
    "dot": lambda err, m, idx: torch.dot(err, m.float()) / m.sum().item(),
    "a summed loss": lambda err, m, idx: F.mse_loss(err[m], 0 * err[m], reduction="sum") / len(idx),
    "a number made a tensor": lambda err, m, idx: err[m].sum() / torch.tensor(len(idx)),
}


@pytest.mark.parametrize("loss", NUMBERS.values(), ids=list(NUMBERS))
def test_a_mean_of_nothing_by_a_plain_number_is_one(loss: Loss) -> None:
    """A divisor that was counted outside of torch is a count all the same: at least 1, and the batch trains nothing."""
    incident = selecting(loss)
    assert incident.cause.code == "WN402"
    remedy = incident.remedies[0]
    assert (remedy.title, remedy.result) == ("count at least 1", "proven")
    assert "like a skipped one" in remedy.effect and "1e-" not in remedy.diff


def test_ignored_targets_over_a_number_are_a_mean_of_nothing() -> None:
    def loss_of(out: Tensor, bad: bool) -> Tensor:
        target = torch.full((6,), -100 if bad else 1)
        return F.cross_entropy(out, target, reduction="sum") / (target != -100).sum().item()

    incident = first_incident(loss_of)
    assert incident.cause.code == "WN402" and "all 6 targets equal ignore_index -100" in incident.cause.evidence


@pytest.mark.parametrize(
    ("loss", "code", "floor"),
    [
        (lambda err, m, idx: (err - err).sum() / float(len(idx)), "WN104", "1e-6"),
        (lambda err, m, idx: err.sum() / float(len(idx)), "WN103", "1e-6"),
        (lambda err, m, idx: err.sum() / len(idx), "WN103", "1)"),
    ],
)
def test_a_number_that_counts_nothing_of_the_numerator_is_a_plain_division_by_zero(loss: Loss, code: str, floor: str) -> None:
    """The numerator sums all six samples: nothing says that the divisor counts them; only a whole number gets a floor of 1."""
    incident = selecting(loss)
    assert incident.cause.code == code
    changes = [line for remedy in incident.remedies for line in remedy.diff.splitlines() if line.startswith("+")]
    assert any(f", {floor}" in line for line in changes)


# -- a count of one -----------------------------------------------------------------------------------------------------


def grouped(loss: Callable[[Tensor, Tensor], Tensor], members: int) -> Incident:
    """Four groups of six; in the bad step the third has so few members."""

    def loss_of(out: Tensor, bad: bool) -> Tensor:
        mask = torch.ones(4, 6)
        mask[2, members if bad else 6 :] = 0
        return (loss(out.T, mask) - 0.5).square().mean()

    return first_incident(loss_of)


def deviations(v: Tensor, m: Tensor) -> Tensor:
    mean = (v * m).sum(1, keepdim=True) / m.sum(1, keepdim=True).clamp_min(1)
    return ((v - mean) ** 2 * m).sum(1)


@pytest.mark.parametrize(
    "loss",
    [
        lambda v, m: deviations(v, m) / (m.sum(1) - 1),
        lambda v, m: deviations(v, m) / m.sum(1).sub(1),
        lambda v, m: deviations(v, m) / (m.bool().sum(1) + -1),
        lambda v, m: deviations(v, m) / (m.sum(1) - 1).clamp_min(0),
    ],
)
def test_a_masked_variance_of_one_member_is_a_variance_of_one(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    incident = grouped(loss, members=1)
    assert incident.cause.code == "WN403"
    assert "the count is 1 in 1 of 4 groups, minus 1 is 0" in incident.cause.evidence
    assert incident.remedies[0].result == "proven" and "clamp_min(1)" in incident.remedies[0].diff


def test_a_variance_by_hand_over_a_number_is_a_variance_of_one() -> None:
    def loss_of(out: Tensor, bad: bool) -> Tensor:
        rows = out[: 1 if bad else 6, 0]
        return ((rows - rows.mean()) ** 2).sum() / (len(rows) - 1)

    incident = first_incident(loss_of)
    assert incident.cause.code == "WN403" and "the count is 1, minus 1 is 0" in incident.cause.evidence
    assert incident.remedies[0].result == "proven" and "max((len(rows) - 1), 1)" in incident.remedies[0].diff


def test_differences_of_neighbours_of_one_are_a_mean_of_nothing() -> None:
    """No variance: with one member there is no pair, and the count is said to be 1 and not 0."""
    incident = grouped(lambda v, m: ((v[:, 1:] - v[:, :-1]) ** 2 * m[:, 1:]).sum(1) / (m.sum(1) - 1), members=1)
    assert incident.cause.code == "WN402" and "the count is 1, minus 1 is 0" in incident.cause.evidence


def test_an_empty_group_stays_a_mean_of_nothing() -> None:
    incident = grouped(lambda v, m: deviations(v, m) / m.sum(1), members=0)
    assert incident.cause.code == "WN402" and incident.cause.label == "1 of 4 groups select nothing: the count is 0"


def test_another_number_taken_off_a_count_does_not_make_it_empty() -> None:
    incident = grouped(lambda v, m: (v * m).sum(1) / (m.sum(1) - 2), members=2)
    assert incident.cause.code == "WN103"


# -- the members of groups ----------------------------------------------------------------------------------------------


def segments(count: Callable[[Tensor, Tensor], Tensor]) -> Incident:
    """Samples of three groups; in the bad step the last group has none."""

    def loss_of(out: Tensor, bad: bool) -> Tensor:
        group = torch.tensor([0, 0, 1, 1, 2, 2])
        keep = group < (2 if bad else 3)
        total = out.new_zeros(3, 4).index_add_(0, group[keep], out[keep])
        return (total / count(group[keep], torch.ones(int(keep.sum()))).unsqueeze(-1)).square().mean()

    return first_incident(loss_of)


@pytest.mark.parametrize(
    "count",
    [
        lambda group, ones: torch.zeros(3).scatter_add_(0, group, ones),
        lambda group, ones: torch.zeros(3).scatter_add(0, group, ones),
        lambda group, ones: torch.zeros(3).index_add_(0, group, ones),
        lambda group, ones: torch.zeros(3).index_put_((group,), ones, accumulate=True),
        lambda group, ones: torch.zeros(3).scatter_reduce(0, group, ones, "sum"),
        lambda group, ones: torch.bincount(group, minlength=3),
        lambda group, ones: torch.bincount(group, minlength=3).float(),
    ],
)
def test_a_group_without_members_is_a_mean_of_nothing(count: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Whole numbers are counted at least as 1, not as 1e-12."""
    incident = segments(count)
    assert incident.cause.code == "WN402" and incident.cause.label == "1 of 3 groups are empty: the count is 0"
    remedy = incident.remedies[0]
    assert remedy.result == "proven" and "clamp_min(1)" in remedy.diff


@pytest.mark.parametrize(
    "count",
    [
        lambda group, ones: torch.zeros(3).scatter_add_(0, group, 0.3 * ones),
        lambda group, ones: torch.bincount(group, weights=0.3 * ones, minlength=3).float(),
    ],
)
def test_weights_of_a_group_are_no_count(count: Callable[[Tensor, Tensor], Tensor]) -> None:
    incident = segments(count)
    assert incident.cause.code == "WN104" and "clamp_min(1)" not in incident.remedies[0].diff


# -- a guard that was lost earlier --------------------------------------------------------------------------------------


def noisy(noise: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.bfloat16, value: float = 0.99999) -> Incident:
    """Scores with noise made from uniform numbers, one of which is another in the bad step; 0.99999 rounds to 1."""

    def loss_of(out: Tensor, bad: bool) -> Tensor:
        uniform = torch.full((6, 4), 0.5)
        uniform[1, 2] = value if bad else 0.5
        return (out + noise(uniform.to(dtype))).softmax(-1).square().sum()

    return first_incident(loss_of)


def gumbel_to_the_right(u: Tensor) -> Tensor:
    u = torch.clamp(u, max=1 - 1e-6)
    return -torch.log(-torch.log(u))


def gumbel_between(u: Tensor) -> Tensor:
    u = u.clamp(1e-6, 1 - 1e-6)
    inner = -torch.log(u)
    return -torch.log(inner)


@pytest.mark.parametrize("noise", [gumbel_to_the_right, gumbel_between])
@pytest.mark.parametrize(("dtype", "eps"), [(torch.bfloat16, "1e-06"), (torch.float16, "1e-4")])
def test_a_guard_that_rounded_away_before_another_operation_is_the_cause(noise: Callable[[Tensor], Tensor], dtype: torch.dtype, eps: str) -> None:
    """Both numbers are said, and the guard is put where the dtype has one."""
    incident = noisy(noise, dtype)
    name = str(dtype).removeprefix("torch.")
    assert incident.cause.code == "WN204" and incident.cause.label == f"the guard 1 - 1e-06 is 1 in {name}"
    assert "1 of 24 values are 1 after the guard" in incident.cause.evidence
    assert [span.label for span in incident.origin.from_] == ["the guard is here"]
    first = incident.remedies[0]
    assert first.result == "proven" and f".clamp_min({eps})" in first.diff


def inverse_log(u: Tensor) -> Tensor:
    u = u.clamp(1e-6, max=1 - 1e-6)
    return 1 / torch.log(u)


def inverse_log_by_place(u: Tensor) -> Tensor:
    u = u.clamp(1e-6, 1 - 1e-6)
    return 1 / torch.log(u)


@pytest.mark.parametrize("noise", [inverse_log, inverse_log_by_place])
def test_the_lost_guard_is_changed_at_its_own_line(noise: Callable[[Tensor], Tensor]) -> None:
    incident = noisy(noise)
    assert incident.cause.code == "WN204"
    first = incident.remedies[0]
    added = [line for line in first.diff.splitlines() if line.startswith("+ ")]
    assert first.result == "proven" and len(added) == 1 and "u = u.clamp(1e-6, " in added[0] and "1 - 4e-3)" in added[0]


@pytest.mark.parametrize(
    ("noise", "value"),
    [
        (lambda u: -torch.log(-torch.log(u)), 0.99999),  # there is no guard
        (lambda u: -torch.log(-torch.log(u.clamp(1e-6, 1 - 1e-6)) * (u != 0.25)), 0.25),  # the guard did not hold this one
    ],
)
def test_a_zero_that_no_lost_guard_made_stays_a_log_of_zero(noise: Callable[[Tensor], Tensor], value: float) -> None:
    assert noisy(noise, value=value).cause.code == "WN101"


# -- weights that get no gradient any more -------------------------------------------------------------------------------


class Contrast(nn.Module):
    """Two views of a batch, compared at a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.scale = nn.Linear(3, 4), nn.Parameter(torch.tensor(0.02))

    def forward(self, x: Tensor) -> Tensor:
        a, b = (F.normalize(self.encoder(v), dim=-1) for v in (x, x + 0.01))
        logits = a @ b.T / F.relu(self.scale)
        return F.cross_entropy(logits, torch.arange(6)) + self.scale


def test_a_remedy_that_silences_most_weights_is_not_alive() -> None:
    """The norm comes from the temperature alone: that no gradient reaches the encoder is said."""
    torch.manual_seed(0)
    model = Contrast()
    optimizer = torch.optim.SGD(model.parameters(), 0.004)
    with whynan.watch(model, optimizer, files=False) as guard:
        for step in range(3):
            if step == 2:
                with torch.no_grad():
                    model.scale.fill_(-0.01)
            optimizer.zero_grad()
            model(torch.randn(6, 3)).backward()
            optimizer.step()
    incident = guard.incidents[0]
    assert incident.cause.code == "WN103"
    told = [r for r in incident.remedies if "no gradient reaches 2 of 3 weights" in r.effect]
    assert told and all(r.result == "failed" for r in told)
    assert not any("gradient alive" in r.effect for r in told)


def test_a_batch_without_anything_for_a_head_may_leave_it_without_gradient() -> None:
    """Most weights belong to a head that this batch has nothing to teach; the mean of nothing stays proven."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.boxes, self.score = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)), nn.Linear(3, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.boxes(x), self.score(x)], 1)

    def loss_of(out: Tensor, bad: bool) -> Tensor:
        found = torch.full((6,), not bad)
        return out[:, 4].square().mean() + out[found, :4].square().sum() / len(out[found])

    incident = first_incident(loss_of, Heads)
    assert incident.cause.code == "WN402"
    assert incident.remedies[0].result == "proven" and "gradient alive" in incident.remedies[0].effect


@pytest.mark.parametrize("keep", [True, False])
def test_a_mean_over_a_dimension_without_elements(keep: bool) -> None:
    """The change sums over the same dimension, and leaves the shape as it was."""

    def loss_of(out: Tensor, bad: bool) -> Tensor:
        context = out[:, None].expand(6, 0 if bad else 2, 4)
        pooled = context.mean(1, keepdim=keep)
        return (pooled.reshape(6, 4) + out).square().mean()

    incident = first_incident(loss_of)
    assert incident.cause.code == "WN402"
    remedy = incident.remedies[0]
    assert f"torch.sum(context, 1, keepdim={'keep'}) / max(context.shape[1], 1)" in remedy.diff
    assert remedy.result == "proven"


def test_an_empty_batch_is_not_called_ignored() -> None:
    def loss_of(out: Tensor, bad: bool) -> Tensor:
        count = 0 if bad else 6
        return out.square().mean() + F.cross_entropy(out[:count], torch.ones(count, dtype=torch.long))

    incident = first_incident(loss_of)
    assert (incident.cause.code, incident.cause.label) == ("WN402", "there are no targets here: the mean is 0/0")


@pytest.mark.parametrize(("divisor", "new"), [("count", "total / max(count, 1)"), ("mask.sum()", "total / mask.sum().clamp_min(1)")])
def test_a_count_that_is_an_argument_may_be_a_plain_number_elsewhere(divisor: str, new: str, box: Sandbox) -> None:
    """The change takes numbers and tensors; a method of tensors would break the callers that hand in an int."""
    body = f"""
def mean(total, mask, count=None):
    return total / {divisor}
for step in range(5):
    mask = torch.ones(8, 1) * (step != 3)
    loss = mean((net(torch.randn(8, 4)).square() * mask).sum(), mask, mask.sum())
"""
    incident = first(box, body)
    remedy = incident["remedies"][0]
    assert (incident["cause"]["code"], remedy["result"]) == ("WN402", "proven") and new in remedy["diff"], remedy


def test_a_moving_average_of_counts_is_not_bounded_by_one() -> None:
    """Counts below 1 that are there are left as they are; what is said of the divisor is true of an average."""
    kept = torch.full((6,), 0.5)

    def loss_of(out: Tensor, bad: bool) -> Tensor:
        hot = F.one_hot(torch.arange(6) % (5 if bad else 6), 6).float()
        share = 0.9 * (kept * 0 if bad else kept) + 0.1 * hot.sum(0)
        return ((hot.T @ out) / share[:, None]).square().mean()

    incident = first_incident(loss_of)
    assert "made of sums over a mask" in str(incident.cause.evidence)
    assert "1.0)" in incident.remedies[0].diff and "clamp" not in incident.remedies[0].diff
    assert incident.remedies[0].result == "proven"


def test_a_bound_that_moves_sound_quotients_is_refused() -> None:
    """A floor under a denominator must not reach what stands below it for good."""

    def loss_of(out: Tensor, bad: bool) -> Tensor:
        widths = torch.tensor([-2.0, -1.0, 0.0 if bad else 1.0, 3.0])
        return ((out.abs() * widths) / widths.mul(1)).square().mean()

    incident = first_incident(loss_of)
    assert [r.title for r in incident.remedies if r.result == "proven"] == ["let elements whose denominator is 0 count as 0"]

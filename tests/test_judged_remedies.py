"""A remedy is judged by more than finiteness: the gradient of float64, the loss of healthy steps, what it stops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Sandbox
from going_bad import HEAD, first
from test_diffs import heal
from torch import nn

import whynan
from whynan.records import Incident
from whynan.report import terminal


def first_incident(loss_of: object, steps: int = 12, bad: int = 10, dtype: torch.dtype = torch.float32) -> Incident:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with whynan.watch(model, optimizer, files=False) as guard:
        for step in range(steps):
            x = torch.randn(8, 4, dtype=dtype)
            optimizer.zero_grad()
            loss_of(model(x), x, step == bad).backward()  # type: ignore[operator]
            optimizer.step()
    return guard.incidents[0]


def test_a_clamp_that_loses_the_gradient_of_float64_fails_and_the_log_of_the_softmax_is_first() -> None:
    """log(softmax) over several lines: the clamp is finite and points elsewhere; the logarithm taken from the logits does not."""

    def loss_of(out: torch.Tensor, x: torch.Tensor, bad: bool) -> torch.Tensor:
        p = torch.softmax(out * (150 if bad else 1), -1)
        picked = p.gather(1, torch.zeros(8, 1, dtype=torch.long)).squeeze(1)
        return -torch.log(picked).mean()

    incident = first_incident(loss_of)
    assert incident.cause.code == "WN101"
    first = incident.remedies[0]
    assert (first.result, first.safe, first.alive) == ("proven", True, True)
    assert "log_softmax" in first.title and "as in float64 (cosine 1.000)" in first.effect
    assert "same loss on the kept healthy steps" in first.effect


def test_a_clamp_does_not_hide_how_large_the_loss_is_by_the_same_formula() -> None:
    """Exponentials of huge energies underflow, in float64 too; their logarithm is finite and huge, and a clamp would only cut it off."""

    def loss_of(out: torch.Tensor, x: torch.Tensor, bad: bool) -> torch.Tensor:
        energy = (out.square() + 1).mean(-1) * (30_000 if bad else 1)
        return out.square().mean() + torch.log(torch.exp(-energy).mean())

    incident = first_incident(loss_of)
    assert incident.cause.code == "WN101"
    first = incident.remedies[0]
    assert (first.safe, first.result) == (True, "failed") and "logsumexp" in first.title and "absurd" in first.effect
    clamps = [r for r in incident.remedies if "clamp" in r.diff]
    assert clamps and all(r.result == "failed" and "only hides" in r.effect for r in clamps)


def test_what_a_clamp_stops_is_counted() -> None:
    """A proven clamp says how many elements let no gradient through, and is marked as not alive."""

    def loss_of(out: torch.Tensor, x: torch.Tensor, bad: bool) -> torch.Tensor:
        values = out.square() + 0.1
        if bad:
            values = torch.cat([values[:1] * 0, values[1:]])
        return -torch.log(values).mean()

    incident = first_incident(loss_of)
    first = incident.remedies[0]
    assert first.result == "proven" and not first.alive
    assert "no gradient passes through 3 of 24 elements" in first.effect


def test_a_clamp_that_stops_healthy_gradients_is_not_proven() -> None:
    """A logarithm of 1e-14 has a slope, and with it a gradient that the clamp takes from half of the elements to save one; a lower bound does not."""

    def loss_of(out: torch.Tensor, x: torch.Tensor, bad: bool) -> torch.Tensor:
        small = torch.ones(8, 1)
        small[4:] = 1e-14
        if bad:
            small = small.clone()
            small[0] = 0
        return torch.log((out.square() + 0.1) * small).square().mean()

    incident = first_incident(loss_of)
    clamp = next(r for r in incident.remedies if "1e-12" in r.title)
    assert clamp.result == "failed"
    assert (incident.remedies[0].result, "1e-37" in incident.remedies[0].title) == ("proven", True)


def test_a_clamp_may_stop_a_gradient_of_zero() -> None:
    """The same logarithms, of which those that the clamp holds have no weight in the loss: their gradient is 0 with it and without."""

    def loss_of(out: torch.Tensor, x: torch.Tensor, bad: bool) -> torch.Tensor:
        small = torch.ones(8, 1)
        small[4:] = 1e-14
        if bad:
            small = small.clone()
            small[4] = 0
        return (torch.log((out.square() + 0.1) * small) * (small > 1e-9)).square().mean()

    incident = first_incident(loss_of)
    clamp = next(r for r in incident.remedies if "clamp_min(1e-12)" in r.diff)
    assert clamp.result == "proven", clamp.effect


def test_a_clamp_that_holds_every_element_is_not_proven() -> None:
    """The loss is finite with it, and nothing leads back to where a logarithm exists."""

    def loss_of(out: torch.Tensor, x: torch.Tensor, bad: bool) -> torch.Tensor:
        return out.square().mean() - torch.log(torch.sigmoid(out) - (1.5 if bad else 0)).mean()

    incident = first_incident(loss_of)
    clamp = next(r for r in incident.remedies if "clamp_min(1e-12)" in r.diff)
    assert clamp.result == "failed" and "no gradient passes through any element" in clamp.effect


def fitted_scale(out: torch.Tensor, x: torch.Tensor, bad: bool) -> torch.Tensor:
    """A Gaussian likelihood, of whose variances some leave their domain."""
    variance = out[:, 0].sigmoid() - ((torch.arange(8) < 2) * 1.0 if bad else 0)
    return (torch.log(variance) + x[:, 0].square() / variance.detach().abs()).mean()


def test_a_clamp_that_the_loss_rewards_is_not_proven() -> None:
    """A variance below 0 is counted as 1e-12, the best of all: the loss is lower by that, and training would go there. The advice stands first."""
    first, clamp = first_incident(fitted_scale).remedies
    assert (first.result, first.diff) == ("not tried", "") and "softplus" in first.title
    assert clamp.result == "failed" and "rewards the fault: 2 elements lie outside the domain" in clamp.effect and " lower by it" in clamp.effect


@pytest.mark.parametrize(("before", "offset"), [(10, -300.0), (10, 0.0), (10, 5.0), (1, 0.0), (1, 5.0)])
def test_a_loss_far_below_those_of_the_steps_before_is_no_remedy(before: int, offset: float) -> None:
    """One variance at a time, as in a recurrence: no other element tells what is usual, the steps before do, be they negative, near 0 or few."""

    def loss_of(out: torch.Tensor, x: torch.Tensor, bad: bool) -> torch.Tensor:
        found = offset + out.square().mean()
        for variance in out[:, 0].sigmoid():
            found = found + 5 * torch.log(variance - (0.5 if bad else 0))
        return found

    clamp = next(r for r in first_incident(loss_of, before + 1, before).remedies if "clamp_min(1e-12)" in r.diff)
    assert clamp.result == "failed" and "rewards the fault: loss -" in clamp.effect and "the lowest of the steps before was" in clamp.effect


@pytest.mark.parametrize("sign", [1, -1])
def test_a_loss_that_falls_towards_zero_is_no_reward(sign: int) -> None:
    """A mean over what is left of a batch may vanish, and a penalty may be large: neither is held against a remedy."""

    def loss_of(out: torch.Tensor, x: torch.Tensor, bad: bool) -> torch.Tensor:
        error = (out[:, 0] - 20).abs() / 20
        kept = (torch.arange(8) > 6) * (0.0 if bad else 1.0)
        weighted = (error * kept).sum() / kept.sum()
        return weighted + 1e-3 * out.square().mean() if sign > 0 else 1e-3 * out.square().mean() - weighted

    first = first_incident(loss_of).remedies[0]
    assert first.result == "proven", first.effect


def test_a_loss_of_minus_infinity_may_be_low_with_a_remedy() -> None:
    """The logarithm of an error of exactly 0 is the best there is, by the loss of the program itself."""

    def loss_of(out: torch.Tensor, x: torch.Tensor, bad: bool) -> torch.Tensor:
        error = (out - x[:, :3]).square().sum(-1)
        return torch.log10(torch.cat([error[:1] * 0, error[1:]]) if bad else error).mean() * 10

    first = first_incident(loss_of).remedies[0]
    assert first.result == "proven" and first.effect.startswith("loss -1"), first.effect


def test_the_logarithm_of_a_determinant_is_of_its_size() -> None:
    """A triangular factor with a negative entry on its diagonal: the determinant has a size all the same, and nothing is held back."""
    factor = nn.Parameter(torch.tensor([[0.5, 0.0], [0.3, -0.2]]))
    optimizer = torch.optim.SGD([factor], 0.01)
    with whynan.watch(optimizer, files=False) as guard:
        whitened = torch.linalg.solve_triangular(factor.tril(), torch.ones(2, 8), upper=False)
        (whitened.square().sum(0).mean() + torch.log(torch.diagonal(factor)).sum()).backward()
        optimizer.step()
    first = guard.incidents[0].remedies[0]
    assert (first.result, first.alive) == ("proven", True) and "torch.log(torch.diagonal(factor).abs())" in first.diff


def test_an_angle_near_zero_keeps_its_gradient() -> None:
    """Cosines of small angles lie within 1e-6 of 1: only those that rounded past 1 may be held back."""

    def loss_of(out: torch.Tensor, x: torch.Tensor, bad: bool) -> torch.Tensor:
        cosine = 1 - (1e-3 * (0.8 + 0.4 * torch.sigmoid(out))) ** 2 / 2
        if bad:
            cosine = torch.cat([cosine[:1] * 0 + 1.0000002, cosine[1:]])
        return torch.acos(cosine).sum()

    first = first_incident(loss_of, steps=11).remedies[0]
    assert first.result == "proven" and "no gradient passes through 3 of 24 elements" in first.effect


def test_an_overflow_that_has_no_part_in_the_bad_loss_is_not_its_origin() -> None:
    """A norm hides an infinity of its own (x / inf is 0); the loss is bad by another line, and another dtype would heal both."""

    def loss_of(out: torch.Tensor, x: torch.Tensor, bad: bool) -> torch.Tensor:
        half = out.half() * (1000 if bad else 1)
        scaled = half * torch.rsqrt(half.pow(2).mean(-1, keepdim=True) + 1e-4)  # hidden
        energy = half.pow(2).mean()  # the bad one
        return scaled.float().square().mean() + 1e-4 * energy.float()

    incident = first_incident(loss_of)
    assert incident.origin.span.code.endswith("# the bad one")
    assert not any("was hidden" in line for line in incident.cause.evidence)


def test_a_change_that_moves_the_loss_of_healthy_steps_is_not_first() -> None:
    """The spread of one element: dividing by n everywhere would move every healthy loss; only the single element may change."""

    def loss_of(out: torch.Tensor, x: torch.Tensor, bad: bool) -> torch.Tensor:
        rows = out[:1, 0] if bad else out[:, 0]
        return rows.std() + out.square().mean()

    incident = first_incident(loss_of)
    assert incident.cause.code == "WN403"
    first = incident.remedies[0]
    assert first.result == "proven" and "> 1" in first.diff
    assert "same loss on the kept healthy steps" in first.effect


def test_a_loss_that_moves_towards_float64_is_no_fault_of_the_remedy() -> None:
    """mean(x²) - mean(x)² is itself wrong on healthy steps: the variance is nearer to the truth, and proven."""

    def loss_of(out: torch.Tensor, x: torch.Tensor, bad: bool) -> torch.Tensor:
        far = out * (1e-4 if bad else 1) + (300 if bad else 100)
        m = far.mean(0)
        return torch.sqrt((far * far).mean(0) - m * m).mean()

    incident = first_incident(loss_of)
    assert incident.cause.code == "WN105"
    assert incident.remedies[0].result == "proven" and "torch.var" in incident.remedies[0].title


def test_a_gradient_that_is_noise_in_float64_is_nothing_to_compare_with() -> None:
    """Features against what the same network gave before: their difference is 0 by rounding, and in float64 the rounding is all that is left of it."""
    torch.manual_seed(0)
    model, x, target = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 3)), torch.randn(8, 4), torch.randn(8, 3)
    before = model(x).detach()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with whynan.watch(model, optimizer, files=False) as guard:
        now = model(x)
        ((now - target).square().mean() + (now - before).pow(2).sum(-1).sqrt().mean()).backward()
        optimizer.step()
    first = guard.incidents[0].remedies[0]
    assert first.result == "proven" and "torch.linalg.vector_norm(now - before, dim=-1)" in first.diff
    assert "not held against float64, whose gradient is noise here" in first.effect


def test_random_draws_do_not_spoil_the_comparison_with_float64() -> None:
    """Dropout and noise draw the same numbers in float64, so the right remedy still agrees with it."""
    drop = nn.Dropout(0.5)

    def loss_of(out: torch.Tensor, x: torch.Tensor, bad: bool) -> torch.Tensor:
        noisy = drop(out) + 0.1 * torch.randn_like(out)
        p = torch.softmax(noisy * (150 if bad else 1), -1)
        return -torch.log(p).mean()

    first = first_incident(loss_of).remedies[0]
    assert first.result == "proven" and "as in float64 (cosine 1.000)" in first.effect


def test_bfloat16_in_the_place_of_float16_is_tried() -> None:
    def loss_of(out: torch.Tensor, x: torch.Tensor, bad: bool) -> torch.Tensor:
        return (out * (400 if bad else 1)).square().float().mean().clamp_max(1e9)

    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with whynan.watch(model, optimizer, files=False) as guard:
        for step in range(12):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(torch.randn(8, 4)) * (400 if step == 10 else 1)
                scores = out @ out.T
            scores.float().mean().backward()
            optimizer.step()
    incident = guard.incidents[0]
    assert incident.cause.code == "WN202"
    assert any("bfloat16" in r.title and r.result in ("proven", "failed") for r in incident.remedies)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_and_batch_have_their_type_and_bits_back(dtype: torch.dtype) -> None:
    """The step in float64 leaves nothing behind."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to(dtype)
    optimizer = torch.optim.Adam(model.parameters())
    with whynan.watch(model, optimizer, files=False) as guard:
        for step in range(3):
            x = torch.randn(8, 4, dtype=dtype)
            before = {k: v.clone() for k, v in model.state_dict().items()}
            loss = (model(x) if step < 2 else model(x) * 0).sum().abs().sqrt()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert len(guard.incidents) == 1
    assert all(torch.equal(v, before[k]) and v.dtype == before[k].dtype for k, v in model.state_dict().items())
    assert torch.get_default_dtype() is torch.float32


def test_hooks_on_the_accumulators_of_weights_go_on_firing() -> None:
    """Data parallelism hangs its work on them: an incident must not cut them."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    node = model.weight.expand_as(model.weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    fired: list[int] = []
    node.register_hook(lambda *_: fired.append(step))  # type: ignore[union-attr]
    with whynan.watch(model, optimizer, files=False) as guard:
        for step in range(6):
            out = model(torch.randn(8, 4)) * (0 if step == 3 else 1)
            optimizer.zero_grad()
            out.square().sum().sqrt().backward()
            optimizer.step()
    assert len(guard.incidents) == 1 and {4, 5} <= set(fired)


def test_recurrent_layers_are_compared_with_float64_and_work_on() -> None:
    """An LSTM keeps a second list of its weights; both are put back."""
    torch.manual_seed(0)
    model = nn.LSTM(4, 3, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with whynan.watch(model, optimizer, files=False) as guard:
        for step in range(8):
            out, _ = model(torch.randn(2, 5, 4))
            p = torch.softmax(out * (400 if step == 6 else 1), -1)
            optimizer.zero_grad()
            (-torch.log(p[..., 0]).mean()).backward()
            optimizer.step()
    first = guard.incidents[0].remedies[0]
    assert first.result == "proven" and "as in float64" in first.effect
    assert all(a is b for a, b in zip(model._flat_weights, model.parameters(), strict=True))
    assert all(p.dtype is torch.float32 for p in model.parameters())


def test_two_losses_that_are_looked_at_are_one_step() -> None:
    """The model is called twice and both losses are read before one backward pass: one incident, steps counted once."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with whynan.watch(model, optimizer, files=False) as guard:
        for step in range(6):
            one, two = (model(torch.randn(8, 4)).square().mean() / (0.0 if step == 3 else 1.0) for _ in range(2))
            _ = one.item(), two.item()
            optimizer.zero_grad()
            (one + two).backward()
            optimizer.step()
    assert [(i.step, i.action.taken) for i in guard.incidents] == [(3, "skipped")]


def test_hooks_where_gradients_are_added_up_survive_a_diagnosis(tmp_path: Path) -> None:
    """DDP's and a program's own: a weight that is given another type for a moment would lose them, and the ranks would part."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
        averaged = counted_steps(model, lambda count: model.register_comm_hook(None, counting(count)))
    finally:
        torch.distributed.destroy_process_group()
    plain = nn.Linear(4, 3)
    held = [plain.weight.expand_as(plain.weight).grad_fn.next_functions[0][0]]  # type: ignore[union-attr]
    own = counted_steps(plain, lambda count: held[0].register_hook(lambda *_: count.append(1)))
    assert averaged >= 12 and own >= 12


def counting(count: list[int]) -> Callable[..., object]:
    """A communication hook that counts."""

    def hook(_state: object, bucket: Any) -> object:
        count.append(1)
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    hook.__annotations__ = {}  # DDP compares them with types, and here they are text
    return hook


def counted_steps(model: nn.Module, hook: Callable[[list[int]], object]) -> int:
    """Train 13 steps, one of them bad early on; return how often the hook was called."""
    count: list[int] = []
    hook(count)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with whynan.watch(model, optimizer, files=False) as guard:
        for step in range(13):
            optimizer.zero_grad()
            p = torch.softmax(model(torch.randn(8, 4)) * (1500 if step == 3 else 1), -1)
            (-torch.log(p[:, 0])).mean().backward()
            optimizer.step()
    assert guard.incidents[0].cause.code == "WN101"
    return len(count)


class Flow(nn.Module):
    """A head behind an encoder; flows of 0 are masked out after the root of their squares."""

    def __init__(self, head: float) -> None:
        super().__init__()
        self.encoder, self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), nn.Linear(4, 2, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        nn.init.constant_(self.head.weight, head)

    def forward(self, x: torch.Tensor, true: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        error = (self.head(torch.tanh(self.encoder(x))) * valid[:, None] - true).square().sum(-1)
        return self.scale * (torch.sqrt(error) * valid).sum()


def first_step_of(model: nn.Module, *batch: torch.Tensor) -> Incident:
    """Train one step, of which nothing is known from before."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with whynan.watch(model, optimizer, files=False) as guard:
        model(*batch).backward()
        optimizer.step()
    return guard.incidents[0]


def test_a_weight_behind_a_layer_of_zeros_has_no_gradient_that_a_remedy_could_take() -> None:
    """In the first step of a zero-initialised head the encoder has none: the NaN reached it, numbers in its place do not."""
    torch.manual_seed(0)
    valid = torch.tensor([0.0, 1.0, 1.0, 1.0])
    batch = torch.randn(4, 4), torch.randn(4, 2) * valid[:, None], valid
    incident = first_step_of(Flow(0.0), *batch)
    assert incident.cause.code == "WN502" and incident.remedies[0].result == "proven"


def test_a_weight_that_numbers_would_reach_must_still_be_reached() -> None:
    """The first step, and a change that leaves only the scale with a gradient: nothing before has to be known to see that."""
    torch.manual_seed(0)

    class Logarithm(Flow):
        def forward(self, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            gate = (self.head(torch.tanh(self.encoder(x))) - 5).sigmoid().sum() - 8
            return torch.log(gate) * self.scale

    incident = first_step_of(Logarithm(0.1), torch.randn(4, 4), torch.zeros(()), torch.zeros(()))
    told = [r.effect for r in incident.remedies if "no gradient reaches 5 of 6 weights" in r.effect]
    assert told and all(r.result != "proven" for r in incident.remedies)


class Depth(nn.Module):
    """Disparities of rays; one that meets nothing has depth 0 over weight 0, for which 0 is the worst number there is."""

    def __init__(self, nearest: float) -> None:
        super().__init__()
        self.net, self.nearest = nn.Linear(4, 1), nearest

    def forward(self, x: torch.Tensor, near: torch.Tensor) -> torch.Tensor:
        weight = torch.sigmoid(self.net(x)).squeeze(-1) * near.any(-1)
        depth = (weight * 3) / weight
        return (1 / torch.clamp(depth, min=self.nearest)).square().mean() + self.net(x).square().mean()


@pytest.mark.parametrize(("bad", "nearest"), [([3], 1e-3), ([*range(8)], 1e-6)], ids=["one sample of eight", "all of them"])
def test_a_loss_that_is_absurd_is_so_in_the_first_step_too(bad: list[int], nearest: float) -> None:
    """Nothing was before it: the step without its bad samples tells the size of a loss, and where it cannot, there is a bound."""
    torch.manual_seed(0)
    near = torch.ones(8, 2)
    near[bad] = 0
    incident = first_step_of(Depth(nearest), torch.randn(8, 4), near)
    assert incident.cause.code == "WN104"
    told = [r.effect for r in incident.remedies if "absurd" in r.effect]
    assert told and all(r.result != "proven" for r in incident.remedies if r.diff), incident.remedies
    assert ("without the bad samples it is" in told[0]) == (len(bad) == 1)


def test_a_quotient_that_saturates_is_kept_large_not_made_zero(box: Sandbox) -> None:
    """A step of length 0 moves nothing: the limit of `c / dt` is infinite, and to let it count as 0 would be a step without end."""
    (incident,) = box.watched("""
import torch
from torch import nn
torch.manual_seed(0)
net, decay = nn.Linear(3, 1), nn.Parameter(torch.ones(1))
opt = torch.optim.SGD([*net.parameters(), decay], 1e-2)
for s in range(8):
    x = torch.randn(8, 3)
    dt = torch.rand(8, 1) + 0.5
    if s == 4:
        dt[2] = 0
    h = torch.ones(8, 1)
    stiff = decay / dt
    h = (stiff * h + net(x)) / (stiff + 1)
    loss = (h - x.sum(1, keepdim=True)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""").incidents
    first = incident["remedies"][0]
    assert (incident["cause"]["code"], first["result"]) == ("WN103", "proven")
    assert "stiff = decay / dt.clamp_min(1e-12)" in first["diff"], first["diff"]


@pytest.mark.parametrize("divided", ["x = x / scale", "x /= scale", "x = x.div_(scale)"])
def test_zero_over_zero_counts_as_zero_also_where_the_next_numerator_is_not_zero(divided: str, box: Sandbox) -> None:
    """Zero over a tiny number is 0 as well, but the next batch is then a million million times too large."""
    source = f"""
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), 1e-2)
scale = torch.ones(3)
for s in range(8):
    x = torch.randn(8, 3)
    if s == 4:
        scale[2], x[:, 2] = 0, 0
    {divided}
    loss = (net(x) - 1).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(loss.item())
"""
    first = box.watched(source).incidents[0]["remedies"][0]
    assert first["result"] == "proven" and "scale.where(scale != 0, float('inf'))" in first["diff"], first
    assert max(heal(box, first["diff"])) < 10


def test_a_gradient_of_the_programs_own_that_is_divided_by_zero_counts_as_zero(box: Sandbox) -> None:
    """No backward pass makes a difference to the loss: that it makes none does not show that a quotient of any size is right."""
    (incident,) = box.watched("""
import torch
from torch import nn
class Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        length = x.norm(dim=-1, keepdim=True)
        ctx.save_for_backward(out := x / length.clamp_min(1e-12), length)
        return out
    @staticmethod
    def backward(ctx, g):
        out, length = ctx.saved_tensors
        return (g - out * (g * out).sum(-1, keepdim=True)) / length
torch.manual_seed(0)
net = nn.Linear(3, 3, bias=False)
opt = torch.optim.SGD(net.parameters(), 1e-2)
for s in range(8):
    x = torch.randn(8, 3)
    if s == 4:
        x[2] = 0
    loss = (Unit.apply(net(x)) - 1).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""").incidents
    first = incident["remedies"][0]
    assert (incident["cause"]["code"], first["result"]) == ("WN103", "proven")
    assert "length.where(length != 0, float('inf'))" in first["diff"], first["diff"]


_RULED_OUT = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Linear(6, 4)
opt = torch.optim.SGD(net.parameters(), 1e-2)
for s in range(8):
    legal = torch.ones(16, 4) > 0
    if s == 5:
        legal[3] = False
    out = net(torch.randn(16, 6))
    masked = out.masked_fill(~legal, float("-inf"))
    before = torch.zeros(16, 4).masked_fill(~legal, float("-inf"))
    above = masked - before
    loss = {loss}
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


@pytest.mark.parametrize(
    ("loss", "result", "words"),
    [
        ("(out.mean(1) + (above + 0.1).max(1).values).square().mean()", "not proven", "max at line 15 then chooses what was ruled out"),
        ("(above + 0.1).square().mean()", "proven", "that this number is meant there is not proven"),
        ("out.square().mean() + (legal * above).sum(1).square().mean()", "proven", ""),
    ],
    ids=["chosen from", "counted", "weighed with 0"],
)
def test_a_number_where_none_follows_is_called_a_choice(loss: str, result: str, words: str, box: Sandbox) -> None:
    """Where the step depends on it that is said, and where something is chosen by it the change is not offered first."""
    (incident,) = box.watched(_RULED_OUT.format(loss=loss)).incidents
    assert incident["cause"]["code"] == "WN301"
    zero = next(r for r in incident["remedies"] if "count as 0" in r["title"])
    assert zero["result"] == result and words in zero["effect"], zero
    assert ("not proven" in zero["effect"]) == ("not proven" in words)
    assert (incident["remedies"][0] == zero) == (result == "proven")


def test_a_wider_type_at_one_of_two_places_is_held_against_float64() -> None:
    """The union of two boxes overflows as their intersection does: with that alone in float32 the quotient is finite and wrong."""

    def loss_of(out: torch.Tensor, x: torch.Tensor, bad: bool) -> torch.Tensor:
        size = out.abs() + torch.tensor([[500.0 if bad else 5.0]] + [[5.0]] * 7, dtype=out.dtype)
        inter = size[:, 0] * size[:, 1]
        union = size[:, 0] * size[:, 2] + inter
        return (1 - inter / union).mean() + 0 * x.sum()

    incident = first_incident(loss_of, dtype=torch.float16)
    assert incident.cause.code == "WN202"
    narrow = [r for r in incident.remedies if r.diff and ".float()" in r.diff]
    assert narrow and all(r.result == "failed" and "another place is past the range, too" in r.effect for r in narrow)
    assert incident.remedies[0].result == "proven" and "bfloat16" in incident.remedies[0].title


@pytest.mark.parametrize(("parts", "said"), [(1, "this batch then trains nothing"), (3, "this backward pass, one of several, then adds nothing")])
def test_a_pass_of_several_that_adds_nothing_is_not_the_whole_batch(parts: int, said: str, box: Sandbox) -> None:
    """The other micro-batches of the step train all the same."""
    done = box.watched(f"""
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Linear(4, 3)
opt = torch.optim.SGD(net.parameters(), 0.1)
for step in range(4):
    opt.zero_grad()
    for part in range({parts}):
        target = torch.randint(0, 3, (8,))
        if step == 2 and part == {parts} // 2:
            target[:] = -100
        nn.functional.cross_entropy(net(torch.randn(8, 4)), target).backward()
    opt.step()
""")
    (incident,) = done.incidents
    assert (incident["step"], incident["cause"]["code"]) == (2, "WN402"), done.err
    assert said in incident["remedies"][0]["effect"]


def test_what_throws_bad_entries_away_is_named_not_a_limit_that_lets_nan_pass(box: Sandbox) -> None:
    """clamp(nan) is nan, and so is its acos: the mask behind them is what selects."""
    incident = first(
        box,
        """
for step in range(5):
    x = torch.randn(6, 4)
    if step == 3:
        x[2] = 0
    y = x * net.weight
    cosine = (y * x).sum(1) / (y.norm(dim=1) * x.norm(dim=1))
    angle = torch.acos(cosine.clamp(-0.9, 0.9))
    loss = angle.masked_fill(x.abs().sum(1) == 0, 0.0).mean()
""",
    )
    assert incident["cause"]["code"] == "WN502"
    assert any("feeds masked_fill, which" in e for e in incident["cause"]["evidence"]), incident["cause"]["evidence"]
    assert "!= 0, 1.0)" in incident["remedies"][0]["diff"] and "ones_like" not in incident["remedies"][0]["diff"]


def test_a_trial_that_is_no_change_of_the_program_is_not_told(box: Sandbox) -> None:
    """A call that gives two results is not the softmax inside of it."""
    incident = first(
        box,
        """
attention = nn.MultiheadAttention(4, 1, batch_first=True)
for step in range(5):
    x, padding = torch.randn(3, 5, 4), torch.zeros(3, 5, dtype=torch.bool)
    padding[1] = step == 3
    pooled, _ = attention(x, x, x, key_padding_mask=padding)
    loss = net(pooled).square().mean()
""",
    )
    assert incident["cause"]["code"] == "WN401"
    assert not any("unpack" in e for e in incident["cause"]["evidence"])


def test_a_loss_far_above_the_usual_is_said_to_be_that(box: Sandbox) -> None:
    """It is still a remedy of this step; how large the step is then is for the reader to weigh."""
    incident = first(
        box,
        """
for step in range(8):
    x = torch.rand(6, 4)
    rate = torch.relu(net(x) + 1.0 - 1.9 * (step == 6) * (x[:, :1] > 0.5))
    loss = 0.01 * rate.square().mean() + 0.5 * torch.lgamma(rate).clamp_min(0.0).mean() * (step == 6)
""",
    )
    assert any("(the steps before had a loss of about" in r["effect"] for r in incident["remedies"]), incident["remedies"]


def test_the_log_of_a_picked_probability_next_to_0_is_taken_from_the_logits(box: Sandbox) -> None:
    """Its slope, 1 / p, is past the range: log_softmax, then the picking."""
    incident = first(
        box,
        """
for step in range(5):
    logits = torch.cat([net(torch.eye(4)) * 0, net(torch.eye(4)) * 0 + (96.0 if step == 3 else 1.0) + 0.01 * net.bias], 1)
    taken = torch.softmax(logits, 1).gather(1, torch.zeros(4, 1, dtype=torch.long))
    loss = -torch.log(taken).mean()
""",
    )
    assert incident["cause"]["code"] == "WN503"
    assert incident["remedies"][0]["result"] == "proven" and "log_softmax" in incident["remedies"][0]["title"], incident["remedies"]


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("train.py", "(changes results)"),
        ("lib/python3.11/site-packages/kit/metrics.py", "(changes results; in an installed library: override it, or report it there)"),
        ("usr/lib/python3/dist-packages/kit/metrics.py", "(changes results; in an installed library: override it, or report it there)"),
    ],
)
def test_a_change_in_a_library_is_said_to_be_one(file: str, said: str) -> None:
    """The next update of it would take the change back."""
    incident = first_incident(lambda y, x, bad: (y * (not bad)).square().sum(1).sqrt().mean())
    remedy = replace(incident.remedies[0], diff=f"--- a/{file}\n+++ b/{file}\n@@ -1 +1 @@\n-x\n+y\n", safe=False)
    assert said in " ".join(terminal.diagnosis(replace(incident, remedies=(remedy,))).split())


def test_equal_eigenvalues_are_separated_by_less_than_they_are(box: Sandbox) -> None:
    """A spread of 1e-3 on eigenvalues of 1e-3 is another matrix: it goes by the size of what it is added to."""
    body = """
for step in range(5):
    a = net(torch.randn(6, 40, 4)).mT * (torch.arange(6) != 2 if step == 3 else torch.ones(6))[:, None, None]
    e, v = torch.linalg.eigh(a @ a.mT / 40 + 1e-3 * torch.eye(3))
    loss = ((v * e.log()[:, None]) @ v.mT).square().mean()
"""
    incident = first(box, body, HEAD.replace("nn.Linear(4, 1)", "nn.Linear(4, 3, bias=False)"))
    remedy = incident["remedies"][0]
    assert (incident["cause"]["code"], remedy["result"]) == ("WN504", "proven") and ".diagonal(dim1=-2, dim2=-1)" in remedy["diff"], remedy


def test_a_bound_that_healthy_steps_never_came_to_says_where_alone_it_changes_results() -> None:
    """Their replayed losses are the same with it: to say that it changes results would frighten for nothing."""

    def loss_of(out: torch.Tensor, x: torch.Tensor, bad: bool) -> torch.Tensor:
        away = torch.arange(8) == (2 if bad else 9)
        return torch.where(away, 0.0, torch.exp(out.mean(1) + 100.0 * away)).mean()

    first = first_incident(loss_of).remedies[0]
    assert (first.result, first.only) == ("proven", "above 80") and "same loss on the kept healthy steps" in first.effect, first
    told = [terminal._kind(replace(first, only=only)) for only in ("above 80", "")]
    assert told == [" (changes results only above 80)", " (changes results)"]


@pytest.mark.parametrize("policy", ["observe", "skip"])
def test_a_bound_that_stays_in_a_weight_is_not_proven_by_one_batch(policy: str, box: Sandbox) -> None:
    """An initialisation by the first batch keeps its numbers; trials of it leave the weight as the step set it."""
    source = """
import torch
from torch import nn
torch.manual_seed(0)

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(3))
        self.register_buffer("done", torch.tensor(False))
    def forward(self, x):
        if not self.done:
            with torch.no_grad():
                self.log_scale.data = -torch.log(x.std(0))
                self.done.data = torch.tensor(True)
        return x * self.log_scale.exp(), self.log_scale.sum()

scaled, net = Scaled(), nn.Linear(3, 3)
opt = torch.optim.SGD([*scaled.parameters(), *net.parameters()], 1e-2)
out, size = scaled(torch.randn(16, 3) * torch.tensor([1.0, 0.0, 1.0]))
loss = net(out).square().mean() - size
loss.backward()
print(scaled.log_scale.tolist())
opt.step()
"""
    done = box.watched(source, "--policy", policy)
    assert done.out == box.plain(box.write(source)).out
    first = done.incidents[0]["remedies"][0]
    assert first["result"] == "proven" and "count as 1" in first["title"], done.incidents[0]["remedies"]


def test_a_change_that_is_known_to_fail_is_no_help(box: Sandbox) -> None:
    """Where every trial failed, advice comes first, and the trials are notes; a bound that is 1 in float32 is named."""
    done = box.watched("""
import torch
from torch import nn
torch.manual_seed(0)
rate = nn.Parameter(torch.tensor([5.0, 0.2, 0.5]))
net = nn.Linear(3, 3)
opt = torch.optim.SGD([rate, *net.parameters()], 0.1)
slow = torch.ones(3).mul_(0.999999999)  # no bound of anything
share = torch.rand(3, dtype=torch.float64).clamp(max=1 - 1e-8)  # holds: in float64
kept = torch.where(rate > 1, rate / rate * (1 - 1e-9), rate)
loss = torch.atanh(kept.mul(1).expand(4, 3) * net.weight.mul(0).exp().mean()).sum() * 0 + net.weight.sum() * 0 + slow.sum() * share.sum() * 0
loss.backward()
opt.step()
""")
    (incident,) = done.incidents
    assert [r["result"] for r in incident["remedies"]] == ["not tried", "failed"]
    assert not incident["remedies"][0]["diff"]
    evidence = incident["cause"]["evidence"]
    assert any(words.startswith("does not help: keep the argument inside (-1, 1): ") for words in evidence)
    assert [words[:12] for words in evidence if "is 1 in float32" in words] == ["1 - 1e-09 at"]
    assert "help: keep what this argument is made of" in " ".join(done.err.split()) and "advice was not replayed" in done.err


def test_an_epsilon_that_leaves_a_peak_of_a_pole_is_not_proven(box: Sandbox) -> None:
    """A slope that is derived again has its pole squared: finite with a small epsilon, but loss and gradient are a thousand times those of all steps before."""
    (incident, *_) = box.watched("""
import torch
torch.manual_seed(0)
field = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
opt = torch.optim.Adam(field.parameters(), 2e-3)
for s in range(16):
    p = torch.rand(24, 2) + 0.3
    if s == 12:
        p[3] = 0
    p.requires_grad_()
    r = p.pow(2).sum(-1, keepdim=True).sqrt()
    (g,) = torch.autograd.grad(field(torch.cat([p, 0.3 * r], -1)).sum(), p, create_graph=True)
    curved = [torch.autograd.grad(g[:, k].sum(), p, create_graph=True)[0][:, k] for k in range(2)]
    loss = (sum(curved) + 4).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""").incidents
    effects = {r["title"].partition(" inside")[0]: (r["result"], r["effect"]) for r in incident["remedies"]}
    assert incident["cause"]["code"] == "WN501"
    assert effects["add 1e-6"][0] == "failed" and "the blow-up is only smaller" in effects["add 1e-6"][1], effects
    assert incident["remedies"][0]["title"].startswith("add 1e-3") and incident["remedies"][0]["result"] == "proven", effects


SMALL = """
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), 0.01)
mean = torch.tensor(1.0)
for s in range(14):
    x = torch.randn(8, 4)
    used = float(s < 2)
    if s == 10:
        mean = torch.tensor(1e-38) / 8
    value = {value}
    loss = (net(x) - 1).square().mean() + {term}
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def test_a_floor_under_a_tiny_denominator_is_proven_where_it_leaves_the_loss(box: Sandbox) -> None:
    """0 over 1e-39 is 0 and its slope past float32: with a floor the quotient and the loss are the same, and the slope is finite."""
    (incident, *_) = box.watched(SMALL.format(value="net(x).abs().mean() * 0", term="value / mean")).incidents
    remedy = incident["remedies"][0]
    assert (incident["cause"]["code"], remedy["result"]) == ("WN503", "proven"), incident["remedies"]
    assert "value / mean.clamp_min(1e-18)" in remedy["diff"]


def test_a_floor_under_a_denominator_that_is_meant_to_be_so_small_is_not_proven(box: Sandbox) -> None:
    """There the quotient is of ordinary size: a floor gives another loss, which is said."""
    (incident, *_) = box.watched(SMALL.format(value="net(x).abs().mean() * (mean if s == 10 else 1.0)", term="value / mean.clone()")).incidents
    assert incident["cause"]["code"] == "WN503"
    assert all(r["result"] != "proven" for r in incident["remedies"]), incident["remedies"]
    assert "in logarithms or in float64" in incident["remedies"][0]["title"]

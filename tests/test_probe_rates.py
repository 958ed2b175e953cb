"""`whynan probe`: a learning rate that is too large or too small for a model is told before the first step, a fit one is not."""

from __future__ import annotations

import copy
import doctest
import functools
import math
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from probe_models import HEALTHY, cnn_with_batchnorm, lstm, mlp, regression_without_model
from torch import nn

import whynan
from whynan.commands.main import main
from whynan.errors import UsageError
from whynan.probing import rates, training
from whynan.probing.attacking import Attacks
from whynan.probing.results import Finding, Level, Verdict
from whynan.probing.steps import step_of
from whynan.probing.subject import subject_of

AdamW, SGD = torch.optim.AdamW, torch.optim.SGD
Judged = tuple[Verdict, list[Finding]]
Made = tuple[Any, Any, Any]


def made_by(factory: Callable[[], Any]) -> Made:
    model, loss_fn, batch = factory()
    return model, loss_fn, batch


def judged(model: Any, loss_fn: Any, batch: Any, **more: Any) -> Judged:
    step = step_of(subject_of({"model": model, "loss_fn": loss_fn, "batch": batch, **more}))
    attacks = Attacks(step)
    made = training.training_of(step)
    assert made is not None
    return rates.verdict_of(attacks, made), attacks.found


def wide_mlp(dropout: float = 0.5) -> Made:
    torch.manual_seed(0)
    body = [nn.Linear(64, 256), nn.ReLU(), nn.Dropout(dropout), nn.Linear(256, 256), nn.ReLU(), nn.Dropout(dropout), nn.Linear(256, 10)]
    return nn.Sequential(*body), F.cross_entropy, (torch.rand(32, 64), torch.randint(0, 10, (32,)))


class Language(nn.Module):
    """A small causal transformer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 64), nn.Linear(64, 50)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.body(self.embed(ids), mask=nn.Transformer.generate_square_subsequent_mask(ids.shape[1])))
        return made


def language() -> Made:
    torch.manual_seed(0)
    return Language(), lambda out, ids: F.cross_entropy(out[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), torch.randint(0, 50, (4, 16))


def fitted() -> Made:
    """A model that has nothing left to learn on its batch: any update makes the loss many times what it was."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1), nn.Flatten(0))
    x = torch.randn(64, 4)
    return model, F.mse_loss, (x, model(x).detach() + 1e-3 * torch.randn(64))


FIT = {
    "adam 1e-4": functools.partial(torch.optim.Adam, lr=1e-4),
    "adamw 1e-3": functools.partial(AdamW, lr=1e-3),
    "adamw 3e-3": functools.partial(AdamW, lr=3e-3),
    "sgd 0.01": functools.partial(SGD, lr=0.01, momentum=0.9),
    "sgd 0.1": functools.partial(SGD, lr=0.1, momentum=0.9),
}
MODELS = [*[m for m in HEALTHY if m is not regression_without_model], wide_mlp, language, fitted]


@pytest.mark.parametrize("optimizer", FIT.values(), ids=FIT)
@pytest.mark.parametrize("made", MODELS)
def test_a_usual_rate_is_not_told(made: Callable[[], Any], optimizer: Callable[..., Any]) -> None:
    """Neither a finding nor a note, with dropout, batch normalisation, noise, or a loss that begins near 0."""
    verdict, found = judged(*made(), optimizer=optimizer)
    assert (verdict.state, [f.text for f in found]) == ("ok", [])


@pytest.mark.parametrize("made", [wide_mlp, language, lstm, mlp, cnn_with_batchnorm])
@pytest.mark.parametrize("optimizer", [functools.partial(AdamW, lr=30.0), functools.partial(SGD, lr=300.0, momentum=0.9)])
def test_an_absurd_rate_is_told(made: Callable[[], Any], optimizer: Callable[..., Any]) -> None:
    _, found = judged(*made(), optimizer=optimizer)
    assert len(found) == 1 and re.match(r"rate 300?: ", found[0].text), found


def test_the_finding_says_how_the_loss_goes_and_from_which_rate_down_it_falls() -> None:
    """The numbers are those of a training by hand: the loss there, and the fall at the rate named."""
    _, (finding,) = judged(*wide_mlp(0.0), optimizer=functools.partial(AdamW, lr=0.5))
    told = re.fullmatch(
        r"rate 0\.5: the loss on one batch goes from (\S+) to (\S+) in (\d+) updates?( \(after 8 it is \S+\))?; from (\S+) down it falls", finding.text
    )
    assert finding.level is Level.FINDING and told is not None, finding.text
    by_hand = _trained(0.5)
    assert by_hand[0] == pytest.approx(float(told[1]), rel=1e-3) and by_hand[int(told[3])] == pytest.approx(float(told[2]), rel=1e-2)
    edge = float(told[5])
    assert _trained(edge)[-1] < by_hand[0] and max(_trained(edge)) < 2 * by_hand[0]
    assert edge < 0.5 and max(_trained(edge * 10)) > 2 * by_hand[0]


def _trained(rate: float) -> list[float]:
    model, loss_fn, (x, y) = wide_mlp(0.0)
    optimizer = AdamW(model.parameters(), lr=rate)
    losses = []
    for _ in range(9):
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        losses.append(float(loss))
        loss.backward()
        optimizer.step()
    return losses


def test_a_loss_that_becomes_nan_is_told() -> None:
    model, _, batch = made_by(lstm)
    _, (finding,) = judged(model, lambda out, b: (out - 100 * b[1]).pow(4).mean(), batch, optimizer=functools.partial(SGD, lr=1.0))
    assert finding.level is Level.FINDING and re.search(r"goes from \S+ over \S+ to (nan|inf) in \d updates?; from \S+ down it", finding.text), finding.text


def test_what_no_rate_cures_is_not_put_on_the_rate() -> None:
    """A root whose argument is exactly 0 after any update that is none at all."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.start = torch.ones(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            moved = (self.w.detach() != self.start).any()
            return (self.w * x).sum() / (0.0 if moved else 1.0)

    _, (finding,) = judged(Root(), lambda out: out, torch.ones(3), lr=0.1)
    assert re.search(r"no rate down to \S+ is better, so most likely it is not the rate", finding.text), finding.text


def test_clipping_is_heard() -> None:
    """A rate that explodes without clipping and is fine with it is told only without."""
    torch.manual_seed(0)
    x = torch.randn(64, 10)
    given = nn.Linear(10, 1), lambda out, b: F.mse_loss(out[:, 0], b[1]), (10 * x, 100 * x.sum(1))
    optimizer = functools.partial(SGD, lr=0.1)
    assert [f.level for f in judged(*given, optimizer=optimizer)[1]] == [Level.FINDING]
    assert judged(*given, optimizer=optimizer, clip=1.0)[1] == []


def test_weights_that_explode_under_a_falling_loss_are_told() -> None:
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    batch = torch.randn(16, 8), torch.randn(16, 8) + 1
    _, (finding,) = judged(critic, lambda model, b: model(b[0]).mean() - model(b[1]).mean(), batch, optimizer=functools.partial(SGD, lr=10.0))
    assert finding.level is Level.FINDING and "the norm of all weights grows" in finding.text


@pytest.mark.parametrize(("healed", "level"), [(True, Level.NOTE), (False, Level.FINDING)])
def test_a_rise_that_heals_is_a_note(healed: bool, level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty times the first loss after 8 updates is a finding only if it is so after 32."""

    def course(step: object, made: object, given: tuple[float, ...], updates: int) -> training.Course:
        end = 20.0 if max(given) == 0.1 and (updates == 8 or not healed) else 0.5
        return training.Course((*[1.0] * updates, end), graded=5)

    monkeypatch.setattr(rates, "course", course)
    _, (told,) = judged(*mlp(), lr=0.1)
    assert told.level is level and told.text == "rate 0.1: the loss on one batch goes from 1 to 20 in 8 updates; from 0.03 down it falls"


def test_a_loss_that_rises_at_every_rate_is_no_matter_of_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient is not that of what is to fall, as in a game of two."""
    monkeypatch.setattr(rates, "course", lambda *_: training.Course((1.0,) * 8 + (20.0,), graded=5))
    assert judged(*mlp(), lr=0.1)[1] == []


# -- too small --------------------------------------------------------------------------------------------------


def test_updates_that_round_away_are_told() -> None:
    _, (finding,) = judged(*wide_mlp(), optimizer=functools.partial(SGD, lr=1e-12))
    assert finding.level is Level.FINDING and re.search(r"rate 1e-12: all [\d ]+ weights with a gradient keep all their bits \(f32\)", finding.text)


def test_a_rate_of_zero_is_told() -> None:
    _, (finding,) = judged(*mlp(), lr=0)
    assert finding.level is Level.FINDING and "nothing is learned" in finding.text


def test_half_precision_weights_that_mostly_stand_still_are_a_note() -> None:
    """The biases that begin at 0 move, the rest does not; the same weights in float32 all move."""
    model, loss_fn, (x, y) = wide_mlp(0.0)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.zeros_(layer.bias)
    optimizer = functools.partial(torch.optim.Adam, lr=1e-6)
    _, (note,) = judged(copy.deepcopy(model).bfloat16(), loss_fn, (x.bfloat16(), y), optimizer=optimizer)
    assert note.level is Level.NOTE and re.search(r"[\d ]+ of [\d ]+ weights with a gradient keep all their bits \(bf16\)", note.text), note.text
    assert judged(model, loss_fn, (x, y), optimizer=optimizer)[1] == []


def test_weights_without_a_gradient_are_not_called_still() -> None:
    model = nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 2))
    assert judged(model, lambda out, b: out.square().mean(), torch.tensor([[1, 2]]), optimizer=functools.partial(SGD, lr=0.1))[1] == []


# -- what may be given ------------------------------------------------------------------------------------------


def test_an_optimizer_can_be_given_in_many_ways() -> None:
    """An object, a class, a name, a function of the parameters, of the model or of nothing; the fourth of a tuple; a field."""
    model, loss_fn, batch = made_by(mlp)

    @dataclass
    class Case:
        model: Any
        loss_fn: Any
        batch: Any
        optimizer: Any
        lr: float

    optimizer = SGD(model.parameters(), lr=0.25)
    ways: list[tuple[dict[str, Any], str]] = [
        ({"optimizer": optimizer}, "0.25: loss 1.119 to .* in 8, SGD$"),
        ({"optimizer": optimizer, "lr": 0.5}, "0.5: .*SGD$"),
        ({"optimizer": AdamW}, "0.001: .*AdamW$"),
        ({"optimizer": "adagrad", "lr": 0.02}, "0.02: .*Adagrad$"),
        ({"lr": 0.02}, "0.02: .*AdamW assumed$"),
        ({"optimizer": lambda params: SGD(params, lr=0.125)}, "0.125: .*SGD$"),
        ({"optimizer": lambda model: SGD(model.parameters(), lr=0.125)}, "0.125: .*SGD$"),
        ({"optimizer": lambda: optimizer}, "0.25: .*SGD$"),
    ]
    for given, words in ways:
        verdict, found = judged(model, loss_fn, batch, **given)
        assert re.match(words, verdict.text) and not found, verdict
    assert subject_of((model, loss_fn, batch, optimizer)).optimizer is optimizer
    assert subject_of(Case(model, loss_fn, batch, "sgd", 0.1)).lr == 0.1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"optimizer": 3}, "the optimizer is a int"),
        ({"optimizer": "sgd"}, "needs a learning rate"),
        ({"optimizer": "sdg", "lr": 0.1}, "no optimizer 'sdg' in torch.optim"),
        ({"lr": -1.0}, "lr is a number of at least 0"),
        ({"lr": math.nan}, "lr is a number"),
        ({"lr": "fast"}, "lr is a number"),
        ({"lr": 0.1, "clip": 0}, "clip is a number above 0"),
        ({"optimizer": lambda params: 3}, "not a torch.optim.Optimizer"),
        ({"optimizer": lambda params: AdamW(params, lr=-1)}, "raised ValueError: Invalid learning rate: -1"),
        ({"optimizer": SGD(nn.Linear(1, 1).parameters(), lr=0.1)}, "holds none of the model's parameters"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(given: dict[str, Any], words: str) -> None:
    model, loss_fn, batch = made_by(mlp)
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        whynan.probe(model, loss_fn, batch, budget=0, **given)
    assert "\n" not in str(caught.value)


def test_a_rate_needs_weights() -> None:
    with pytest.raises(UsageError, match="no model with weights"):
        judged(*regression_without_model(), lr=0.1)


def test_an_optimizer_without_a_rate_is_not_judged() -> None:
    model, loss_fn, batch = made_by(mlp)
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    assert judged(model, loss_fn, batch, optimizer=optimizer)[0].state == "not run"


def test_a_schedule_is_judged_by_its_highest_rate() -> None:
    """A warm-up that begins at 0 is not too small; a peak that explodes without the warm-up is a note."""
    for rate, notes in ((1e-3, 0), (10.0, 1)):
        model, loss_fn, batch = wide_mlp()
        optimizer = AdamW(model.parameters(), lr=rate)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)
        assert optimizer.param_groups[0]["lr"] == 0
        _, found = judged(model, loss_fn, batch, optimizer=optimizer)
        assert [f.level for f in found] == [Level.NOTE] * notes
        assert all("the highest rate of the schedule without its warm-up" in f.attack for f in found)


def test_groups_keep_their_proportion() -> None:
    model, loss_fn, batch = made_by(mlp)
    first, *rest = model.parameters()
    optimizer = SGD([{"params": [first], "lr": 0.01}, {"params": rest, "lr": 0.1}])
    step = step_of(subject_of({"model": model, "loss_fn": loss_fn, "batch": batch, "optimizer": optimizer, "lr": 1.0}))
    made = training.training_of(step)
    assert made is not None and made.rates == pytest.approx((0.1, 1.0))


class Plain(torch.optim.Optimizer):
    """One that takes no closure, and counts on itself."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.seen: list[int] = []

    def step(self) -> None:  # type: ignore[override]
        self.seen.append(1)
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param -= group["lr"] * param.grad


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.LBFGS(p, lr=0.1),
        lambda p: AdamW(p, lr=torch.tensor(1e-3)),
        lambda p: AdamW(p, lr=1e-3, fused=True),
        lambda p: AdamW(p, lr=1e-3, foreach=True, amsgrad=True),
        lambda p: Plain(p, 0.01),
    ],
)
def test_optimizers_of_all_kinds_are_copied(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    model, loss_fn, batch = wide_mlp()
    given = optimizer(list(model.parameters()))
    verdict, found = judged(model, loss_fn, batch, optimizer=given)
    assert verdict.state == "ok" and not found and not given.state
    assert not isinstance(given, Plain) or given.seen == []


def test_sparse_gradients_and_weights_of_the_loss_are_updated() -> None:
    table = nn.Embedding(20, 4, sparse=True)
    assert judged(table, lambda out, b: out.square().mean(), torch.tensor([1, 2, 2]), optimizer=lambda p: torch.optim.SparseAdam(p, lr=1e-3))[1] == []

    class Centres(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centre = nn.Parameter(torch.zeros(3))

        def forward(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
            return (output - self.centre).square().mean()

    model, loss_fn = nn.Linear(8, 3), Centres()
    optimizer = SGD([*model.parameters(), *loss_fn.parameters()], lr=1e4)
    before = loss_fn.centre.detach().clone()
    assert judged(model, loss_fn, torch.randn(4, 8), optimizer=optimizer)[1]
    assert torch.equal(loss_fn.centre, before) and loss_fn.centre.grad is None


# -- nothing is left behind -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [1e-3, 50.0])
def test_nothing_is_left_behind(rate: float) -> None:
    """Weights, gradients, buffers, optimizer state, its hooks and schedule, attributes and random state are bit for bit as before."""
    model, loss_fn, (x, y) = made_by(cnn_with_batchnorm)
    optimizer = AdamW(model.parameters(), lr=rate)
    calls: list[int] = []
    for _ in range(3):
        loss_fn(model(x), y).backward()
        optimizer.step()
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    params = list(model.parameters())
    before = [copy.deepcopy(v) for v in (model.state_dict(), optimizer.state_dict(), [p.grad for p in params])]
    storage, grads, own = [p.data_ptr() for p in params], [p.grad for p in params], [vars(m).copy() for m in model.modules()]
    state, dice = torch.get_rng_state(), random.getstate()
    judged(model, loss_fn, (x, y), optimizer=optimizer)
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == dice and calls == []
    assert [p.data_ptr() for p in params] == storage and all(p.grad is g for p, g in zip(params, grads, strict=True))
    assert [vars(m) for m in model.modules()] == own
    torch.testing.assert_close([model.state_dict(), optimizer.state_dict(), [p.grad for p in params]], before, rtol=0, atol=0, equal_nan=True)


def test_a_guard_of_the_caller_does_not_see_the_updates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, loss_fn, batch = wide_mlp()
    optimizer = SGD(model.parameters(), lr=1e6)
    with whynan.watch(optimizer, run_dir=tmp_path, policy="observe") as guard:
        _, found = judged(model, loss_fn, batch, optimizer=optimizer)
    assert found and not guard.incidents
    assert "whynan:" not in capsys.readouterr().err


# -- the command ------------------------------------------------------------------------------------------------

FACTORY = """
import torch
from torch import nn
import torch.nn.functional as F

def plain():
    torch.manual_seed(0)
    return nn.Linear(6, 3), F.cross_entropy, (torch.randn(16, 6), torch.randint(0, 3, (16,)))

def hot():
    made = plain()
    return *made, torch.optim.SGD(made[0].parameters(), lr=1e4)
"""


@pytest.mark.parametrize(
    ("name", "options", "status", "words"),
    [
        ("plain", [], 0, None),
        ("plain", ["--lr", "1e-3"], 0, "learning rate        ok       0.001: loss "),
        ("plain", ["--lr", "1e4"], 1, "found by: learning rate: 8 updates, AdamW assumed"),
        ("plain", ["--lr", "1e4", "--optimizer", "SGD"], 1, "found by: learning rate: 8 updates, SGD"),
        ("plain", ["--lr", "0.1", "--optimizer", "SGD", "--clip", "1"], 0, "learning rate        ok "),
        ("hot", [], 1, "error: rate 10000: the loss on one batch goes from"),
        ("hot", ["--lr", "0.01"], 0, "learning rate        ok       0.01: loss "),
        ("plain", ["--optimizer", "SGD"], 2, "needs a learning rate"),
        ("plain", ["--lr", "-2"], 2, "lr is a number of at least 0, not -2.0"),
    ],
)
def test_the_command(
    name: str, options: list[str], status: int, words: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rated.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert main(["probe", "rated.py:" + name, "--budget", "0", *options]) == status
    told = capsys.readouterr()
    said = told.out + told.err
    assert words in said if words is not None else "learning rate" not in said


@pytest.mark.parametrize("module", [rates, training])
def test_examples_in_docstrings(module: Any) -> None:
    assert doctest.testmod(module).failed == 0

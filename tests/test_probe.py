"""`whynan probe` and `whynan.probe`: the factory, the report, the exit status, and that nothing is left behind."""

from __future__ import annotations

import doctest
import importlib
import json
import sys
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from probe_models import HAZARDS, cnn_with_batchnorm, distance, lstm, marked_line, mlp
from torch import nn

import whynan
from whynan.commands.main import main
from whynan.errors import UsageError
from whynan.probing.loading import load_subject
from whynan.probing.subject import Subject, calling, subject_of

FACTORIES = """
import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(0)

def healthy():
    return nn.Linear(3, 2), F.cross_entropy, (torch.randn(6, 3), torch.randint(0, 2, (6,)))

def ratio(out, batch):
    return (out.squeeze(-1) / batch[1]).square().mean()

def hazard():
    return {"model": nn.Linear(3, 1), "loss_fn": ratio, "batch": (torch.randn(6, 3), torch.rand(6) + 0.5), "bounds": {"1": (0.0, 2.0)}}

def bounded():
    return {"model": nn.Linear(3, 1), "loss_fn": ratio, "batch": (torch.randn(6, 3), torch.rand(6) + 0.5), "bounds": {"1": (0.5, 2.0)}}

def raising():
    raise ValueError("no data at /nowhere")

def wrong():
    return 3

def without_batch():
    return {"model": nn.Linear(1, 1), "loss_fn": ratio}

def misspelt():
    return {"model": nn.Linear(1, 1), "loss": ratio, "batch": torch.ones(1)}

def on_meta():
    return nn.Linear(3, 2, device="meta"), F.cross_entropy, (torch.randn(6, 3), torch.randint(0, 2, (6,)))

def no_tensors():
    return nn.Linear(3, 2), F.cross_entropy, ["a", "b"]

def broken_step():
    return nn.Linear(3, 2), F.cross_entropy, (torch.randn(6, 4), torch.randint(0, 2, (6,)))

constant = 5
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "made_for_probe.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "made_for_probe", raising=False)
    return tmp_path


# -- the command ------------------------------------------------------------------------------------------------


def test_a_healthy_factory_gives_status_0_and_seven_lines_of_verdict(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "made_for_probe:healthy", "--budget", "0.5"]) == 0
    out = capsys.readouterr().out
    for group in ("forward", "loss", "gradient flow", "numerical stability", "edge cases", "search", "ranges"):
        assert sum(line.startswith(f"  {group} ") for line in out.splitlines()) == 1
    assert "nothing found" in out.splitlines()[-1]
    assert max(map(len, out.splitlines())) <= 80


def test_a_hazard_gives_status_1_with_the_diagnosis(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "made_for_probe.py:hazard", "--budget", "1"]) == 1
    out = capsys.readouterr().out
    assert "error[WN10" in out
    assert "made_for_probe.py:12" in out


def test_json_is_one_object_without_a_bare_nan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert main(["probe", "made_for_probe:hazard", "--budget", "1", "--format", "json"]) == 1
    told = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert told["schema"] == 1
    assert told["ok"] is False
    assert len(told["verdicts"]) == 7
    assert told["findings"][0]["line"] == 12
    assert told["findings"][0]["incident"]["cause"]["code"].startswith("WN10")


def test_the_failing_step_is_kept_as_a_capsule_that_replays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "made_for_probe:hazard", "--budget", "1", "--run-dir", "kept", "--format", "json"]) == 1
    capsule = json.loads(capsys.readouterr().out)["findings"][0]["capsule"]
    assert Path(capsule, "capsule.json").is_file()
    assert main(["replay", "--trust", capsule]) == 0
    assert "made_for_probe.py:12" in capsys.readouterr().out


def test_two_failures_are_kept_in_two_places(tmp_path: Path) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        ratio = model(batch[0]).squeeze(-1) / batch[1]
        return ratio.mean() + torch.log(batch[2]).mean()

    torch.manual_seed(0)
    batch = (torch.randn(6, 3), torch.linspace(0.1, 0.9, 6), torch.linspace(0.1, 0.9, 6))
    report = whynan.probe(nn.Linear(3, 1), loss_fn, batch, budget=4, run_dir=tmp_path / "kept")
    kept = {f.capsule for f in report.findings if f.capsule}
    assert len(report.findings) == len(kept) == 2
    assert all(Path(capsule, "capsule.json").is_file() for capsule in kept)


def test_an_attack_outside_the_stated_bounds_is_only_a_note(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "made_for_probe:bounded", "--budget", "0.5"]) == 0
    out = capsys.readouterr().out
    assert "nothing found" in out
    assert "made_for_probe.py:12" in out[out.index("notes (") :]


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("made_for_probe", "write module:name"),
        ("no_such_module_here:factory", "no module named 'no_such_module_here'"),
        ("nowhere/else.py:factory", "no such file: nowhere/else.py"),
        ("made_for_probe:missing", "has no 'missing'"),
        ("made_for_probe:constant", "constant returned a int"),
        ("made_for_probe:raising", "raised ValueError: no data at /nowhere"),
        ("made_for_probe:wrong", "it must return (model, loss_fn, batch)"),
        ("made_for_probe:without_batch", "it must give model, loss_fn and batch"),
        ("made_for_probe:misspelt", "'loss', which probe does not know"),
        ("made_for_probe:on_meta", "meta device"),
        ("made_for_probe:no_tensors", "without a tensor in it"),
        ("made_for_probe:broken_step", "the step cannot be run on the sample batch: RuntimeError"),
    ],
)
def test_misuse_is_one_line_and_status_2(folder: Path, capsys: pytest.CaptureFixture[str], address: str, words: str) -> None:
    assert main(["probe", address]) == 2
    caught = capsys.readouterr()
    assert words in caught.err
    assert len(caught.err.strip().splitlines()) == 1
    assert caught.out == ""


def test_a_module_that_does_not_import_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("syntax_is_wrong.py").write_text("def f(:\n")
    assert main(["probe", "syntax_is_wrong:f"]) == 2
    assert "cannot be imported: SyntaxError" in capsys.readouterr().err
    Path("wants_more.py").write_text("import not_installed_anywhere\n")
    assert main(["probe", "wants_more.py:f"]) == 2
    assert "No module named 'not_installed_anywhere'" in capsys.readouterr().err


def test_a_file_named_like_a_module_in_use_does_not_replace_it(folder: Path) -> None:
    Path("json.py").write_text(FACTORIES)
    assert load_subject("json.py:healthy").title == "Linear"
    import json as again

    assert hasattr(again, "dumps")


# -- the library ------------------------------------------------------------------------------------------------


def test_probing_leaves_weights_buffers_gradients_random_state_and_mode_as_they_were() -> None:
    model, loss_fn, batch = cnn_with_batchnorm()
    assert model is not None
    model.eval()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    values, state = [t.clone() for t in batch], torch.get_rng_state()
    whynan.probe(model, loss_fn, batch, budget=1)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(map(torch.equal, batch, values))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert model[1].weight.grad is None
    assert not any(m.training for m in model.modules())
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_an_lstm_still_trains_after_its_step_was_exported() -> None:
    model, loss_fn, batch = lstm()
    assert model is not None
    before = float(loss_fn(model(batch[0]), batch[1]).detach())
    whynan.probe(model, loss_fn, batch, budget=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(20):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
    assert all(p.grad is not None for p in model.parameters())
    assert float(loss.detach()) < before


class SparseMix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, mix: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(mix, self.linear(x))


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.to_padded_tensor(0.0))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["sparse", "nested", "complex"])
def test_tensors_of_other_layouts_are_left_alone_and_do_no_harm(kind: str) -> None:
    torch.manual_seed(0)
    model, batch = {
        "sparse": lambda: (SparseMix(), (torch.eye(4).to_sparse(), torch.randn(4, 3))),
        "nested": lambda: (Padded(), torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])),
        "complex": lambda: (nn.Linear(3, 2, dtype=torch.complex64), torch.randn(4, 3, dtype=torch.complex64)),
    }[kind]()
    before = [p.detach().clone() for p in model.parameters()]
    report = whynan.probe(model, lambda out, b: out.abs().square().mean(), batch, budget=0.5)
    assert report.ok, repr(report)
    assert all(map(torch.equal, before, model.parameters()))


def test_a_failure_of_our_own_costs_one_group_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr("whynan.probing.groups.moves", fails)
    report = whynan.probe(*mlp(), budget=0)
    assert [v.group for v in report.verdicts if "it failed" in v.text] == ["edge cases"]
    assert any("planted" in n.text for n in report.notes)


def test_a_watch_of_the_users_own_stays_open_while_probing() -> None:
    model, loss_fn, batch = mlp()
    assert model is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with whynan.watch(model, optimizer, files=False) as guard:
        whynan.probe(*HAZARDS["unexplained_variance"](), budget=0)
        loss = loss_fn(model(batch[0] * float("inf")), batch[1])
        loss.backward()
        optimizer.step()
    assert len(guard.incidents) == 1


def test_the_repr_is_the_report() -> None:
    report = whynan.probe(*mlp(), budget=0)
    assert repr(report).startswith("whynan probe: Sequential, 195 weights")
    assert "batch[0] floats[16, 8]" in repr(report)
    assert "batch[1] labels[16] 0 to 2" in repr(report)


def test_a_sample_that_is_already_broken_is_told_and_not_searched() -> None:
    report = whynan.probe(nn.Linear(2, 1), lambda out, batch: out.log().mean() * float("nan"), torch.randn(4, 2), budget=5)
    assert not report.ok
    assert report.findings[0].attack.startswith("the sample batch")
    assert next(v for v in report.verdicts if v.group == "search").state == "not run"


def test_a_loss_that_is_cut_from_the_weights_is_a_finding() -> None:
    report = whynan.probe(nn.Linear(2, 1), lambda out, batch: out.detach().square().mean(), torch.randn(4, 2), budget=0)
    assert any("does not depend on any weight" in f.text for f in report.findings)


def test_the_users_own_clear_error_is_a_refusal_not_a_finding() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if len(x) < 2:
            raise ValueError("give at least two rows")
        return (model(x).std(0) + 1e-3).log().square().mean()

    report = whynan.probe(nn.Linear(3, 2), loss_fn, torch.randn(6, 3), budget=0)
    refused = [n for n in report.notes if n.level == "refused"]
    assert any(n.attack == "batch of one" and "at least two rows" in n.text for n in refused)
    assert not any(f.attack == "batch of one" for f in report.findings)


def test_parameters_without_gradient_are_noted_by_name() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.forgotten = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    report = whynan.probe(Unused(), lambda out, batch: out.square().mean(), torch.randn(5, 3), budget=0)
    assert any("get no gradient: forgotten.weight, forgotten.bias" in n.text for n in report.notes)
    assert report.ok


def test_an_absurdly_large_gradient_on_the_sample_is_a_finding() -> None:
    report = whynan.probe(nn.Linear(3, 1), lambda out, batch: out.square().mean() / 1e-10, torch.randn(5, 3), budget=0)
    assert any(f.group == "gradient flow" and "times the weight" in f.text for f in report.findings)


def test_a_quotient_that_is_finite_and_absurd_is_noted() -> None:
    """An epsilon only moves the blow-up: identical rows give a gradient of 1e12 times the usual one."""

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x) - x).square().sum() / ((x - x.mean(0)).square().sum() + 1e-12)

    torch.manual_seed(0)
    report = whynan.probe(nn.Linear(4, 4), loss_fn, torch.randn(8, 4), budget=0)
    assert report.ok
    assert any(n.group == "edge cases" and "finite and absurd" in n.text for n in report.notes), repr(report)


def test_extreme_outputs_are_tried_also_where_the_loss_calls_the_model() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.nll_loss(torch.log(torch.softmax(model(batch[0]), dim=-1)), batch[1])

    torch.manual_seed(0)
    report = whynan.probe(nn.Linear(4, 3), loss_fn, (torch.randn(6, 4), torch.randint(0, 3, (6,))), budget=0)
    assert [f.code for f in report.findings] == ["WN101"]


def test_nan_in_one_sample_that_stays_in_running_statistics_is_noted() -> None:
    report = whynan.probe(*cnn_with_batchnorm(), budget=0)
    assert any("it stays in the buffer 1.running_mean" in n.text for n in report.notes)


def test_nan_in_one_sample_that_reaches_other_rows_is_noted() -> None:
    report = whynan.probe(nn.Linear(3, 3), lambda m, x: (m(x) - m(x).mean(0)).square().mean(), torch.randn(5, 3), budget=0)
    assert report.ok

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return y - y.mean(0)

    report = whynan.probe(Mixing(), lambda out, batch: out.square().mean(), torch.randn(5, 3), budget=0)
    assert any("reaches the outputs of the other rows" in n.text for n in report.notes)


def test_overflow_under_autocast_is_a_finding() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x * 300) * 300

    report = whynan.probe(Large(), lambda out, batch: out.abs().mean(), torch.randn(64, 4), budget=0)
    assert any("autocast to float16" in (f.attack, *f.also) for f in report.findings), repr(report)


def test_a_search_over_weights_says_how_far_they_were_moved() -> None:
    class Edge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.margin = nn.Parameter(torch.tensor([0.2, 1.0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log(self.margin - 0.1) * x

    report = whynan.probe(Edge(), lambda out, batch: out.square().mean(), torch.rand(4, 2) + 1, budget=3)
    found = next(f for f in report.findings if f.group == "search")
    assert "weights moved by at most" in found.change
    assert 0 < float(found.change.split("at most ")[1].split()[0]) <= 0.5


def test_a_mask_row_is_the_smallest_change_that_is_reported() -> None:
    report = whynan.probe(*HAZARDS["masked_attention"](), budget=2)
    found = next(f for f in report.findings if f.origin[1] == marked_line("masked_attention"))
    assert "of batch[1] changed" in found.change
    assert int(found.change.split()[0]) <= 6


@pytest.mark.parametrize("name", ["inputs", "subject", "hazards", "intervals", "api"])
def test_the_examples_in_the_docstrings_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"whynan.probing.{name}"))
    assert result.attempted
    assert not result.failed


def test_probe_is_the_function_also_after_its_package_was_imported() -> None:
    import whynan.probing.api

    assert callable(whynan.probe)
    assert whynan.probe is whynan.probing.api.probe


# -- the factory's answer ---------------------------------------------------------------------------------------


@dataclass
class Given:
    model: Any
    loss_fn: Any
    batch: Any
    padding: int | None = None


Triple = namedtuple("Triple", "model loss_fn batch")


@pytest.mark.parametrize("made", [Given(*distance()), Triple(*distance()), dict(zip(("model", "loss_fn", "batch"), distance(), strict=True)), list(distance())])
def test_dataclasses_named_tuples_mappings_and_lists_are_taken(made: Any) -> None:
    assert subject_of(made).title == "Distance"


@pytest.mark.parametrize("bounds", [3, {"x": 5}, [(1, 0)], {"x": (2, 1)}, "ab"])
def test_bounds_that_are_no_pairs_are_refused_in_one_line(bounds: Any) -> None:
    with pytest.raises(UsageError, match="bounds are pairs"):
        subject_of({"model": None, "loss_fn": torch.sum, "batch": torch.ones(2), "bounds": bounds})


@pytest.mark.parametrize(("model", "loss_fn"), [(3, torch.sum), (None, None), (nn.Linear(1, 1), "mse")])
def test_a_model_or_loss_of_the_wrong_kind_is_refused(model: Any, loss_fn: Any) -> None:
    with pytest.raises(UsageError):
        subject_of((model, loss_fn, torch.ones(2, 1)))


def test_lazy_parameters_are_refused() -> None:
    with pytest.raises(UsageError, match="lazy"):
        subject_of((nn.LazyLinear(3), torch.sum, torch.ones(2, 1)))


def _run(model: nn.Module | None, loss_fn: Callable[..., Any] | None, batch: Any) -> float:
    return float(calling(Subject(model, loss_fn, batch))(batch)[1].detach())


def test_the_ways_to_call_a_loss_are_told_apart() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 2), torch.randn(4, 3), torch.randn(4, 2)
    want = float(F.mse_loss(model(x), y).detach())
    assert _run(model, nn.MSELoss(), (x, y)) == pytest.approx(want)
    assert _run(model, F.mse_loss, (x, y)) == pytest.approx(want)
    assert _run(model, lambda out, batch: F.mse_loss(out, batch[1]), (x, y)) == pytest.approx(want)
    assert _run(model, lambda net, batch: F.mse_loss(net(batch[0]), batch[1]), (x, y)) == pytest.approx(want)
    assert _run(model, lambda a, b: F.mse_loss(a(b[0]), b[1]), (x, y)) == pytest.approx(want)
    assert _run(None, lambda batch: F.mse_loss(model(batch[0]), batch[1]), (x, y)) == pytest.approx(want)
    assert _run(None, F.mse_loss, (model(x).detach(), y)) == pytest.approx(want)


def test_a_model_that_gives_its_own_loss_needs_no_loss_function() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": F.cross_entropy(self.linear(x), labels)}

    assert whynan.probe(Own(), None, {"x": torch.randn(4, 2), "labels": torch.randint(0, 2, (4,))}, budget=0).ok


def test_a_factory_that_ends_the_program_is_misuse(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`sys.exit` in a factory, as from an argument parser, is one line and status 2, not that status."""
    (folder / "leaving.py").write_text("import sys\ndef factory():\n    sys.exit(3)\n")
    assert main(["probe", "leaving:factory"]) == 2
    assert capsys.readouterr().err == "whynan: factory() of leaving raised SystemExit: 3\n"


def test_what_the_model_prints_is_not_in_the_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Output of the user's code goes to stderr: the JSON stays one object."""
    (folder / "talking.py").write_text(
        "import torch\ndef loss(b):\n    print('hello')\n    return b.pow(2).mean()\ndef factory():\n    return None, loss, torch.randn(3, 2)\n"
    )
    assert main(["probe", "talking:factory", "--budget", "0", "--format", "json"]) == 0
    said = capsys.readouterr()
    json.loads(said.out)
    assert "hello" in said.err

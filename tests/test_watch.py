"""`whynan.watch`: one line in a loop or a `with` block; nothing of it stays behind."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

import pytest
import torch
from conftest import Sandbox, strict_lines, torch_doors

import whynan
from whynan.errors import UsageError


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4, bad: int = 2) -> None:
    """A few steps, one of them bad."""
    for step in range(steps):
        optimizer.zero_grad()
        out = model(torch.randn(5, 3))
        loss = torch.log(out.square().sum() * (step != bad))
        loss.backward()
        optimizer.step()


def test_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One call before the loop is enough; incidents are there at once, files when it is closed."""
    model, optimizer = make()
    guard = whynan.watch(model, optimizer, run_dir=tmp_path / "run")
    train(model, optimizer)
    assert [(i.step, i.cause.code) for i in guard.incidents] == [(2, "WN101")]
    guard.close()
    assert guard.run_dir == tmp_path / "run"
    assert sorted(p.name for p in guard.run_dir.iterdir()) == ["capsules", "incidents.jsonl", "metrics.jsonl", "report.html", "report.md", "run.json"]
    assert [row["step"] for row in strict_lines(guard.run_dir / "metrics.jsonl")] == [0, 1, 2, 3]
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "test_watch.py" in streams.err
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_one_line_that_is_never_closed(box: Sandbox) -> None:
    """Without a close the end of the program closes: metrics complete, report written, last words said."""
    box.write(f"""
        import torch, whynan

        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.01)
        whynan.watch(optimizer, run_dir={str(box.run_dir)!r})
        for step in range(5):
            optimizer.zero_grad()
            torch.log(weight.sum() * (step != 1)).backward()
            optimizer.step()
    """)
    done = box.python("train.py")
    assert done.status == 0, done.err
    assert [row["step"] for row in done.metrics] == [0, 1, 2, 3, 4]
    assert "WN101" in done.report
    assert "report.html" in done.err


def test_objects_are_optional() -> None:
    """Models and optimizers made after watching began are found without being named."""
    with whynan.watch(files=False) as guard:
        train(*make())
    assert [i.step for i in guard.incidents] == [2]
    assert guard.incidents[0].symptom.place == "loss"


def test_nothing_stays_behind() -> None:
    """After the block every door of torch, the mode stacks, and the model's own dictionaries are the very same objects."""
    model, optimizer = make()
    seen: list[Any] = []
    model[0].register_forward_hook(lambda m, a, out: seen.append(out.shape))
    hooks = {id(m): (dict(m._forward_hooks), dict(m._forward_pre_hooks), dict(m._backward_hooks)) for m in model.modules()}
    attributes = {id(m): set(vars(m)) for m in model.modules()}
    doors, optimizer_attributes = torch_doors(), set(vars(optimizer))
    with whynan.watch(model, optimizer, files=False):
        assert torch_doors() != doors
        train(model, optimizer)
    after = torch_doors()
    assert [name for name in doors if after.get(name) is not doors[name]] == []
    assert {id(m): (dict(m._forward_hooks), dict(m._forward_pre_hooks), dict(m._backward_hooks)) for m in model.modules()} == hooks
    assert {id(m): set(vars(m)) for m in model.modules()} == attributes
    assert set(vars(optimizer)) == optimizer_attributes
    assert seen


def test_functions_imported_by_name_before_watching_are_watched(box: Sandbox) -> None:
    """`from torch.func import grad` above `whynan.watch`: the line is found, and the names are the program's own again at the end."""
    path = box.write(
        """
        import torch
        from torch.func import functional_call, grad
        import whynan
        torch.manual_seed(0)
        net, held = torch.nn.Linear(4, 2), (functional_call, grad)
        opt = torch.optim.Adam(net.parameters())
        with whynan.watch(net, opt) as guard:
            for step in range(6):
                x = torch.ones(8, 4) if step == 3 else torch.rand(8, 4)
                def loss_of(weights):
                    return functional_call(net, weights, (x,)).square().mean() / x.var(0).sum()  # here
                slopes = grad(loss_of)({k: p.detach() for k, p in net.named_parameters()})
                for k, p in net.named_parameters():
                    p.grad = slopes[k]
                opt.step()
        assert held == (functional_call, grad)
        print([(i.cause.code, i.origin.span.code.endswith("# here")) for i in guard.incidents])
        """
    )
    assert box.python(str(path)).out.strip() == "[('WN404', True)]"


def test_hook_made_while_watching_stays_the_users() -> None:
    """A hook registered inside the block works, is the user's own afterwards, and can be removed."""
    model, optimizer = make()
    seen: list[int] = []

    def note(module: torch.nn.Module, args: Any, out: torch.Tensor) -> None:
        seen.append(len(out))

    with whynan.watch(model, optimizer, files=False):
        handle = model.register_forward_hook(note)
        model(torch.zeros(2, 3))
    assert list(model._forward_hooks.values()) == [note]
    model(torch.zeros(3, 3))
    handle.remove()
    model(torch.zeros(4, 3))
    assert seen == [2, 3]


def test_model_can_be_copied_and_pickled_while_watched() -> None:
    """copy.deepcopy, pickling and state_dict of a watched model give what they give without whynan."""
    model, optimizer = make()
    with whynan.watch(model, optimizer, files=False):
        train(model, optimizer, bad=-1)
        twin = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(model))
        saved = copy.deepcopy(optimizer.state_dict())
    for other in (twin, again):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
        assert "whynan" not in repr(vars(other))
    assert saved["param_groups"][0]["lr"] == 0.1


class Descent(torch.optim.Optimizer):
    """An optimizer of the program's own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.1 * parameter.grad


class Slower(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler of the program's own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [group["lr"] * 0.5 for group in self.optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)


def held_by(function: FunctionType) -> Iterator[object]:
    """What a pickle by value takes along with a function of ours, beside other functions."""
    items = [*(cell.cell_contents for cell in function.__closure__ or ()), *vars(function).values()]
    return (item for item in items if not isinstance(item, FunctionType))


def by_value(item: Any) -> Any:
    """What comes out of a pickle by value; functions of others are left as they are."""
    if not isinstance(item, FunctionType):
        return pickle.loads(pickle.dumps(item))
    if "whynan" not in item.__code__.co_filename:
        return item
    cells = tuple(CellType(by_value(cell.cell_contents)) for cell in item.__closure__ or ())
    made = FunctionType(item.__code__, item.__globals__, item.__name__, item.__defaults__, cells)
    made.__dict__.update({name: by_value(value) for name, value in vars(item).items()})
    return made


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_functions_of_watched_classes_can_be_pickled_by_value() -> None:
    """What we put on the program's own classes holds nothing that cannot be pickled, nor anything that needs whynan to be read."""
    model, _ = make()
    with whynan.watch(files=False):
        optimizer = Descent(model.parameters())
        scheduler = Slower(optimizer)
        functions: list[Any] = [Descent.step, Slower.step, Slower.__init__, torch.func.grad(lambda x: x.square().sum())]
        assert all("whynan" in function.__code__.co_filename for function in functions)
        for item in [item for function in functions for item in held_by(function)]:
            assert b"whynan" not in pickle.dumps(item)
    loaded = [by_value(function) for function in functions]
    model(torch.ones(2, 3)).sum().backward()
    before = model[0].weight.clone()
    loaded[0](optimizer)
    assert not torch.equal(model[0].weight, before)
    loaded[1](scheduler)
    loaded[2](scheduler, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.0125
    assert loaded[3](torch.ones(2)).tolist() == [2, 2]


def test_class_pickled_by_value_is_watched_again() -> None:
    """A class that came out of a pickle by value, into a program that is watched, is watched as any other."""
    model, _ = make()
    with whynan.watch(files=False) as guard:
        Descent(model.parameters())
        twin = type("Twin", (Descent,), {"step": by_value(Descent.step)})
        train(model, twin(model.parameters()))
    assert [i.step for i in guard.incidents] == [2]
    assert not hasattr(Descent.step, "_whynan")


def test_main_can_be_pickled_by_value(box: Sandbox) -> None:
    """cloudpickle, pickle and torch.save of a watched script's own classes give what they give without whynan."""
    pytest.importorskip("cloudpickle")
    path = box.write("""
        import cloudpickle, copy, io, pickle, torch

        class Descent(torch.optim.Optimizer):
            def __init__(self, params):
                super().__init__(params, {"lr": 0.1})

            @torch.no_grad()
            def step(self, closure=None):
                for parameter in self.param_groups[0]["params"]:
                    parameter -= 0.01 * parameter.grad

        class Net(torch.nn.Linear):
            pass

        def double(module, args, result):
            return result * 2

        def saved(item):
            file = io.BytesIO()
            torch.save(item, file)
            file.seek(0)
            return torch.load(file, weights_only=False)

        torch.manual_seed(0)
        model = Net(3, 1)
        model.register_forward_hook(double)
        optimizer = Descent(model.parameters())
        for twice in (lambda x: x, lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy, saved, lambda x: cloudpickle.loads(cloudpickle.dumps(x))):
            model, optimizer = twice((model, optimizer))
            for step in range(2):
                optimizer.zero_grad()
                model(torch.ones(2, 3)).square().mean().backward()
                optimizer.step()
            print(model.weight.sum().item().hex())
    """)
    done = box.whynan(str(path))
    assert done.status == 0, done.err
    assert done.out == box.python(str(path)).out
    assert done.out.count("0x") == 5
    assert done.metrics[-1]["step"] == 9


def test_exception_passes_through() -> None:
    """An exception of the loop's own comes out unchanged, and torch is left as it was."""
    model, optimizer = make()
    doors = torch_doors()
    mine = KeyError("mine")
    with pytest.raises(KeyError) as caught, whynan.watch(model, optimizer, files=False):
        train(model, optimizer, bad=-1)
        raise mine
    assert caught.value is mine
    after = torch_doors()
    assert [name for name in doors if after.get(name) is not doors[name]] == []


def test_closing_twice() -> None:
    """Closing again does nothing, also after the block."""
    model, optimizer = make()
    with whynan.watch(model, optimizer, files=False) as guard:
        train(model, optimizer, bad=-1)
        guard.close()
    guard.close()
    assert guard.incidents == []


def test_watching_twice_in_a_row() -> None:
    """A second block after the first counts its own steps and sees its own incidents."""
    model, optimizer = make()
    for _ in range(2):
        with whynan.watch(model, optimizer, files=False) as guard:
            train(model, optimizer, bad=1)
        assert [i.step for i in guard.incidents] == [1]


def test_no_files_when_none_are_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """files=False writes nothing, not even a directory."""
    monkeypatch.chdir(tmp_path)
    with whynan.watch(files=False) as guard:
        train(*make())
    assert guard.run_dir is None
    assert list(tmp_path.iterdir()) == []


def test_default_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default the files go to whynan-runs/<time>."""
    monkeypatch.chdir(tmp_path)
    with whynan.watch() as guard:
        train(*make())
    (made,) = (tmp_path / "whynan-runs").iterdir()
    assert guard.run_dir is not None
    assert guard.run_dir.resolve() == made
    assert len(strict_lines(made / "incidents.jsonl")) == 1


@pytest.mark.parametrize(
    ("objects", "options", "said"),
    [
        (["model"], {}, "str"),
        ([torch.ones(2)], {}, "Tensor"),
        ([torch.nn.Linear], {}, "type"),
        ([None], {}, "NoneType"),
        ([], {"policy": "pray"}, "pray.*observe, skip, rollback, stop"),
        ([], {"in_a_row": -1}, "-1"),
        ([], {"in_total": -5}, "-5"),
        ([], {"in_total": "many"}, "many"),
        ([], {"averages": [object()]}, "averages takes modules.*object"),
        ([], {"averages": {"w": torch.ones(1)}}, "averages takes modules.*str"),
        ([], {"averages": 3}, "averages takes modules.*int"),
    ],
)
def test_wrong_use(objects: list[Any], options: dict[str, Any], said: str) -> None:
    """Wrong arguments raise UsageError with the value in it, before anything is changed."""
    doors = torch_doors()
    with pytest.raises(UsageError, match=said):
        whynan.watch(*objects, files=False, **options).close()
    after = torch_doors()
    assert [name for name in doors if after.get(name) is not doors[name]] == []


def test_errors_are_one_tree() -> None:
    """Usage errors are WhynanErrors; a stop is no Exception, so that a loop's own `except Exception` cannot swallow it."""
    assert issubclass(UsageError, whynan.WhynanError)
    assert not issubclass(whynan.TrainingStopped, Exception)


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_stop_raises_out_of_the_loop(policy: str) -> None:
    """When the policy stops the training, TrainingStopped comes out of the loop; weights are as before the bad step."""
    model, optimizer = make()
    train(model, optimizer, bad=-1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(whynan.TrainingStopped, match="step 0"), whynan.watch(model, optimizer, policy=policy, in_a_row=0, files=False) as guard:
        train(model, optimizer, bad=0)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert guard.incidents[0].action.taken == "stopped"


def test_observe_lets_the_nan_in() -> None:
    """policy="observe" reports and changes nothing: the weights go bad as without whynan."""
    model, optimizer = make()
    with whynan.watch(model, optimizer, policy="observe", files=False) as guard:
        train(model, optimizer, steps=3, bad=1)
    assert guard.incidents[0].action.taken == "observed"
    assert not all(torch.isfinite(p).all() for p in model.parameters())


def test_watching_changes_no_bit() -> None:
    """A healthy run, with dropout, ends in the same bits with and without watching."""
    ends = []
    for watched in (False, True):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        guard = whynan.watch(model, optimizer, files=False) if watched else None
        for _ in range(5):
            optimizer.zero_grad()
            (model(torch.randn(6, 3)).square().mean() + 0.1 * torch.nn.functional.dropout(torch.ones(9)).sum()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        if guard is not None:
            guard.close()
            assert guard.incidents == []
        ends.append((torch.get_rng_state(), *model.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values())))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_step_function() -> None:
    """A step marked with @guard.step is replayed by calling it again: exact, also for what a tape cannot see."""
    model, optimizer = make()
    with whynan.watch(model, optimizer, files=False) as guard:

        @guard.step
        def step(x: torch.Tensor, scale: float = 1.0) -> float:
            """Documented."""
            optimizer.zero_grad()
            out = model(x)
            weight = float(out.detach().abs().sum()) * scale
            loss = torch.log(out.square().sum() * weight)
            loss.backward()
            optimizer.step()
            return loss.item()

        assert math.isfinite(step(torch.randn(4, 3)))
        before = copy.deepcopy(model.state_dict())
        assert math.isinf(step(torch.randn(4, 3), scale=0.0))
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        assert math.isfinite(step(torch.randn(4, 3)))
    assert (step.__name__, step.__doc__) == ("step", "Documented.")
    (incident,) = guard.incidents
    assert (incident.step, incident.cause.code, incident.origin.exact) == (1, "WN101", True)
    assert incident.origin.span.function == "step"
    assert "torch.log" in incident.origin.span.code
    assert step(torch.randn(4, 3)) is not None  # and it works on when the watch is over


def test_step_function_that_raises() -> None:
    """An exception in a step function passes through."""
    with whynan.watch(files=False) as guard:

        @guard.step
        def step() -> None:
            raise LookupError("mine")

        with pytest.raises(LookupError, match="mine"):
            step()


def test_the_model_of_a_finished_training_is_let_go_when_the_next_has_begun() -> None:
    """Short trainings one after the other (folds, trials) do not add up."""
    models: list[weakref.ref[torch.nn.Module]] = []

    def fold() -> None:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(weakref.ref(model))

    with whynan.watch(files=False):
        for _ in range(6):
            fold()
            gc.collect()
    assert sum(model() is not None for model in models) <= 2


def test_nothing_is_kept_alive() -> None:
    """A closed watch that is dropped lets model and batch go."""
    model, optimizer = make()
    with whynan.watch(model, optimizer, files=False) as guard:
        train(model, optimizer)
    ref = weakref.ref(model)
    del guard, model, optimizer
    gc.collect()
    assert ref() is None


def test_memory_of_a_step_is_let_go() -> None:
    """While watching, no activation of an earlier step is held, and of the batches only those of the two healthy steps that are kept."""
    model, optimizer = make()
    batches, activations = [], []
    with whynan.watch(model, optimizer, files=False):
        for _ in range(40):
            x = torch.randn(5, 3)
            batches.append(weakref.ref(x))
            optimizer.zero_grad()
            out = model(x) * 2
            activations.append(weakref.ref(out))
            out.square().mean().backward()
            optimizer.step()
            del x, out
        gc.collect()
        assert not any(ref() is not None for ref in activations[:-1])
        assert sum(ref() is not None for ref in batches[:-1]) <= 2


def test_a_moving_average_does_not_hold_the_steps_before() -> None:
    """A value that is carried from step to step does not keep the tape of all of them alive."""
    model, optimizer = make()
    average = torch.zeros(())
    with whynan.watch(model, optimizer, files=False) as guard:
        for _ in range(40):
            out = model(torch.randn(5, 3))
            average = 0.9 * average + 0.1 * out.detach().mean()
            loss = (out - average).square().mean()  # alive when the next step begins
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert len(guard._guard.recorder.tape.entries) < 40


def test_warnings_of_torch_name_the_programs_own_lines(box: Sandbox) -> None:
    """Each at its line, once per place, with the filters of the program; a traceback is that of the program too."""
    source = """
        import warnings
        import torch
        from torch import nn

        net = nn.Linear(2, 2)
        opt = torch.optim.SGD(net.parameters(), 0.1)
        x = torch.ones(2, 3, 4)
        for step in range(3):
            a = x.T
            b = torch.ones(3, 1, 2).T
            y = net(torch.randn(3, 2))
            nn.functional.mse_loss(y, torch.zeros(2)).backward()
            opt.step()
        torch.optim.lr_scheduler.StepLR(opt, 2).step(3)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="__main__")
            torch.ones(1, 2, 3).T
        torch.cat([y, torch.zeros(3, 7)], 0)
    """
    box.write(source)
    plain, watched = box.python("train.py"), box.whynan("train.py")
    own = [line for line in watched.err.splitlines() if not line.startswith("whynan:")]
    assert "UserWarning" in plain.err
    assert own == plain.err.splitlines()


def test_a_training_without_gradients_says_that_nothing_was_watched(box: Sandbox) -> None:
    done = box.watched("import torch\nw = torch.zeros(3)\nfor _ in range(600):\n    w = w + torch.randn(3)\nprint(w.isfinite().all().item())\n")
    assert done.out == "True\n"
    assert "no backward pass and no optimizer was seen: nothing was watched" in done.err


def test_objects_of_every_step_have_fast_attributes() -> None:
    """Python keeps up to 30 attributes of an object where it finds them at once; more cost a look-up each, a hundred times a step."""
    model = torch.nn.Linear(2, 2)
    with whynan.watch(model, torch.optim.SGD(model.parameters(), 0.1), files=False) as watch:
        guard = watch._guard
        hot = [
            guard,
            guard.recorder,
            guard.recorder.tape,
            guard.recorder.roots,
            guard.session,
            guard.going_back,
            guard.steps,
            guard.acting,
            guard.foreseeing,
            guard.journal,
        ]
        assert {type(o).__name__: len(vars(o)) for o in hot if len(vars(o)) > 30} == {}


def frozen_in_inference_mode() -> torch.nn.Module:
    """A teacher that no gradient can ever reach."""
    with torch.inference_mode():
        return torch.nn.Linear(3, 1)


def test_a_teacher_made_in_inference_mode_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    """Its weights have no version counter to tell a load by; watching goes on."""
    model, optimizer = make()
    teacher = frozen_in_inference_mode()
    with whynan.watch(model, optimizer, files=False) as guard:
        with torch.inference_mode():
            teacher.load_state_dict(frozen_in_inference_mode().state_dict())
        train(model, optimizer)
    assert [i.action.taken for i in guard.incidents] == ["skipped"]
    assert "internal error" not in capsys.readouterr().err


class Remaking(torch.nn.Module):
    """Keeps something in an attribute that it makes anew in every call."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.inner, self.make = torch.nn.Linear(3, 1), make

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Make it and run."""
        self.kept = self.make()
        return self.inner(x)


@pytest.mark.parametrize(
    "kept",
    [lambda: torch.ones(4, device="meta"), lambda: torch.ones(4).to_mkldnn(), lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])],
    ids=["meta", "mkldnn", "nested"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_plain_values_are_no_running_values(kept: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """What a model carries is looked at for NaN only where that can be read."""
    model = Remaking(kept)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with whynan.watch(model, optimizer, files=False):
        train(model, optimizer, steps=20, bad=-1)
    assert "internal error" not in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_step_with_a_nested_tensor_of_one_stride_is_diagnosed(capsys: pytest.CaptureFixture[str]) -> None:
    """It brings tensors along that have a shape and no values; these say nothing of pairs of rows."""
    model = Remaking(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with whynan.watch(model, optimizer, files=False) as guard:
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(3, 3)).square().mean()
            (loss * float("nan") if step == 3 else loss).backward()
            optimizer.step()
    assert [i.action.taken for i in guard.incidents] == ["skipped"]
    assert "internal error" not in capsys.readouterr().err

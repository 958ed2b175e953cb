"""Capsules: a failing step on disk gives the same diagnosis elsewhere, and nothing hostile in one is ever run."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import random
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from conftest import Finished, Sandbox

from whynan.capsule.names import CapsuleError, class_named, function_named, functions, name_of
from whynan.capsule.rebuild import Decoder, NeedsTrust

CASES = Path(__file__).parent / "cases"
FAMILIES = [
    "WN101-log-of-zero/bad.py",  # forward
    "WN201-exp-overflow/bad_poisson.py",  # a transform of torch.func, no optimizer
    "WN202-half-overflow/bad_autocast.py",  # float16 autocast, gradient scaler
    "WN401-fully-masked-softmax/bad_pointer.py",  # an LSTM, a loop in forward
    "WN402-mean-of-nothing/bad.py",
    "WN404-constant-batch/bad.py",
    "WN501-infinite-slope/bad.py",  # backward
    "WN501-infinite-slope/bad_zeroed_by_hand.py",  # gradients of the step before
    "WN502-branch-not-taken/bad.py",
    "WN602-buffer-not-finite/bad.py",  # BatchNorm
    "WN603-optimizer-state-not-finite/bad.py",
    "WN604-update-not-finite/bad_own_optimizer.py",  # the user's own optimizer
    "WN605-divergence/bad_recurrent.py",
    "WN606-loss-scale-collapse/bad.py",
    "WN608-uninitialised-parameter/bad.py",
    "WN701-input-not-finite/bad.py",  # data
    "WN703-value-out-of-range/bad.py",  # an exception
]

# No main guard, global variables from the command line, a class in a function, dropout, autocast.
SCRIPT = """
    import argparse
    import torch
    from torch import nn

    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", type=float, default=3.0)
    args = parser.parse_args()
    activation = nn.GELU()
    torch.manual_seed(0)

    def build(width):
        class Block(nn.Module):
            def __init__(self, act=activation):
                super().__init__()
                self.inner, self.norm, self.act, self.drop = nn.Linear(width, width), nn.BatchNorm1d(width), act, nn.Dropout(0.3)

            def forward(self, x):
                hidden = self.drop(self.act(self.norm(self.inner(x)))) * args.scale
                return torch.log(torch.relu(hidden) + floor(width))

        return Block()

    def floor(width):
        return 0.0 * width

    model = nn.Sequential(nn.Linear(4, 6), build(6), nn.Linear(6, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    open("ran", "a").write("x")
    for step in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(8, 4)).float().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""

TORCH_ONLY = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 2), nn.Softmax(-1))
    spare = nn.Linear(200, 200)
    optimizer = torch.optim.Adam([*model.parameters(), *spare.parameters()], lr=1e-3)
    for step in range(4):
        chance = model(torch.randn(8, 4))
        loss = -torch.log(chance * (step != 2)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def capsule_of(box: Sandbox, source: str, *options: str, arguments: tuple[str, ...] = (), before: Callable[[], object] = lambda: None) -> Path:
    """Run a program, delete it, and move its first capsule into a folder where there is nothing else."""
    script = box.write(source)
    done = box.forked("run", "--run-dir", str(box.run_dir), *options, script.name, *arguments, before=before)
    assert "internal error" not in done.err, done.err
    return moved(box)


def moved(box: Sandbox) -> Path:
    """Move the first capsule to a folder of its own, and delete all the rest."""
    elsewhere = box.folder.parent / f"{box.folder.name}-elsewhere"
    elsewhere.mkdir()
    first = min((box.run_dir / "capsules").iterdir())
    shutil.move(first, elsewhere / "capsule")
    shutil.rmtree(box.folder)
    box.folder.mkdir()
    return elsewhere / "capsule"


HEALTHY = re.compile(r"(, |; )?same loss [^()]*on the kept healthy steps? \([\d, ]+\)")
RUN_ONLY = re.compile(r"sample \d+ is (number|from)|computed in a hook|would leave all|input: .* lie between \S+ and \S+$")


def in_a_capsule(incident: dict[str, Any]) -> dict[str, Any]:
    """Leave out what only the run knows: data set, the hook around a call, the optimizer's update, the healthy steps before."""
    evidence = [e for e in incident["cause"]["evidence"] if not RUN_ONLY.match(e)]
    experiments = [e for e in incident["experiments"] if e["question"] != "the update with these gradients"]
    experiments = [{**e, "answer": HEALTHY.sub("", e["answer"])} for e in experiments]
    remedies = [{**r, "effect": HEALTHY.sub("", r["effect"]), "only": ""} for r in incident["remedies"]]
    return {**incident, "cause": {**incident["cause"], "evidence": evidence}, "experiments": experiments, "remedies": remedies}


def told(capsule: Path) -> dict[str, Any]:
    """The incident as the run saw it, without what the clock and the policy add."""
    incident: dict[str, Any] = json.loads((capsule / "capsule.json").read_text())["incident"]
    return in_a_capsule({k: v for k, v in incident.items() if k not in ("time", "action")})


def replayed(box: Sandbox, capsule: Path, *options: str, fresh: bool = False) -> Finished:
    """Run `whynan replay` where the capsule lies; `fresh` in a process of its own."""
    argv = ("replay", "--format", "json", *options, "capsule")
    if fresh:
        return box.python("-m", "whynan", *argv, cwd=capsule.parent)
    return box.forked(*argv, before=lambda: os.chdir(capsule.parent))


def said(done: Finished) -> dict[str, Any]:
    """The incident that `replay` printed."""
    incident = json.loads(done.out.splitlines()[0])
    return {k: v for k, v in incident.items() if k not in ("time", "action")}


def ran_repro(box: Sandbox, capsule: Path) -> Finished:
    """Run repro.py as `python repro.py` does, in a forked child."""

    def work() -> int:
        sys.path.insert(0, str(capsule))
        sys.modules.update(dict.fromkeys(("whynan.capsule", "whynan.records")))  # it must not need whynan
        runpy.run_path(str(capsule / "repro.py"), run_name="__main__")
        return 0

    return box.in_child(work)


@pytest.mark.parametrize("name", FAMILIES)
def test_replay_elsewhere_gives_the_same_diagnosis(box: Sandbox, name: str) -> None:
    """In a fresh process, with the script deleted, the replay of a capsule gives the incident of the run, number for number."""
    capsule = capsule_of(box, (CASES / name).read_text())
    done = replayed(box, capsule, "--trust", fresh=True)
    assert done.status == 0, done.err
    assert said(done) == told(capsule)
    assert "the same diagnosis" in done.err


@pytest.mark.parametrize("name", FAMILIES)
def test_repro_fails_with_the_value(box: Sandbox, name: str) -> None:
    """`python repro.py` shows the non-finite value with the place it was born at, without whynan, and ends with status 1."""
    capsule = capsule_of(box, (CASES / name).read_text())
    done = ran_repro(box, capsule)
    assert done.status == 1
    incident = told(capsule)
    if incident["symptom"]["place"] == "exception":
        assert incident["symptom"]["kind"] in done.err
    else:
        assert f"{incident['origin']['file']}:{incident['origin']['line']}" in done.out, done.err


ODD_VALUES = """
import numpy, torch
class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scheme = torch.nn.Linear(4, 1), torch.per_channel_symmetric
    def forward(self, x):
        return self.linear(x)
torch.manual_seed(0)
net = Scaled()
opt = torch.optim.SGD(net.parameters(), 0.1)
for s in range(6):
    x = torch.rand(8, 4)
    x[:, numpy.int64(1) : numpy.int64(3)] = x.flip(0)[:, numpy.int64(1) : numpy.int64(3)]
    loss = (net(x) - torch.log(x[:, numpy.int64(0) : numpy.int64(1)] - (s == 4))).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def test_integers_of_numpy_in_slices_and_quantisation_schemes_are_carried(box: Sandbox) -> None:
    capsule = capsule_of(box, ODD_VALUES)
    done = replayed(box, capsule, "--trust", fresh=True)
    assert done.status == 0, done.err
    assert said(done) == told(capsule)


def test_script_without_main_guard_does_not_train_on_replay(box: Sandbox) -> None:
    """Of a script without a main guard only the definitions run; its globals, local classes and closures come from the capsule."""
    capsule = capsule_of(box, SCRIPT, arguments=("--scale", "2.5"))
    done = replayed(box, capsule, "--trust", fresh=True)
    assert done.status == 0, done.err
    assert said(done) == told(capsule)
    assert told(capsule)["cause"]["code"] == "WN101"
    assert not (capsule.parent / "ran").exists()
    assert ran_repro(box, capsule).status == 1


def test_package_run_with_m(box: Sandbox) -> None:
    """A package run with -m comes with the modules it imports; its relative imports work from the capsule."""
    box.write("SMALL = 0.0\n", "shop/__init__.py")
    box.write("from . import SMALL\n\n\ndef ratio(a, b):\n    return a / (b - b + SMALL)\n", "shop/parts.py")
    box.write(
        """
        import dataclasses, enum, functools
        import torch
        from torch import nn
        from .parts import ratio

        class Kind(enum.Enum):
            PLAIN = "plain"

        @dataclasses.dataclass
        class Config:
            width: int = 5
            kind: Kind = Kind.PLAIN
            norm: object = functools.partial(nn.LayerNorm, eps=1e-5)

        class Net(nn.Module):
            def __init__(self, config):
                super().__init__()
                self.config, self.square = config, lambda t: t * t
                self.body = nn.utils.parametrizations.weight_norm(nn.Linear(3, config.width))
                self.norm = config.norm(config.width)

            def forward(self, x):
                hidden = self.square(self.norm(self.body(x)))
                return {"out": ratio(hidden, hidden) if self.config.kind is Kind.PLAIN else hidden}
        """,
        "shop/model.py",
    )
    box.write(
        """
        import torch
        from .model import Config, Net

        net = Net(Config(width=4))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            net(torch.ones(2, 3))["out"].mean().backward()
            optimizer.step()
        """,
        "shop/train.py",
    )
    box.forked("run", "--run-dir", str(box.run_dir), "-m", "shop.train", before=lambda: sys.path.insert(0, str(box.folder)))
    capsule = moved(box)
    done = replayed(box, capsule, "--trust", fresh=True)
    assert done.status == 0, done.err
    assert said(done) == told(capsule)
    assert said(done)["origin"]["file"] == "shop/parts.py"


def test_step_function(box: Sandbox) -> None:
    """A marked step function is called again from the capsule, with the global variables it reads; its update is left out."""
    box.write(
        """
        import torch, whynan
        from torch import nn

        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        guard = whynan.watch(model, optimizer, run_dir="run")

        @guard.step
        def step(x, y):
            loss = ((model(x).squeeze(-1) - y) / y).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        for number in range(4):
            y = torch.rand(6) + 1
            if number == 2:
                y[3] = 0
            step(torch.randn(6, 3), y)
        guard.close()
        """
    )
    assert box.python("train.py").status == 0
    capsule = moved(box)
    done = replayed(box, capsule, "--trust")
    assert done.status == 0, done.err
    assert said(done) == told(capsule)


def test_shows_what_it_would_run(box: Sandbox) -> None:
    """Without --trust nothing of the capsule runs: the files with their sums and the classes are shown, status 2."""
    capsule = capsule_of(box, "import torch\nopen('ran', 'w').close()\n" + (CASES / "WN501-infinite-slope/bad.py").read_text())
    done = replayed(box, capsule)
    assert done.status == 2
    assert "source/train.py" in done.out and "sha256" in done.out and "train.py: Encoder" in done.out
    assert "--trust" in done.err and "Traceback" not in done.err
    assert not (capsule.parent / "ran").exists()


def test_model_of_torch_alone_needs_no_trust(box: Sandbox) -> None:
    """A model made of torch.nn classes is replayed without running any code of the capsule."""
    capsule = capsule_of(box, TORCH_ONLY)
    for source in (capsule / "source").iterdir():
        assert source.name == "train.py"
    done = replayed(box, capsule, fresh=True)
    assert done.status == 0, done.err
    assert said(done) == told(capsule)


def on_a_gpu(value: Any) -> Any:
    """The same JSON as a step on a GPU would have written it."""
    if isinstance(value, dict):
        return {k: "cuda:0" if k == "device" and v == "cpu" else on_a_gpu(v) for k, v in value.items()}
    return [on_a_gpu(v) for v in value] if isinstance(value, list) else value


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_gpu_step_is_replayed_on_the_cpu_and_says_so(box: Sandbox, sound: Path) -> None:
    """Where there is no GPU the step is replayed on the CPU; the diagnosis stays, and is said not to be exact."""
    folder = box.folder / "capsule"
    shutil.copytree(sound, folder)
    program = on_a_gpu(json.loads((folder / "program.json").read_text()))
    program["entries"][0]["autocast"] = [["cuda", True, "bfloat16"]]
    (folder / "program.json").write_text(json.dumps(program))
    done = replayed(box, folder)
    assert done.status == 0, done.err
    assert said(done)["cause"]["code"] == told(folder)["cause"]["code"]
    assert not said(done)["origin"]["exact"] and "on the CPU" in said(done)["origin"]["note"]
    assert "replayed on the CPU" in done.err


def test_other_torch_version_is_said(box: Sandbox, sound: Path) -> None:
    """Another version of torch than that of the run is named."""
    folder = box.folder / "capsule"
    shutil.copytree(sound, folder)
    head = json.loads((folder / "capsule.json").read_text())
    (folder / "capsule.json").write_text(json.dumps({**head, "torch": "2.9.1"}))
    done = replayed(box, folder)
    assert done.status == 0 and "the step ran with 2.9.1" in done.err


def test_other_diagnosis_is_status_one(box: Sandbox, sound: Path) -> None:
    """A replay that does not come to the diagnosis of the run says so and ends with status 1."""
    folder = box.folder / "capsule"
    shutil.copytree(sound, folder)
    head = json.loads((folder / "capsule.json").read_text())
    head["incident"]["cause"]["code"] = "WN999"
    (folder / "capsule.json").write_text(json.dumps(head))
    done = replayed(box, folder)
    assert done.status == 1 and "which was WN999" in done.err


def test_run_directory_gives_its_newest_capsule(box: Sandbox) -> None:
    """PATH may be the run directory; a directory without capsules is one line."""
    done = box.watched(TORCH_ONLY)
    assert [p.name for p in (box.run_dir / "capsules").iterdir()] == ["step-000002"]
    assert box.forked("replay", str(box.run_dir)).status == 0
    empty = box.forked("replay", str(box.folder / "nowhere"))
    assert empty.status == 2 and empty.err.startswith("whynan: ") and empty.err.count("\n") == 1
    assert done.status == 0


def test_writing_a_capsule_changes_nothing(box: Sandbox) -> None:
    """Weights, moments and random numbers after the run are bit for bit those of a run without capsules."""
    source = TORCH_ONLY + "    print([p.sum().item() for p in model.parameters()], list(model.buffers()), torch.rand(3), optimizer.state_dict()['state'][0])\n"
    kept = box.watched(source)
    assert any((box.run_dir / "capsules").iterdir())
    shutil.rmtree(box.run_dir)
    without = box.watched(source, "--capsule-size", "0")
    assert not (box.run_dir / "capsules").exists()
    assert kept.out == without.out


def test_one_capsule_for_each_different_incident(box: Sandbox) -> None:
    """The same incident again brings no further capsule."""
    done = box.watched(TORCH_ONLY.replace("step != 2", "step < 1"))
    assert len(done.incidents) == 3
    assert len(list((box.run_dir / "capsules").iterdir())) == 1


def test_size_limit_drops_what_the_step_does_not_need(box: Sandbox) -> None:
    """Over the limit, other models and optimizer state go first, it says so, and the replay still works."""
    capsule = capsule_of(box, TORCH_ONLY, "--capsule-size", str(100_000 / (1 << 30)))
    head = json.loads((capsule / "capsule.json").read_text())
    assert any("does not touch" in line for line in head["dropped"])
    assert (capsule / "tensors.safetensors").stat().st_size < 100_000
    done = replayed(box, capsule)
    assert said(done)["cause"] == told(capsule)["cause"] and said(done)["origin"] == told(capsule)["origin"]


def test_step_over_the_limit_leaves_the_json(box: Sandbox) -> None:
    """If the batch and weights alone are too large, only JSON with statistics is written, and replay says why in one line."""
    capsule = capsule_of(box, TORCH_ONLY, "--capsule-size", str(100 / (1 << 30)))
    head = json.loads((capsule / "capsule.json").read_text())
    assert not head["replayable"] and head["tensors"]
    assert {"name", "shape", "min", "max"} <= set(head["tensors"][0])
    assert not (capsule / "repro.py").exists()
    done = replayed(box, capsule)
    assert done.status == 2 and "larger than the size limit" in done.err and done.err.count("\n") == 1


def test_full_disk_costs_the_capsule_not_the_diagnosis(box: Sandbox) -> None:
    """A disk that fills up while a capsule is written is told once; no partial directory stays; the run goes on."""

    def full() -> None:
        def save_file(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        safetensors.torch.save_file = save_file

    done = box.watched(TORCH_ONLY.replace("step != 2", "step < 1"), before=full)
    assert done.status in (0, 3)
    assert len(done.incidents) == 3
    assert done.err.count("no capsule was written (No space left on device)") == 1
    assert not (box.run_dir / "capsules").exists()


def test_missing_package_is_one_line(box: Sandbox) -> None:
    """A class of an installed package is imported from the environment; where that lacks it, one line names the package."""
    box.write(
        "from torch import nn\nimport torch\n\n\nclass Root(nn.Module):\n    def forward(self, x):\n        return torch.log(x * 0)\n",
        "site-packages/rooted/__init__.py",
    )
    source = """
        import torch
        from torch import nn
        from rooted import Root

        model = nn.Sequential(nn.Linear(2, 2), Root())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(3, 2)).mean().backward()
        optimizer.step()
    """
    capsule = capsule_of(box, source, before=lambda: sys.path.insert(1, str(box.folder / "site-packages")))
    assert json.loads((capsule / "capsule.json").read_text())["packages"] == {"rooted": ""}
    done = replayed(box, capsule, "--trust")
    assert done.status == 2
    assert "'rooted'" in done.err and "not installed" in done.err and done.err.count("\n") == 1


def test_what_cannot_be_carried_is_named(box: Sandbox) -> None:
    """A TorchScript part cannot be carried: the capsule says so, and replay fails with that in one line."""
    source = """
        import torch
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.part = torch.jit.script(nn.Linear(2, 2))

            def forward(self, x):
                return torch.log(self.part(x) * 0)

        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(3, 2)).mean().backward()
        optimizer.step()
    """
    capsule = capsule_of(box, source)
    head = json.loads((capsule / "capsule.json").read_text())
    assert "TorchScript" in head["lost"][0]
    done = replayed(box, capsule, "--trust")
    assert done.status == 2 and "TorchScript" in done.err and done.err.count("\n") == 1


PARTS = {
    "a TorchScript part": ("TorchScript", "self.part = torch.jit.script(nn.Linear(2, 2))", "self.part(x)", ""),
    "a part whose source is not there": ("was not found", "self.part = Part()", "self.part(x)", ""),
    "a function that is made anew": ("made anew", "self.part = nn.Linear(2, 2)", "self.part(x)", "torch.vmap(lambda v: v * loss)(torch.ones(2)).sum() * 0 + "),
}


@pytest.mark.parametrize(("reason", "made", "used", "beside"), PARTS.values(), ids=list(PARTS))
def test_a_capsule_that_cannot_be_replayed_says_so_when_it_is_written(reason: str, made: str, used: str, beside: str, box: Sandbox) -> None:
    """Not only when somebody needs it: `whynan replay` is not offered either."""
    source = f"""
        import torch
        from torch import nn
        space = {{"nn": nn}}
        exec("class Part(nn.Linear):\\n    def __init__(self):\\n        super().__init__(2, 2)", space)
        Part = space["Part"]

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                {made}

            def forward(self, x):
                return {used}

        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = torch.log(model(torch.ones(3, 2)) * 0).mean()
        ({beside}loss).backward()
        optimizer.step()
    """
    done = box.watched(source)
    (capsule,) = (box.run_dir / "capsules").iterdir()
    assert not json.loads((capsule / "capsule.json").read_text())["replayable"]
    assert "can be looked into, but not replayed" in done.err and reason in done.err
    assert "whynan replay" not in done.err


def test_a_method_that_an_object_was_given_does_not_keep_a_capsule_from_being_replayed(box: Sandbox) -> None:
    """The class does not have it: it is left out, and nothing in the step calls it."""
    source = """
        import torch
        import types
        from torch import nn

        def state_of(self):
            return dict(vars(self))

        model = nn.Linear(2, 2)
        model.kept = types.MethodType(state_of, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.log(model(torch.ones(3, 2)) * 0).mean().backward()
        optimizer.step()
    """
    capsule = capsule_of(box, source)
    assert json.loads((capsule / "capsule.json").read_text())["replayable"]
    assert replayed(box, capsule, "--trust").status == 0


def test_environment_is_never_written(box: Sandbox) -> None:
    """A program that keeps the environment in a global variable or an attribute does not get it into its capsule."""
    source = """
        import os
        from os import environ
        import torch
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.part, self.env = nn.Linear(2, 2), environ

            def forward(self, x):
                return torch.log(self.part(x) * 0) if environ.get("HOME") else x

        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(3, 2)).mean().backward()
        optimizer.step()
    """
    capsule = capsule_of(box, source, before=lambda: os.environ.update(API_TOKEN="s3cr3t-value"))
    assert all(b"s3cr3t-value" not in path.read_bytes() for path in capsule.rglob("*") if path.is_file())
    assert any("secrets" in line for line in json.loads((capsule / "capsule.json").read_text())["lost"])
    assert replayed(box, capsule, "--trust").status == 0


# -- hostile capsules -------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any], dict[str, Any], Path], None]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capsule that needs no trust, to be spoiled by the tests below."""
    box = Sandbox(tmp_path_factory.mktemp("sound"))
    capsule = capsule_of(box, TORCH_ONLY)
    assert replayed(box, capsule).status == 0
    return capsule


def first_call(program: dict[str, Any]) -> dict[str, Any]:
    """The call of the model."""
    return next(e for e in program["entries"] if e["kind"] == "module")


def model_of(program: dict[str, Any]) -> dict[str, Any]:
    """The node of the model."""
    node: dict[str, Any] = program["objects"][first_call(program)["fn"]["$"]]
    return node


def tensor_of(program: dict[str, Any]) -> dict[str, Any]:
    """The node of the largest weight of the model."""
    found = [n for n in program["objects"] if isinstance(n, dict) and n.get("kind") == "Parameter"]
    return found[0]


def set_fn(name: str) -> Change:
    return lambda head, program, folder: first_call(program).update(fn={"torch": name})


def set_class(path: str) -> Change:
    return lambda head, program, folder: model_of(program).update({"class": {"class": path}})


def set_source(path: str) -> Change:
    return lambda head, program, folder: head["sources"][0].update(path=path)


def put(text: bytes | str, name: str) -> Change:
    def change(head: dict[str, Any], program: dict[str, Any], folder: Path) -> None:
        head["_raw"] = (name, text)

    return change


def link(head: dict[str, Any], program: dict[str, Any], folder: Path) -> None:
    (folder / "source" / "train.py").unlink()
    (folder / "source" / "train.py").symlink_to("/etc/hostname")


def code_of_its_own(head: dict[str, Any], program: dict[str, Any], folder: Path) -> None:
    text = "import pathlib\npathlib.Path('canary').touch()\nclass Evil: pass\n"
    (folder / "source" / "train.py").write_text(text)
    head["sources"][0].update(runs=True, main=False, module="evil", sha256=hashlib.sha256(text.encode()).hexdigest())
    model_of(program)["class"] = {"source": 0, "name": "Evil", "line": 3}


def contain_itself(head: dict[str, Any], program: dict[str, Any], folder: Path) -> None:
    number = len(program["objects"])
    program["objects"].append({"is": "tuple", "items": [{"$": number}]})
    first_call(program).update(args=[{"$": number}])


HOSTILE: dict[str, Change] = {
    "unpickles": set_fn("torch.load"),
    "loads from a hub": set_fn("torch.hub.load"),
    "runs a command": set_fn("os.system"),
    "maps a file": set_fn("torch.from_file"),
    "calls Python on values": set_fn("torch.Tensor.apply_"),
    "takes an attribute of a function": set_fn("torch.sqrt.__self__"),
    "names a private function": set_fn("torch._C._jit_set_profiling_executor"),
    "names a function that is a number": lambda h, p, f: first_call(p).update(fn={"torch": 7}),
    "calls a number": lambda h, p, f: first_call(p).update(fn=7),
    "names a class of another package": set_class("subprocess:Popen"),
    "names a class by a path": set_class("torch.nn.modules.module:Module.__init__"),
    "names a module as a class": set_class("torch.optim:lr_scheduler"),
    "imports a module": lambda h, p, f: first_call(p).update(args=[{"import": "antigravity"}]),
    "imports through a package": lambda h, p, f: model_of(p).update({"class": {"package": "subprocess", "name": "Popen"}}),
    "names another namespace": lambda h, p, f: first_call(p).update(args=[{"module": "os"}]),
    "brings code": code_of_its_own,
    "names a file above": set_source("source/../../x.py"),
    "names a file by its root": set_source("/etc/passwd"),
    "names a file that is not Python": set_source("source/train.txt"),
    "names a file that is missing": set_source("source/other.py"),
    "links out": link,
    "changes its source": lambda h, p, f: (f / "source" / "train.py").write_text("import os\n") and None,
    "refers past the end": lambda h, p, f: first_call(p).update(args=[{"$": 10**9}]),
    "refers backwards": lambda h, p, f: first_call(p).update(args=[{"$": -1}]),
    "refers to true": lambda h, p, f: first_call(p).update(args=[{"$": True}]),
    "refers to itself": contain_itself,
    "has an unknown object": lambda h, p, f: first_call(p).update(args=[{"pickle": "gASV"}]),
    "has a list for an object": lambda h, p, f: first_call(p).update(args=[[1, 2]]),
    "has no entries": lambda h, p, f: p.update(entries={}),
    "has a call that is text": lambda h, p, f: p.update(entries=["x"]),
    "has an unknown kind of call": lambda h, p, f: first_call(p).update(kind="exec"),
    "reads a tensor nobody made": lambda h, p, f: first_call(p).update(args=[{"slot": [999, 0]}]),
    "has a place that is none": lambda h, p, f: first_call(p).update(site={"source": "x"}),
    "has a wrong shape": lambda h, p, f: tensor_of(p).update(shape=[10**6, 10**6]),
    "has a negative stride": lambda h, p, f: tensor_of(p).update(stride=[-5, 1]),
    "has an unknown dtype": lambda h, p, f: tensor_of(p).update(dtype="__class__"),
    "lacks a tensor": lambda h, p, f: tensor_of(p).update(data="../../x"),
    "lies about the incident": lambda h, p, f: h.update(incident={"symptom": 3}),
    "has another schema": lambda h, p, f: h.update(schema="<script>"),
    "has sources that are none": lambda h, p, f: h.update(sources=[1]),
    "is a pickle": put(b"\x80\x04\x95\x20\x00\x00\x00\x00\x00\x00\x00cos\nsystem\n", "tensors.safetensors"),
    "is cut short": put(b"\x10\x00", "tensors.safetensors"),
    "is deep": put("[" * 200_000, "program.json"),
    "has a bare NaN": put('{"objects": NaN}', "program.json"),
    "is not JSON": put(b"\xff\xfe\x00", "capsule.json"),
    "is a list": put("[]", "capsule.json"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_capsule_is_one_line(box: Sandbox, sound: Path, name: str) -> None:
    """A capsule made to do harm runs nothing without --trust and ends in one line and status 2."""
    folder = box.folder / "capsule"
    shutil.copytree(sound, folder)
    head, program = (json.loads((folder / f"{n}.json").read_text()) for n in ("capsule", "program"))
    HOSTILE[name](head, program, folder)
    raw = head.pop("_raw", None)
    (folder / "capsule.json").write_text(json.dumps(head))
    (folder / "program.json").write_text(json.dumps(program))
    if raw is not None:
        (folder / raw[0]).write_bytes(raw[1] if isinstance(raw[1], bytes) else raw[1].encode())
    before = sorted(p.name for p in box.folder.iterdir())
    done = replayed(box, folder)
    assert done.status == 2, (done.out, done.err)
    assert done.err.startswith("whynan: ") and done.err.count("\n") == 1, done.err
    assert [p for p in sorted(p.name for p in box.folder.iterdir()) if p not in before and not p.startswith("child.")] == []


def spots(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a piece of JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in items for place in ((*path, key), *spots(item, (*path, key)))]


ODD = [None, True, -1, 10**20, 1.5, "x", "cuda:0", [], {}, {"$": 0}, {"slot": [1, 0]}, {"torch": "torch.exp"}, {"dtype": "zz"}, {"is": "list"},
       {"lost": "a"}, {"complex": ["a", "b"]}, {"own": "optimizer_step", "of": {"$": 1}}, {"inner": [1, 2, 3]}, {"bytes": "!!"}]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_damaged_capsule_never_raises(box: Sandbox, sound: Path, seed: int) -> None:
    """One odd value anywhere in the JSON gives a diagnosis or one line, never an exception of ours."""
    folder = box.folder / "capsule"
    shutil.copytree(sound, folder)
    texts = {name: (folder / name).read_text() for name in ("program.json", "capsule.json")}
    places = [(name, place) for name, text in texts.items() for place in spots(json.loads(text))]
    draw = random.Random(seed)

    def work() -> int:
        from whynan.commands.main import main

        for _ in range(60):
            name, place = draw.choice(places)
            document = json.loads(texts[name])
            functools.reduce(lambda value, key: value[key], place[:-1], document)[place[-1]] = draw.choice(ODD)
            (folder / name).write_text(json.dumps(document))
            assert main(["replay", str(folder)]) in (0, 1, 2)
            (folder / name).write_text(texts[name])
        return 0

    done = box.in_child(work)
    assert done.status == 0, done.err
    assert "Traceback" not in done.err


def test_control_characters_do_not_reach_the_terminal(box: Sandbox, sound: Path) -> None:
    """Text from a capsule is printed without escape sequences."""
    folder = box.folder / "capsule"
    shutil.copytree(sound, folder)
    text = (folder / "source" / "train.py").read_text().replace(".mean()", ".mean()  # \x1b[31m")
    (folder / "source" / "train.py").write_text(text)
    head = json.loads((folder / "capsule.json").read_text())
    head["sources"][0]["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "capsule.json").write_text(json.dumps(head))
    done = box.forked("replay", str(folder))
    assert done.status == 0, done.err
    assert "[31m" in done.out and "\x1b" not in done.out


def test_loader_in_a_capsule_is_never_run(box: Sandbox, sound: Path) -> None:
    """`whynan replay` uses its own code: the repro.py and loader of a capsule are not touched, trusted or not."""
    folder = box.folder / "capsule"
    shutil.copytree(sound, folder)
    for path in (folder / "repro.py", *(folder / "loader").iterdir()):
        path.write_text("import pathlib\npathlib.Path('canary').touch()\n")
    assert replayed(box, folder, "--trust").status == 0
    assert not (box.folder / "canary").exists()


def test_allowed_functions_read_and_write_nothing() -> None:
    """The list of torch functions holds none that loads, saves, maps files, unpickles or takes callables."""
    words = ("load", "save", "file", "pickle", "import", "hub", "dlpack", "frombuffer", "apply_", "map_", "hook", "exec", "compile")
    assert [n for n in functions() if any(w in n.rpartition(".")[2] for w in words) and not n.endswith("huber_loss")] == []
    assert name_of(torch.load) is None
    with pytest.raises(CapsuleError):
        function_named("torch.jit.load")
    with pytest.raises(CapsuleError):
        class_named("os:PathLike")


def test_functions_keep_their_name() -> None:
    """Every allowed function is found again under the name it is carried by."""
    for value in functions().values():
        name = name_of(value)
        assert name is not None and function_named(name) is value


def test_huge_stride_takes_no_memory() -> None:
    """A stride that would need terabytes is not followed: the values are kept contiguous."""
    node = {"is": "tensor", "shape": [2, 3], "dtype": "float32", "device": "cpu", "requires_grad": False, "kind": "Tensor", "stride": [10**14, 1], "data": "t0"}
    made = Decoder([node], {"t0": torch.arange(6.0).reshape(2, 3)}).decode({"$": 0})
    assert made.stride() == (3, 1) and made.sum() == 15


def test_decoder_refuses_code_without_trust() -> None:
    """Functions, classes of source and imports all ask for trust."""
    decoder = Decoder([{"is": "function", "source": 0, "name": "f", "line": 1}], {})
    for node in ({"$": 0}, {"source": 0, "name": "A"}, {"package": "os", "name": "PathLike"}, {"import": "os"}):
        with pytest.raises(NeedsTrust):
            decoder.decode(node)

"""Whether the search of `whynan probe` finds what broke the programs of the corpus, starting from a healthy step.

    python benchmarks/probe_search.py                        # all programs whose damage is born going forward
    python benchmarks/probe_search.py --filter WN103 --budget 10

Each program runs twice. The first run tells at which step it fails. The second is halted in its last healthy step of the
same kind (made by the same line), before the update: the tape of that step is the thing searched. Its batch is what the
calls that lead to the loss read and what needs no gradient, as a factory written by hand would hand it over; tensors
that were there in the first step and did not change, and literals met before, are constants. If that gives nothing, the raw data is changed:
what was drawn, cut out of a data set or built from numbers in the step. Nothing of the failing step is used; ranges come from the healthy batch alone.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: a fork with thread pools alive is not safe

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import corpus
import torch
import torch._dynamo

from whynan.capsule.replay import Program, Run
from whynan.capsule.tape.entries import Entry, Outside, Slot
from whynan.diagnosis import Case, diagnose
from whynan.engine.guard import Guard
from whynan.engine.options import Options
from whynan.engine.stepping import Stepping
from whynan.errors import TrainingStopped
from whynan.launch import run_script
from whynan.probing.inputs import Input, observed
from whynan.probing.roles import Uses, informed
from whynan.probing.searching import Broken, Search
from whynan.probing.steps import Values, other_weights
from whynan.records import Symptom
from whynan.report.journal import Journal


class TapeStep:
    """A recorded step as something to search: other values in place of its data."""

    def __init__(self, program: Program, holders: list[Any]) -> None:
        self.program = program.until_loss()
        self.weights = [(f"weight {i}", p) for i, p in enumerate(program.leaves) if p.requires_grad]
        with self.still():
            run = self._play()
            found = [(h, v) for h in holders if (v := h.read(run)) is not None and v.dim() and v.numel()]
            self._holders = [h for h, _ in found]
            values = [v.detach().clone() for _, v in found]
            uses = Uses(values)
            with uses, self.put(values, always=True):
                self._play()
        self.inputs: list[Input] = [informed(observed(h.name, v), uses.found.get(i)) for i, (h, v) in enumerate(zip(self._holders, values, strict=True))]

    @contextmanager
    def still(self) -> Iterator[None]:
        with self.program.still():
            yield

    def loss(self, values: Values) -> torch.Tensor:
        with self.put(values):
            run = self._play()
        losses = [t.float().sum() for t in run.losses if t.numel()]
        return torch.stack(losses).sum() if losses else torch.zeros(())

    def _play(self) -> Run:
        run = self.program.play()
        if run.error is not None:
            raise run.error
        return run

    @contextmanager
    def put(self, values: Values, always: bool = False) -> Iterator[None]:
        """Put other data in place; what is not changed is made again, so that what follows from a change is changed too."""
        for number, (holder, value) in enumerate(zip(self._holders, values, strict=True)):
            if always or value is not self.inputs[number].value:
                holder.put(value)
        try:
            yield
        finally:
            for holder in self._holders:
                holder.put(None)

    def damage(self) -> str:
        return ""


class _OfOutside:
    """A tensor that came from outside the step."""

    def __init__(self, kept: Outside, name: str) -> None:
        self.kept, self.name, self._before = kept, name, kept.saved

    def read(self, run: Run) -> torch.Tensor | None:
        return self.kept.value().detach()

    def put(self, value: torch.Tensor | None) -> None:
        self.kept.saved = self._before if value is None else value


class _OfEntry:
    """A tensor that a call of the step made without weights: cut out of a data set, drawn, built."""

    def __init__(self, entry: Entry, name: str) -> None:
        self.entry, self.name = entry, name
        self._before = (entry.fn, entry.args, entry.kwargs, entry.kind)

    def read(self, run: Run) -> torch.Tensor | None:
        found = run.made.get(Slot(self.entry.number, 0))
        return None if found is None else found.detach()

    def put(self, value: torch.Tensor | None) -> None:
        entry = self.entry
        entry.fn, entry.args, entry.kwargs, entry.kind = self._before if value is None else ((lambda: value.clone()), (), {}, "call")


def data_of(program: Program, constants: set[int], raw: bool) -> list[Any]:
    """Return the data of a step: what calls that lead to the loss read and needs no gradient; or the raw data: drawn, cut out, built."""
    fixed = constants | {id(b) for root in program.roots for b in root.buffers()}
    made = {e.number: e for e in program.entries}
    found: dict[Any, Any] = {}
    for entry in program.entries:
        if entry.kind == "backward" or not (raw or entry.needs_grad):
            continue
        for read in entry.reads:
            if isinstance(read, Outside) and not read.tensor.requires_grad and id(read.tensor) not in fixed:
                found.setdefault(id(read), _OfOutside(read, f"data {len(found)}"))
            elif isinstance(read, Slot) and read.index == 0 and _is_data(made.get(read.entry), raw) and id(made[read.entry]) not in constants:
                found.setdefault(read, _OfEntry(made[read.entry], f"data {len(found)}"))
    return list(found.values())


def _is_data(entry: Entry | None, raw: bool) -> bool:
    if entry is None or entry.outputs != 1 or entry.needs_grad:
        return False
    return not raw or all(isinstance(r, Outside) for r in entry.reads)


class Halted(BaseException):
    """The program is at the step that is wanted."""


class Watcher(Guard):
    """Notes which line makes each step; halts in the step that is wanted."""

    def __init__(self, path: Path, wanted: int = -1, budget: float = 30.0) -> None:
        super().__init__(Options(policy="observe", spike="off"), Journal(None, quiet=True))
        self.keys: dict[int, int] = {}  # by step: the line of the program that makes it
        self.path = path
        self.wanted, self.budget = wanted, budget
        self.answer: dict[str, Any] = {}
        self._seen: list[tuple[torch.Tensor, int]] = []
        self._literals: set[str] = set()
        self.steps.allowed = self._allowed  # type: ignore[method-assign]

    def step(self, call: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
        if not args and not kwargs:
            self._arrive()
        return super().step(call, optimizer, args, kwargs)

    def scaler_step(self, call: Any, scaler: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
        self._arrive()
        return super().scaler_step(call, scaler, optimizer, args, kwargs)

    def _allowed(self, optimizer: Any, in_closure: bool = False) -> bool:
        if in_closure:
            self._arrive()
        return Stepping.allowed(self.steps, optimizer, in_closure)

    def backward(self, call: Any, args: Any, kwargs: Any) -> Any:
        result = super().backward(call, args, kwargs)
        if self.session.by_hand:
            self._arrive()
        return result

    def _arrive(self) -> None:
        step, tape = self.session.step_count, self.recorder.tape
        self.keys.setdefault(step, _line_of(self.path))
        outside = {id(r.tensor): r for e in tape for r in e.reads if isinstance(r, Outside)}
        literals = {id(e): f"{e.args} {e.kwargs}" for e in tape if getattr(e.fn, "__name__", "") == "tensor"}
        if step == self.wanted:
            constants = {id(t) for t, v in self._seen if id(t) in outside and outside[id(t)].version == v}
            constants |= {number for number, text in literals.items() if text in self._literals}
            ends = {e.number for e in tape if e.kind in ("backward", "derivative")}
            program = Program(self.recorder, tape.needed_for(ends), self.session.leaves())
            try:
                self.answer = self.recorder.suspended(searched, program, constants, self.budget)
            except Exception as error:
                self.answer = {"state": f"the search failed: {type(error).__name__}: {error}"[:200]}
            raise Halted
        self._seen = self._seen or [(r.tensor, r.version) for r in outside.values()]
        self._literals |= set(literals.values())


def _line_of(path: Path) -> int:
    """Return the innermost line of the program that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != str(path):
        frame = frame.f_back
    return frame.f_lineno if frame is not None else 0


def searched(program: Program, constants: set[int], budget: float) -> dict[str, Any]:
    """Search one step and have what was found diagnosed: first the data its loss is made of, then the raw data."""
    begin = time.monotonic()
    attempts = 0
    for raw in (False, True):
        step = TapeStep(program, data_of(program, constants, raw) or data_of(program, set(), raw))
        search = Search(step, (budget - (time.monotonic() - begin)) * (1.0 if raw else 0.7))
        if not search.healthy():
            return {"state": "the healthy step does not replay as healthy"}
        found = search.run()
        attempts += search.attempts
        seconds = time.monotonic() - begin
        if found is not None:
            line, code = _diagnosed(step, program, found)
            told = {"kind": found.kind, "how": found.how, "line": line, "code": code, "attempts": attempts, "seconds": seconds, "factor": found.factor}
            return {"state": "found", **told}
    return {"state": "not found", "attempts": attempts, "seconds": seconds, "inputs": [f"{i.role}{list(i.value.shape)}" for i in step.inputs]}


def _diagnosed(step: TapeStep, program: Program, found: Broken) -> tuple[int, str]:
    kind = type(found.outcome.error).__name__ if found.outcome.error is not None else "nan"
    symptom = Symptom(found.outcome.place or "exception", kind, found.outcome.place)
    with other_weights(step, found.weights), step.put(found.values):
        incident = diagnose(Case(0, symptom, program))
    return incident.origin.span.line, incident.cause.code


def first_run(path: Path) -> dict[str, Any]:
    """Run a program to its end; return the step of its first incident and the line that makes each step."""
    guard = Watcher(path)
    run(guard)
    first = guard.journal.incidents[0].step if guard.journal.incidents else None
    return {"failing": first, "keys": {str(k): v for k, v in guard.keys.items()}}


def run(guard: Watcher) -> None:
    """Run a program under a guard, whatever it raises."""
    with suppress(Exception, SystemExit, TrainingStopped, Halted):
        run_script(guard, str(guard.path), [])


def last_healthy(told: dict[str, Any]) -> int | None:
    """Return the last step before the failing one that the same line makes."""
    failing, keys = told["failing"], {int(k): v for k, v in told["keys"].items()}
    if failing is None:
        return max(keys, default=None)
    same = [s for s, line in keys.items() if s < failing and (failing not in keys or line == keys[failing])]
    return max(same, default=None)


def second_run(path: Path, step: int, budget: float) -> dict[str, Any]:
    """Run a program to a step and search there."""
    guard = Watcher(path, step, budget)
    run(guard)
    return guard.answer or {"state": "did not come to the step again"}


def judge(program: corpus.Program, budget: float) -> dict[str, Any]:
    """Run both passes in children of their own."""
    told = corpus.in_child(lambda: first_run(program.path))["answer"]
    if told is None:
        return {"state": "first run failed"}
    step = last_healthy(told)
    if step is None:
        return {"state": "fails in its first step of the kind"}
    done = corpus.in_child(lambda: second_run(program.path, step, budget), int(budget) + 60)
    return done["answer"] or {"state": "second run failed", "err": done["err"][-400:]}


def main(argv: list[str] | None = None) -> int:
    """Search all programs and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--filter", default="", help="only programs whose name contains this text")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds for each program")
    parser.add_argument("--healed", action="store_true", help="the healed programs instead, at their last step: what is found there inside the ranges?")
    parser.add_argument("--json", type=Path, help="also write the answers to this file")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    chosen = [p for p in _programs(options.healed) if options.filter in p.name]
    answers: dict[str, dict[str, Any]] = {}
    for program in chosen:
        answer = answers[program.name] = judge(program, options.budget)
        answer["same line"] = answer.get("line") == program.line
        print(f"{program.name:<52} {_told(answer)}", flush=True)
    print(_summary(list(answers.values())))
    if options.json:
        options.json.write_text(json.dumps(answers, indent=1) + "\n")
    return 0


def _programs(healed: bool) -> list[corpus.Program]:
    if healed:
        return [p for p in corpus.healthy() if "WN1" <= p.path.parent.name < "WN5"]
    return [p for p in corpus.failing() if p.phase in ("forward", "loss") and "WN1" <= p.code < "WN5"]


def _told(answer: dict[str, Any]) -> str:
    if answer["state"] != "found":
        return answer["state"] + (f" ({answer['attempts']} attempts, {answer['seconds']:.0f} s, {answer['inputs']})" if "attempts" in answer else f" {answer}")
    where = f"{answer['code']} at " + ("the same line" if answer["same line"] else f"line {answer['line']}")
    return f"found, {answer['kind']}: {where}, {answer['seconds']:.1f} s, {answer['how']}"[:150]


def _summary(answers: list[dict[str, Any]]) -> str:
    found = [a for a in answers if a["state"] == "found"]
    kinds = ", ".join(f"{sum(a['kind'] == k for a in found)} by {k}" for k in ("inputs", "weights", "beyond", "far weights"))
    same = sum(a["same line"] for a in found)
    share = 100 * len(found) / max(len(answers), 1)
    return f"\nfound {len(found)} of {len(answers)} ({share:.0f}%): {kinds}; {same} at the line where the program itself failed"


if __name__ == "__main__":
    raise SystemExit(main())

"""What a run does every so many updates without its loop being changed: write a checkpoint, validate.

Both come due with an update and are done before the next batch is drawn, when schedulers and averages have followed it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from whynan.addresses import callable_at
from whynan.capsule.state.randomness import put_rng, take_rng
from whynan.engine.options import Options
from whynan.engine.session import Session, parameters_of
from whynan.errors import TrainingStopped, UsageError
from whynan.records import Notice, NoticeKind, number
from whynan.recovery.keeper import Keeper
from whynan.recovery.lastgood import Everything
from whynan.recovery.place import rank_here


class Regular:
    """Counts updates; nothing is done, and nothing costs, where nothing was asked for."""

    def __init__(self, session: Session, options: Options, everything: Callable[[], Everything]) -> None:
        self.keeping = False  # a checkpoint is saved or loaded
        self.session, self.options, self._everything = session, options, everything
        self.wanted = bool(options.save_every or options.validate_every)
        self._keeper = Keeper(say=session.journal.say)
        self._validate: Callable[..., Any] | None = None
        self._given_up: set[str] = set()

    def finished(self) -> None:
        """An update was made: note what is due after it."""
        if any(every and self.session.applied % every == 0 for every in (self.options.save_every, self.options.validate_every)):
            self.session.recorder.ask_before_draw(self._do)

    def settle(self) -> None:
        """At the end: what the last update made due."""
        if self._do in self.session.recorder.before_draw:
            self._do()

    def _do(self) -> None:
        self.session.recorder.before_draw.remove(self._do)
        applied = self.session.applied
        values: dict[str, float] = {}
        if self.options.validate_every and applied % self.options.validate_every == 0:
            values = self._tried("validation", self._validated) or {}
        if self.options.save_every and applied % self.options.save_every == 0 and not rank_here():
            self._tried("checkpoints", lambda: self._save(values))

    def _tried(self, what: str, action: Callable[[], Any]) -> Any:
        """Do something of the user's, or with the user's disk: what goes wrong is said once, and the training goes on without it."""
        if what in self._given_up:
            return None
        try:
            return action()
        except TrainingStopped:
            raise
        except (Exception, SystemExit) as error:
            self._given_up.add(what)
            reason = str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
            self.session.journal.say(f"whynan: no {what} any more: {(reason.splitlines() or [''])[0]}")
            return None

    # -- checkpoints --------------------------------------------------------------------------------------------

    def _save(self, values: Mapping[str, float]) -> None:
        home = self.session.journal.home()
        if home is None:
            raise UsageError("there is no run directory to write them to")
        state = self._everything()
        models = _outermost(m for m in map(_inner, state.modules) if m.state_dict())
        if any(hasattr(p, "_local_tensor") for model in models for p in model.parameters()):
            raise UsageError("the model is spread over the ranks; call guard.save_sharded in the loop")
        parts = {**_numbered("model", models), **_numbered("optimizer", state.optimizers)}
        parts |= {**_numbered("scheduler", state.schedulers), **_numbered("scaler", state.scalers)}
        if values:
            parts["validation"] = dict(values)
        self._keeper.save(home / "checkpoints" / f"step-{self.session.applied:08d}.pt", **parts, step=self.session.applied)

    # -- validation ---------------------------------------------------------------------------------------------

    def _validated(self) -> dict[str, float]:
        """Ask the user's function, in eval mode and without gradients; the training does not notice."""
        function = self._function()
        modules = {id(m): m for root in self.session.recorder.roots.modules() for m in root.modules()}.values()
        modes, rng = [(m, m.training) for m in modules], take_rng(others=True)
        try:
            for module in modules:
                module.training = False
            with torch.no_grad():
                answer = function(_inner(self._model())) if _takes_one(function) else function()
        finally:
            for module, mode in modes:
                module.training = mode
            put_rng(rng)
        values = _numbers(answer)
        if not rank_here():
            self._tell(values)
        return values

    def _function(self) -> Callable[..., Any]:
        if self._validate is None:
            given = self.options.validate
            self._validate = callable_at(given) if isinstance(given, str) else given
        assert self._validate is not None
        return self._validate

    def _model(self) -> torch.nn.Module:
        """The model that is trained: of those the program calls, the one with most of the optimizers' weights."""
        trained = {id(p) for o in self.session.optimizers for p in parameters_of(o)}
        roots = self.session.recorder.roots.modules()
        if not roots:
            raise UsageError("the program calls no module")
        return max(roots, key=lambda root: sum(p.numel() for p in root.parameters() if id(p) in trained))

    def _tell(self, values: dict[str, float]) -> None:
        journal, applied = self.session.journal, self.session.applied
        journal.validation(applied, values)
        journal.say(f"whynan: validation after {applied} updates: {', '.join(f'{name} {number(value)}' for name, value in values.items())}")
        for name, value in values.items():
            if not math.isfinite(value):
                text = f"validation: {name} is {number(value)} after {applied} updates"
                journal.warning(Notice(NoticeKind.LIMIT, self.session.step_count, f"validation {name}", value, text))


def _takes_one(function: Callable[..., Any]) -> bool:
    """Whether a function wants the model."""
    try:
        wanted = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in wanted)


def _numbers(answer: Any) -> dict[str, float]:
    """Read a number, or numbers by name.

    >>> _numbers(torch.tensor(0.25)), _numbers({"loss": 1, "accuracy": 0.5})
    ({'loss': 0.25}, {'loss': 1.0, 'accuracy': 0.5})
    """
    found = answer if isinstance(answer, Mapping) else {"loss": answer}
    try:
        return {str(name): float(value) for name, value in found.items()}
    except (TypeError, ValueError):
        raise UsageError(f"the validation function returns a number, or numbers by name, not {type(answer).__name__}") from None


def _numbered(name: str, items: Iterable[Any]) -> dict[str, Any]:
    """Name things: `model`, or `model_0`, `model_1` where there are several."""
    listed = list(items)
    return {name: listed[0]} if len(listed) == 1 else {f"{name}_{n}": item for n, item in enumerate(listed)}


def _inner(module: torch.nn.Module) -> torch.nn.Module:
    """The user's own module inside a wrapper for several processes or a compiled one: its names, and no collective when one rank calls it."""
    while isinstance(inner := getattr(module, "_orig_mod", None) or getattr(module, "module", None), torch.nn.Module) and _is_wrapper(module):
        module = inner
    return module


def _is_wrapper(module: torch.nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel)


def _outermost(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Leave out what is part of another: a program may call an encoder by itself too."""
    listed = list({id(m): m for m in modules}.values())
    inside = {id(part) for module in listed for part in module.modules() if part is not module}
    return [module for module in listed if id(module) not in inside]

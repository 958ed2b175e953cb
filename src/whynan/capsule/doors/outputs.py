"""What modules return, heard while a model runs: the largest absolute value of the outputs that a limit names.

Nothing is hung on a module: its calls pass a door of ours anyway (`doors/modules.py`), and the door hands over what it returned. So copies and
files of the model, its compiled code and what torch decides by the presence of hooks are as without us. What runs inside compiled code
passes no door and is not heard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from whynan.capsule.doors.compiled import is_compiled_module, skip_frame
from whynan.capsule.recorder import Recorder
from whynan.capsule.tape.nested import tensors_of
from whynan.capsule.unseen import unseen
from whynan.records import Notice, NoticeKind
from whynan.tripwire.tracking import OUTPUT, Limit, module_names
from whynan.tripwire.values import largest

EVERY = 16  # steps between two looks at an output
_NAMED_AGAIN = 100  # steps between two looks at which modules there are
_LISTED = 3


@dataclass(slots=True, eq=False)
class Place:
    """A module whose output is heard, under the name that an outermost module gives it."""

    name: str
    label: str  # to print: names of several models may be the same
    module: torch.nn.Module
    every: int
    due: int  # the step from which on it is wanted
    value: torch.Tensor | float | None = None  # the largest of the step in progress
    last: int | None = None  # the step it was last heard in
    idle: bool = False  # was not called when it was last wanted


@dataclass(slots=True, eq=False)
class _Root:
    """An outermost module, and what is heard inside it."""

    module: torch.nn.Module
    named_at: int
    places: list[Place]


@unseen
class Outputs:
    """Listens in the steps that are due: every 16 steps, or as often as a limit asks.

    Cost: nothing but one look into an empty table for each module call in other steps. In a step that is due one reduction for each output,
    no copy, no host sync on CUDA.
    """

    def __init__(self, recorder: Recorder, limits: list[Limit]) -> None:
        self._recorder = recorder
        self._limits = [limit for limit in limits if limit.of_outputs]
        self._every = min((limit.every or EVERY for limit in self._limits), default=EVERY)
        self._roots: dict[int, _Root] = {}
        self._step = 0
        self._next = 0  # the first step that somebody wants
        self._hidden: dict[str, list[str]] = {}  # by pattern: modules inside compiled ones
        self._told: set[str] = set()
        self.listens = True  # in the present step
        self.now: dict[int, Place] = {}  # who is heard in the call that runs, by the module's id

    def met(self, root: torch.nn.Module) -> None:
        """A module is called as the outermost one for the first time: hear it now, unless such are made all the time."""
        if len(self._roots) < EVERY and next(root.parameters(), None) is not None:
            self._next = min(self._next, self._step)
            self.listens = True

    # -- while the model runs -------------------------------------------------------------------------------------

    def around(self, root: torch.nn.Module, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an outermost call, `call(*args)`, and listen; a validation between two steps belongs to neither."""
        with self.listening([root]):
            result = call(*args, **kwargs)
            if id(root) in self.now:  # this call did not pass the door of the inner ones
                self.hear(root, result)
        return result

    @contextmanager
    def listening(self, roots: Iterable[torch.nn.Module]) -> Iterator[None]:
        """Listen while a call runs these."""
        before = self.now
        try:
            wanted = [] if self._recorder.replaying else [root for root in roots if root.training or torch.is_grad_enabled()]
            self.now = {id(p.module): p for root in wanted for p in self._places(root) if p.due <= self._step}
        except Exception as error:
            self._recorder.faulty(error)
        try:
            yield
        finally:
            self.now = before

    def hear(self, module: torch.nn.Module, result: Any) -> None:
        """Take what a module returned."""
        recorder = self._recorder
        try:
            place = self.now.get(id(module))
            if place is None or place.due > self._step or recorder.replaying or not recorder.mine or _is_another_use():
                return
            with torch.no_grad(), ExitStack() as stack:
                stack.enter_context(torch._C.DisableTorchFunction())
                if torch._C._len_torch_dispatch_stack():  # selective checkpointing counts what passes its mode
                    stack.enter_context(_disable_current_modes())
                for tensor in tensors_of(result):
                    _take(place, tensor)
        except Exception as error:
            recorder.faulty(error)

    def _places(self, root: torch.nn.Module) -> list[Place]:
        known = self._roots.get(id(root))
        if known is None or known.module is not root or self._step - known.named_at >= _NAMED_AGAIN:
            old = {(p.name, id(p.module)): p for p in known.places} if known is not None and known.module is root else {}
            known = self._roots[id(root)] = _Root(root, self._step, [old.get((p.name, id(p.module)), p) for p in self._found(root)])
        return known.places

    def _found(self, root: torch.nn.Module) -> Iterator[Place]:
        inside = {id(m) for top in root.modules() if is_compiled_module(top) for m in top.modules() if m is not top}
        for name, module in module_names(root):
            limits = [limit for limit in self._limits if limit.matches(name)]
            if limits and id(module) in inside:
                for limit in limits:
                    self._hidden.setdefault(limit.pattern, []).append(name.removeprefix(OUTPUT))
            elif limits:
                label, due = self._place(name, root)
                yield Place(name, label, module, min(limit.every or EVERY for limit in limits), due)

    def _place(self, name: str, root: torch.nn.Module) -> tuple[str, int]:
        """Tell models apart that are in use together; one made anew, as criteria are, takes the place of the old one."""
        others = [p for known in self._roots.values() if known.module is not root for p in known.places if p.name == name]
        taken = {p.label for p in others if p.value is not None or (p.last is not None and self._step - p.last < EVERY)}
        if next(root.parameters(), None) is None:
            taken = set()
        label = next(text for n in range(1, len(taken) + 2) if (text := name if n == 1 else f"{name} of model {n}") not in taken)
        return label, max([self._step, *(p.due for p in others if p.label == label)])

    # -- between two steps ----------------------------------------------------------------------------------------

    def heard(self) -> Iterator[tuple[str, str, torch.Tensor | float]]:
        """Yield names, names to print, and largest absolute values of the step in progress."""
        for place in self._all() if self._step >= self._next else ():
            if place.value is not None:
                yield place.name, place.label, place.value

    def end(self, step: int, last: bool = False) -> list[Notice]:
        """The step is over: forget its values, and decide whether to listen to the next one; answer with what could not be heard."""
        notices: list[Notice] = []
        if step >= self._next or last:
            for place in self._all():
                _settle(place, step)
            notices = [*self._unheard(step, last), *self._inside_compiled(step)]
            alive = {id(root) for root in self._recorder.roots.modules()}
            self._roots = {key: root for key, root in self._roots.items() if key in alive}
            self._next = min([_following(step, self._every), *(p.due for p in self._all())]) if self._roots else step + 1  # modules may be made later
        self._step = step + 1
        self.listens = not last and self._step >= self._next
        return notices

    def _all(self) -> Iterator[Place]:
        for root in self._roots.values():
            yield from root.places

    def _unheard(self, step: int, last: bool) -> Iterator[Notice]:
        """Name the limits whose modules are there and never called."""
        for limit in self._limits:
            places = [p for p in self._all() if limit.matches(p.name)]
            if not places or limit.pattern in self._told or any(p.last is not None for p in places):
                continue
            if (last and step) or all(p.idle for p in places):
                self._told.add(limit.pattern)
                names = _listed([p.name.removeprefix(OUTPUT) for p in places])
                text = f"track: {limit.pattern!r} has seen no output: {names} not called so far, or only inside compiled code or a transform"
                yield Notice(NoticeKind.LIMIT, step, limit.pattern, None, text)

    def _inside_compiled(self, step: int) -> Iterator[Notice]:
        for pattern, names in self._hidden.items():
            key = f"compiled {pattern}"
            if key not in self._told:
                self._told.add(key)
                what = f"{len(names)} modules" if len(names) > 1 else "a module"
                text = f"track: {pattern!r} names {what} inside compiled code, not looked at: {_listed(names)}"
                yield Notice(NoticeKind.LIMIT, step, pattern, None, text)
        self._hidden.clear()


def _is_another_use() -> bool:
    """Whether a backward pass computes it again (checkpointing), or the program is turned into something that our reduction would become part of."""
    if torch._C._current_graph_task_id() != -1 or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return bool(torch._C._is_tracing())


def _take(place: Place, tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point() or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    try:
        size = largest(tensor.detach())
        found = float(size) if size is not None and size.is_cpu else size
    except (RuntimeError, NotImplementedError, TypeError, AttributeError):
        return  # a kind of tensor that cannot be looked into
    held = place.value
    if found is None or held is None:
        place.value = held if found is None else found
    elif isinstance(found, float) and isinstance(held, float):
        place.value = held if found <= held else found
    else:
        place.value = torch.maximum(torch.as_tensor(held), torch.as_tensor(found).to(held.device if isinstance(held, torch.Tensor) else "cpu"))


def _settle(place: Place, step: int) -> None:
    """A module is wanted until it was called, at most for as long as lies between two looks; then only in the steps that are due."""
    if place.value is not None:
        place.value, place.last, place.idle = None, step, False
        place.due = _following(step, place.every)
    elif place.due <= step and (place.idle or step - place.due >= place.every - 1):
        place.idle = True
        place.due = _following(step, place.every)


def _following(step: int, every: int) -> int:
    return (step // every + 1) * every


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


skip_frame(Outputs.around)
for _ours in (Outputs.hear, Outputs._places):  # they may be asked between two graphs
    skip_frame(_ours, deep=True)

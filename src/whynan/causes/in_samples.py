"""A remedy for 0 / 0 at a line of the data set: the bad samples are made again with it, and the step is played with what that gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from whynan.capsule.sites import Site, positions, resolve, take_site
from whynan.capsule.tape.entries import Outside
from whynan.capsule.tape.nested import tensors_of
from whynan.causes.catalogue import Scene
from whynan.causes.diffs import joined
from whynan.causes.fixes import guarded, plain_name
from whynan.causes.handed import samples_again
from whynan.causes.source import expression_at
from whynan.errors import let_through
from whynan.records import Remedy
from whynan.trace.birth import Birth
from whynan.trace.lines import Line
from whynan.tripwire.values import damage_of

_TRIES = 2


class _Divisions(TorchFunctionMode):
    """Finds the first division at a line that makes 0 / 0 of finite values, or puts another computation in its place."""

    def __init__(self, line: Site, at: Site | None = None, swap: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.line, self.at, self.swap = line, at, swap

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        site = take_site() if plain_name(func) == "div" else None
        if self.swap is not None and site is not None and site == self.at:
            result = self.swap(func, args, kwargs)
            return func(*args, **kwargs) if result is NotImplemented else result
        here = site is not None and self.at is None and site.code is self.line.code and positions(site)[0] == positions(self.line)[0]
        usable = here and not any(map(_is_bad, args))  # asked before it is written to
        result = func(*args, **kwargs)
        if usable and _is_bad(result) and not bool(result.isinf().any()):  # for a number over 0 no other number is known
            self.at = site
        return result


def _is_bad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and bool(damage_of(value))


def divided_in_samples(scene: Scene, birth: Birth, line: Line, samples: list[int]) -> list[Remedy]:
    """Return the change of a 0 / 0 at the data set's own line with which its bad samples, and the step, are good; nothing where none is.

    Cost: each bad sample is asked for twice, and once more for each of two changes; a replay for each.
    """
    found = _bad_rows(scene, birth, line, samples)
    if found is None or scene.lab is None:
        return []
    at, fields = found
    expression = expression_at(at, resolve(at).file)
    for fix in guarded("div", str(birth.handed_in().dtype).removeprefix("torch."))[:_TRIES] if expression is not None else ():
        change = fix.text(expression) if expression is not None else None
        diff = joined([(expression, change)]) if expression is not None and change is not None else ""
        outcome = _with(scene, birth, _Divisions(line.site, at, fix.swap(expression, "div")), fields) if diff else None
        good, words = scene.lab.judge(outcome, bound=fix.operand is not None) if outcome is not None else (False, "still not finite")
        scene.tried(f"{fix.title}, in the data set", words)
        if good:
            return [Remedy(fix.title, diff, fix.safe, "proven", f"{words}; the bad samples were made again with it")]
    return []


def _bad_rows(scene: Scene, birth: Birth, line: Line, samples: list[int]) -> tuple[Site, dict[int, int]] | None:
    """Return where a division at a line made all bad samples, and which tensor of each of them the batch holds; None where they come out otherwise."""
    batch, fields = birth.handed_in(), dict[int, int]()
    looking = _Divisions(line.site)
    for row, tensors in _made(scene, samples, looking):
        same = (i for i, t in enumerate(tensors) if t.shape == batch.shape[1:] and torch.equal(t.nan_to_num(0.5), batch[row].cpu().nan_to_num(0.5)))
        fields[row] = next(same, -1)
    return (looking.at, fields) if looking.at is not None and fields and min(fields.values()) >= 0 else None


def _with(scene: Scene, birth: Birth, mode: _Divisions, fields: dict[int, int]) -> Any:
    """Play the step with samples that are made with a change; None where they still are bad."""
    mended = birth.handed_in().detach().clone()
    for row, tensors in _made(scene, list(fields), mode):
        if fields[row] < len(tensors) and tensors[fields[row]].shape == mended.shape[1:]:
            mended[row] = tensors[fields[row]].to(mended)
    if damage_of(mended) or scene.lab is None:
        return None
    with _in_place_of(scene, birth, mended) as held:
        return scene.lab.run() if held else None


def _made(scene: Scene, samples: list[int], mode: _Divisions) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Make samples again, and yield their tensors."""
    try:
        with samples_again(scene.program) as drawn, mode:
            made = [(row, list(tensors_of(drawn.fetch(row)))) for row in samples] if drawn is not None else []
    except Exception as error:  # of the program's own code: it may not like to be asked twice
        let_through(error)
        made = []
    yield from made


@contextmanager
def _in_place_of(scene: Scene, birth: Birth, mended: torch.Tensor) -> Iterator[bool]:
    """Hand other values to the calls that were given a batch; whether there are any."""
    held = [leaf for entry in scene.program.entries for leaf in entry.reads if isinstance(leaf, Outside) and _is_the_same(leaf.value(), birth.handed_in())]
    before = [(leaf, leaf.saved) for leaf in held]
    try:
        for leaf in held:
            leaf.saved = mended
        yield bool(held)
    finally:
        for leaf, saved in reversed(before):
            leaf.saved = saved


def _is_the_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype is other.dtype and one.device == other.device
    return alike and torch.equal(one.detach().nan_to_num(0.5), other.nan_to_num(0.5))

"""A step without the bad terms of its loss: the others are learned from, what only the bad ones reach stays as it is.

A term is bad where it is not finite, or where the gradient of it alone is not: the step is replayed once for each term to see that.
Then it is replayed with each bad term cut out of the sum it goes into. Weights that no good term reaches have no gradient
then, and an optimizer leaves such weights and their state alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from whynan.capsule.replay import Program, Run
from whynan.capsule.sites import Site, resolve
from whynan.causes.terms import LISTED, by_name
from whynan.engine.summing import Operand, Sums
from whynan.tripwire.values import damage_of

TAKEN = "terms dropped"
MOST = 32  # terms of one loss that are tried
Grads = list[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class _Known:
    """One term of a loss."""

    name: str
    operand: Operand
    site: Site | None  # where it is added
    bad: bool  # its value is not finite


def without_bad_terms(program: Program, trained: list[torch.Tensor]) -> str:
    """Put the gradients of the good terms in place of the bad ones; say what was left out, nothing where it cannot be done.

    Cost: two replays of the step, and one more for each term of the loss where the terms are finite.
    """
    if program.inexact():
        return ""
    losses, passes, calls = _survey(program, trained)
    bad = {term.operand for terms in losses for term in terms if term.bad}
    by_value = frozenset(bad)
    grads = _good_gradients(program, by_value, calls) if bad else None
    if grads is None:
        bad |= _bad_alone(program, [[t.operand for t in terms] for terms in losses], passes, by_value)
        grads = _good_gradients(program, frozenset(bad), calls) if bad > by_value else None
    if grads is None:
        return ""
    for leaf, grad in zip(program.leaves, grads, strict=True):
        leaf.grad = grad
    return _words([term for terms in losses for term in terms if term.operand in bad])


def _play(program: Program, mode: Sums) -> tuple[Run, Grads]:
    with program.still(), mode:
        run = program.play(mode)
        return run, mode.gradients()


def _survey(program: Program, trained: list[torch.Tensor]) -> tuple[list[list[_Known]], list[bool], int]:
    """Return the terms of each loss, whether going back from it gives bad gradients, and how many calls could be sums."""
    mode = Sums(program.leaves)
    run, grads = _play(program, mode)
    if run.error is not None or len(run.losses) != len(mode.bad_passes) or not _same(program, grads, trained):
        return [], [], 0
    operands = mode.operands()
    losses = []
    for tree in mode.terms(run):
        named = by_name(tree) if tree is not None else []
        losses.append([_Known(name, *operands[term.index]) for name, term in named if term.index in operands])
    return losses, mode.bad_passes, mode.count


def _same(program: Program, grads: Grads, trained: list[torch.Tensor]) -> bool:
    """Whether a replay gives the gradients that are there, as far as these are finite: none are left of steps before it."""
    replayed = {id(leaf): grad for leaf, grad in zip(program.leaves, grads, strict=True)}
    for leaf in trained:
        here, again = leaf.grad, replayed.get(id(leaf))
        if here is None or here.layout is not torch.strided or damage_of(here):
            continue
        if again is None or not torch.allclose(here, again, rtol=1e-2, atol=1e-2 * float(here.abs().max()) if here.numel() else 0.0):
            return False
    return True


def _bad_alone(program: Program, losses: list[list[Operand]], passes: list[bool], known: frozenset[Operand]) -> set[Operand]:
    """Return the terms whose gradient is bad on its own. Terms of different losses are tried in the same replay."""
    tried = [[term for term in terms if term not in known] if bad else [] for terms, bad in zip(losses, passes, strict=True)]
    others = {term for terms in tried for term in terms}
    found: set[Operand] = set()
    turns = max(map(len, tried), default=0)
    for turn in range(turns if turns <= MOST else 0):
        kept = [terms[turn % len(terms)] if terms else None for terms in tried]
        mode = Sums(program.leaves, known | (others - {term for term in kept if term is not None}))
        run, _ = _play(program, mode)
        if run.error is not None:
            return set()  # the terms hang together
        found |= {term for term, bad in zip(kept, mode.bad_passes, strict=True) if term is not None and bad}
    return found


def _good_gradients(program: Program, cut: frozenset[Operand], calls: int) -> Grads | None:
    """Return the gradients of the step without some terms; nothing where they are no good."""
    mode = Sums(program.leaves, cut, apart=False)
    run, grads = _play(program, mode)
    known = [grad for grad in grads if grad is not None]
    losses = [float(t.detach().float().sum()) for t in run.losses]
    sound = run.error is None and bool(losses) and all(map(math.isfinite, losses)) and not any(damage_of(grad) for grad in known)
    return grads if sound and mode.count == calls and any(bool(grad.to_dense().any()) for grad in known) else None


def _words(terms: list[_Known]) -> str:
    """Say which terms were left out, where, and why."""
    names = list(dict.fromkeys(term.name for term in terms))
    spans = [resolve(term.site) for term in terms]
    lines = list(dict.fromkeys(f"{span.file}:{span.line}" for span in spans if span.known))
    place = f" ({', '.join(lines[:LISTED])})" if lines else ""
    shown = ", ".join(names[:LISTED]) + (" …" if len(names) > LISTED else "")
    reason = "alone, each has a gradient that is not finite" if len(names) > 1 else "alone, its gradient is not finite"
    if all(term.bad for term in terms):
        reason = "not finite"
    return f"left out of the loss: {shown}{place}; {reason}"

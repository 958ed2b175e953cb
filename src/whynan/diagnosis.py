"""From a symptom to an incident: replay, locate, explain, prove."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch

from whynan.capsule.excerpts import excerpts
from whynan.capsule.replay import Program, Run, is_compiled
from whynan.capsule.sites import Site
from whynan.capsule.tape.nested import tensors_of
from whynan.causes.catalogue import Scene
from whynan.causes.verdict import judge
from whynan.records import NOWHERE, Cause, Confidence, Incident, Origin, Phase, Symptom
from whynan.resting import no_collector
from whynan.trace.birth import Birth
from whynan.trace.jumps import Jump, find_jump
from whynan.trace.lines import Line
from whynan.trace.locate import Targets, graph_of, locate
from whynan.trace.lookups import infinities_read
from whynan.trace.memory import storage_key
from whynan.trace.particulars import particulars
from whynan.tripwire.stillness import Still
from whynan.tripwire.values import damage_of


@dataclass(slots=True)
class Case:
    """Everything the engine knows when it asks for a diagnosis."""

    step: int
    symptom: Symptom
    program: Program
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    optimizer: torch.optim.Optimizer | None = None
    scaler: Any = None
    clip: float | None = None  # the norm that the program clips its gradients to
    history: list[dict[str, float]] = field(default_factory=list)
    site: Site | None = None
    made_at: Site | None = None
    rank: int = 0
    note: str = ""  # what makes every replay of it inexact
    healthy: dict[int, Program] = field(default_factory=dict)  # by step: earlier ones that were finite, the newest first
    still: Still | None = None  # no symptom of damage: the training stands still
    jump: Jump | None = None  # no symptom of damage: a finite number is far outside what it was
    in_data: Line | None = None  # the line of the data set that made a bad sample, once it is known
    loss: float | None = None  # the last one of the step, where the host knows it
    backwards: int = 0  # passes of this step so far, where that is known
    evaluation: int = 0  # which evaluation of its closure a step was at
    failed: str = ""  # why it could not be gathered: there is nothing to diagnose


def diagnose(case: Case) -> Incident:
    """Find where the damage was born, explain it and try the remedies on the replay."""
    targets = _targets(case)
    with no_collector():  # it would go through all the objects of the program for what the replays make
        birth, trouble = _find(case, targets)
        if birth is not None and (behind := _hung(case.program, birth)) is not None:
            case.program, targets = behind
            birth, trouble = _find(case, targets)
        if birth is not None and (weights := _never_harmless(case, birth)):
            birth, trouble = _as_damage(case, targets, weights, birth), trouble
        return _verdict(case, targets, birth, trouble)


def diagnose_spike(case: Case, jump: Jump) -> Incident | None:
    """Find the place where a finite step became absurd, and prove it; nothing where no single place is to blame."""
    targets = _targets(case)
    try:
        found = find_jump(case.program, case.healthy.values(), targets, jump)
    except MemoryError:
        return None
    if found is None:
        return None
    case.jump = found[1]
    incident = _verdict(case, targets, found[0], "")
    known = incident.origin.span.known and incident.origin.exact
    return incident if known and incident.cause.confidence is Confidence.PROVEN else None


def _verdict(case: Case, targets: Targets, birth: Birth | None, trouble: str) -> Incident:
    scene = Scene(
        step=case.step,
        symptom=case.symptom,
        birth=birth,
        program=case.program,
        targets=targets,
        optimizers=case.optimizers,
        optimizer=case.optimizer,
        scaler=case.scaler,
        clip=case.clip,
        history=case.history,
        site=case.site,
        compiled=any(is_compiled(e.fn) for e in case.program.entries),
        trouble=trouble or case.note or case.program.inexact(),
        made_at=case.made_at,
        healthy=case.healthy,
        still=case.still,
        jump=case.jump,
        in_data=case.in_data,
        loss=case.loss,
        backwards=case.backwards,
        evaluation=case.evaluation,
    )
    origin, cause, remedies, experiments = judge(scene)
    case.in_data = scene.in_data
    return Incident(
        step=case.step,
        rank=case.rank,
        time=_now(),
        symptom=case.symptom,
        origin=origin,
        cause=cause,
        remedies=tuple(remedies),
        experiments=tuple(experiments),
        source=excerpts([origin.span, *origin.from_]),
        terms=tuple(term.value for term in scene.terms),
        inside=tuple(scene.birth.inside) if scene.birth is not None else (),
        **particulars(scene.birth, case.symptom, origin),
    )


def unexplained(step: int, rank: int, symptom: Symptom, why: str) -> Incident:
    """Return what is known of a bad step whose diagnosis failed, without asking the step anything."""
    places = {"optimizer state": Phase.OPTIMIZER, "scaler": Phase.OPTIMIZER, "parameter": Phase.PARAMETER}
    origin = Origin(places.get(symptom.place, Phase.FORWARD), NOWHERE, exact=False, note=why)
    said = (f"not seen: {why}", "this is a fault of whynan, please report it; what is done about the step does not depend on it")
    cause = Cause("WN901", "origin-not-observed", "damage whose birth was not seen", Confidence.SUSPECTED, said, "the place is not known")
    return Incident(step, rank, _now(), symptom, origin, cause)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _find(case: Case, targets: Targets) -> tuple[Birth | None, str]:
    """Locate the birth; where memory runs out, once more without the autograd graph if a bad loss is all there is to find."""
    if case.still is not None:
        return None, ""
    program = _shortest(case)
    tries = [program, program.frugal()] if program.skip_backward else [program]
    for attempt in tries:
        try:
            return _in_update(case, locate(attempt, targets, _state_roles(case), _suspects(case))), ""
        except MemoryError:
            pass
        gc.collect()  # what filled the memory is held by the frames of the failed replay
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    return None, "there was too little memory to replay the step"


def _hung(program: Program, birth: Birth) -> tuple[Program, Targets] | None:
    """For a bad tensor that hooks of a backward pass have hung on the weights (gradients of each sample): the step up to that pass, and what they hang."""
    leaf = birth.leaf
    if leaf is None or leaf.role != "input" or not 0 <= leaf.first_use < len(birth.graph.ops):
        return None
    used, key = birth.graph.ops[leaf.first_use].entry, storage_key(leaf.tensor)
    passes = [e.number for e in program.entries if e.kind == "backward" and e.number < used]
    held = [(name, t) for p in program.leaves for name, value in vars(p).items() for t in tensors_of(value)]
    names = {name for name, t in held if storage_key(t) == key}
    if not passes or not names:
        return None
    before = {id(t): t for _, t in held}  # kept: another tensor could get the number of one that is gone

    def hung(run: Run) -> list[torch.Tensor]:
        return [t for p in program.leaves for name in names for t in tensors_of(vars(p).get(name)) if id(t) not in before]

    return Program(program.recorder, [e for e in program.entries if e.number <= passes[-1]], program.leaves), hung


def _never_harmless(case: Case, birth: Birth) -> list[torch.Tensor]:
    """Return the weights with infinities, taken for meant, that this step reads and no healthy one that was kept has read: a row that is looked up late.

    Cost: where there are such weights, one replay for each kept step.
    """
    meant = case.program.recorder.beside.infinities
    found = [weight for weight in meant.unchanged() if infinities_read(birth.graph, weight)]
    if not found or not case.healthy:
        return []
    try:
        graphs = [graph_of(program) for program in case.healthy.values()]
    except MemoryError:
        return []
    return [weight for weight in found if not any(infinities_read(graph, weight) for graph in graphs)]


def _as_damage(case: Case, targets: Targets, weights: list[torch.Tensor], birth: Birth) -> Birth:
    """Locate once more with the infinities of some weights taken for damage; where these are not what the step died of, they are meant again."""
    meant = case.program.recorder.beside.infinities
    for weight in weights:
        meant.forget(weight)
    found, _ = _find(case, targets)
    keys = {storage_key(weight) for weight in weights}
    if found is not None and found.leaf is not None and storage_key(found.leaf.tensor) in keys:
        return found
    for weight in weights:
        meant.note(weight)
    return birth


def _in_update(case: Case, birth: Birth | None) -> Birth | None:
    """What a program without optimizers computes behind its backward pass is its update."""
    program = case.program
    if birth is not None and birth.op is not None and case.symptom.place == "parameter" and program.ends_with_update:
        last = max(e.number for e in program.entries if e.kind in ("backward", "derivative"))
        birth.phase = Phase.OPTIMIZER if birth.op.entry > last else birth.phase
    return birth


def _targets(case: Case) -> Targets:
    program, place = case.program, case.symptom.place

    def newest(run: Run) -> list[torch.Tensor]:
        last = program.entries[-1].number if program.entries else -1
        return [t for ref, t in run.made.items() if ref.entry == last]

    def losses(run: Run) -> list[torch.Tensor]:
        return run.losses or newest(run)

    def gradients(run: Run) -> list[torch.Tensor]:
        derived = {e.number for e in program.entries if e.kind == "derivative"}
        made = [p.grad for p in program.leaves if p.grad is not None]
        return made + [t for ref, t in run.made.items() if ref.entry in derived]

    def buffers(run: Run) -> list[torch.Tensor]:
        return [b for root in program.roots for b in root.buffers()]

    def updated(run: Run) -> list[torch.Tensor]:
        state = [v for o in case.optimizers for s in o.state.values() if isinstance(s, dict) for v in s.values()]
        return list(program.leaves) + [v for v in state if isinstance(v, torch.Tensor)]

    def before(run: Run) -> list[torch.Tensor]:
        return losses(run) + gradients(run)

    chosen: dict[str, Callable[[Run], list[torch.Tensor]]] = {
        "loss": losses,
        "gradient": gradients,
        "scaler": gradients,
        "buffer": buffers,
        "parameter": updated if any(e.kind == "optimizer" for e in program.entries) else newest if program.ends_with_update else before,
        "optimizer state": before,
        "exception": losses,
        "training": losses,
    }
    return chosen[place]


def _shortest(case: Case) -> Program:
    """A bad loss is found in the forward pass alone."""
    program = case.program
    ends = [e for e in program.entries if e.kind == "backward"]
    if case.symptom.place != "loss" or not ends or any(e.kind in ("function", "optimizer") for e in program.entries):
        return program
    return program.until_loss()


def _suspects(case: Case) -> frozenset[int]:
    """The weights that are known to be bad before the step."""
    if case.symptom.place != "parameter":
        return frozenset()
    weights = [p for root in case.program.roots for p in root.parameters()]
    meant = case.program.recorder.beside.infinities
    return frozenset(storage_key(p) for p in weights if damage_of(p.detach()) and not meant.are_known(p))


def _state_roles(case: Case) -> dict[int, tuple[str, str]]:
    """Name gradients and optimizer state, for births inside an optimizer's own arithmetic."""
    roles: dict[int, tuple[str, str]] = {}
    if not any(e.kind == "optimizer" for e in case.program.entries):
        return roles
    for optimizer in case.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    roles[storage_key(parameter.grad)] = ("gradient", "")
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        roles[storage_key(value)] = ("state", str(key))
    return roles

"""Try the remedies of a finding on the replay: each as far as it fits the source, judged by more than finiteness."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from whynan.capsule.replay import Program
from whynan.capsule.sites import Site, resolve
from whynan.causes import exponentials, rejoined
from whynan.causes.catalogue import Finding, Scene, forgiven
from whynan.causes.diffs import joined
from whynan.causes.facts import ELEMENTWISE, as_view, leads_to, lineage, without_zeros
from whynan.causes.fixes import LOG_OF_EXP, Fix, guarded, source_name
from whynan.causes.lab import NO_MEMORY, TOLERANCE, Lab, Outcome
from whynan.causes.lasting import BOUND, kept_in_weights
from whynan.causes.objections import hides_all, quotients_moved, rewarded_by, starved_by, unlike_wide, wrong_slope
from whynan.causes.onward import onward
from whynan.causes.source import Change, Expression, expression_at, sites_of_node
from whynan.causes.stopped import Stopped
from whynan.causes.swapping import Put
from whynan.records import FAR_OFF, Phase, Remedy, number

TRIES = 4
_MISFITS = tuple(f"the replay raised {kind}" for kind in ("ValueError", "TypeError", "AttributeError", "IndexError"))  # the trial was no change of this program
_CHOOSE = ("max", "min", "argmax", "argmin", "topk", "sort", "argsort")  # they say which is best
_DECIDE = Remedy("say in the program what counts where everything is ruled out, before anything is chosen there")


@dataclass(slots=True)
class Trial:
    """A remedy as it can be played: this step with it, or another one."""

    play: Callable[[Program | None], Outcome]
    put: Put | None = None  # what it puts in the place of torch's functions, where it is nothing else
    written: tuple[Expression, Change] | None = None
    tolerance: float = TOLERANCE  # by how much the loss of a healthy step may move
    far: rejoined.Rejoined | None = None  # a change that is not at the line of the birth: its places are named
    stopped: list[Stopped] = field(default_factory=list)  # filled by playing
    vary: Callable[[Fix], Put] | None = None  # the same with another number

    @property
    def diff(self) -> str:
        """The change as text; nothing where it cannot be written so that it runs. Cost: the file is compiled."""
        return joined([self.written]) if self.written is not None else ""


def remedies_of(scene: Scene, finding: Finding, expression: Expression | None, site: Site | None) -> list[Remedy]:
    """Try the fixes of a finding, until one is proven that keeps the gradient alive; the best first."""
    tried: list[Remedy] = []
    expression = read_again(scene, expression)
    for fix in finding.fixes:
        if sum(r.result != "not tried" for r in tried) >= TRIES:
            break
        if any(r.result == "proven" for r in tried) and not fix.template:
            tried.append(Remedy(fix.title))
            continue
        remedy = Remedy(fix.title, "", fix.safe, effect="the trial of it failed, by a fault of whynan")
        with forgiven(scene, f"the change `{fix.title}`"):
            remedy = _attempt(scene, finding, fix, expression, site)
        if fix.template and remedy.result == "not tried" and not remedy.effect:
            continue  # it does not fit this source
        if fix.limit and (remedy.result != "proven" or not _same_with(scene, fix, fix.limit, expression, site)):
            continue
        if fix.choice and remedy.result == "proven" and not _same_with(scene, fix, fix.choice, expression, site):
            remedy = _as_a_choice(scene, finding, remedy)
            tried += [_DECIDE] if remedy.result == "not proven" and _DECIDE not in tried else []
        tried.append(remedy)
        if remedy.result == "proven" and remedy.alive:
            break
    exact = next((r for r in tried if r.safe and r.result == "failed" and r.effect.startswith(FAR_OFF)), None)
    if exact is not None:  # so large is the loss: what cuts the gradient off hides that
        hides = f"it only hides how far off this step is: by the same formula without rounding, {exact.effect.partition(': ')[2]}"
        tried = [replace(r, result="failed", effect=hides) if r.result == "proven" and not r.alive else r for r in tried]
    order = {"proven": 0, "not tried": 1, "not proven": 2, "failed": 3}
    return sorted(tried, key=lambda r: (order[r.result], not r.alive, not r.diff))


def _as_a_choice(scene: Scene, finding: Finding, remedy: Remedy) -> Remedy:
    """Say of a number put where none follows that it is a choice; where it decides what is best it is not proven at all, though it makes the step finite."""
    birth = scene.birth
    chooser = leads_to(birth, birth.view, _CHOOSE) if birth is not None and birth.view is not None else None
    if chooser is None:
        return replace(remedy, effect=f"{remedy.effect}; that this number is meant there is not proven: with another the loss is another")
    finding.proven = True  # of this step it was the cause
    line = resolve(chooser.site).line
    where = f"{chooser.name} at line {line}" if line else chooser.name
    return replace(remedy, result="not proven", effect=f"{remedy.effect}; but {where} then chooses what was ruled out, as if it counted 0")


def _same_with(scene: Scene, fix: Fix, other: str, expression: Expression | None, site: Site | None) -> bool:
    """Whether a step gives the same with another number in a change: so it does not depend on the change at all."""
    trials = [trial_of(scene, replace(fix, template=text), expression, site) for text in (fix.template, other)]
    outcomes = [trial.play(None) for trial in trials if trial is not None]
    return len(outcomes) == 2 and _alike([o.loss for o in outcomes]) and (outcomes[0].norm is None or _alike([o.norm for o in outcomes]))


def _alike(numbers: list[float | None]) -> bool:
    first, second = numbers
    return first is not None and second is not None and math.isclose(first, second, rel_tol=TOLERANCE)


def tempting(scene: Scene, finding: Finding, expression: Expression | None, site: Site | None) -> list[str]:
    """Try the changes that people reach for and that are wrong; say what is wrong with them, by this step."""
    expression = read_again(scene, expression)
    wrong = finding.wrong if scene.lab is not None and scene.lab.quick else []
    here = replace(scene, optimizers=[], optimizer=None)  # no updates further on: they are wrong in this step
    tried = [_attempt(here, replace(finding, empty=False), fix, expression, site) for fix in wrong]
    words = {"failed": "does not help", "proven": "only hides it"}
    fitting = [remedy for remedy in tried if remedy.result in words and not remedy.effect.startswith(_MISFITS)]
    return [f"{words[remedy.result]}: {remedy.title}: {remedy.effect}" for remedy in fitting]


def _attempt(scene: Scene, finding: Finding, fix: Fix, expression: Expression | None, site: Site | None) -> Remedy:
    if fix.leave_out:
        gave = next((e.answer for e in scene.experiments if "without samples" in e.question), "")
        good = bool(gave) and "still" not in gave
        return Remedy(fix.title, "", True, "proven" if good else "not tried", f"without these samples: {gave}" if good else "")
    trial = trial_of(scene, fix, expression, site)
    if trial is None:
        return Remedy(fix.title, "", fix.safe)
    if scene.birth is not None and scene.birth.by_number:
        return Remedy(fix.title, trial.diff, fix.safe, effect="the value goes on as a number in Python, which is not run again")
    return judged(scene, finding, fix, trial)


# -- a fix as a trial -------------------------------------------------------------------------------------------------


def trial_of(scene: Scene, fix: Fix, expression: Expression | None, site: Site | None) -> Trial | None:
    """Return what is to be played for a fix, or None where it is advice only or does not fit the source."""
    lab = scene.lab
    assert lab is not None
    if fix.site is not None:
        return _at(scene, fix, fix.site)
    if not fix.template or expression is None:
        return None
    if fix.inner in exponentials.KINDS:
        return _around(lab, fix, expression, site)
    if fix.inner == "bfloat16":  # it rounds more, so healthy losses may move a little
        return Trial(lab.in_bfloat16, tolerance=5 * TOLERANCE)
    if fix.inner in rejoined.KINDS:
        trial = _putting(lab, Put(far := rejoined.Rejoined(fix.inner), None))
        trial.far = far
        return trial
    return _in_place(scene, fix, expression, site)


def _putting(lab: Lab, put: Put, expression: Expression | None = None, change: Change | None = None, stopped: list[Stopped] | None = None) -> Trial:
    """Make a trial of another computation in the place of a function, and the text of it where there is one."""
    written = (expression, change) if expression is not None and change is not None else None
    return Trial(lambda program: lab.run(put, program=program), put, written, stopped=[] if stopped is None else stopped)


def read_again(scene: Scene, expression: Expression | None) -> Expression | None:
    """Read an expression with what the trace saw called at each place of its function."""
    if expression is None or scene.birth is None:
        return expression
    calls: dict[Site, list[str]] = {}
    for op in scene.birth.graph.ops:
        if op.site is not None and not op.backward:
            calls.setdefault(op.site, []).append(op.call)
    return expression.with_calls(lambda site: calls.get(site, []))


def _read_at(scene: Scene, site: Site | None) -> Expression | None:
    return read_again(scene, expression_at(site, resolve(site).file)) if site is not None else None


def _at(scene: Scene, fix: Fix, site: Site) -> Trial | None:
    """A change at another line than the birth's: where the mask was decided, where a value was made."""
    assert scene.lab is not None
    expression = _read_at(scene, site)
    if expression is None or not expression.operands:
        return None
    name = source_name(expression.name)
    put = Put(fix.swap(expression, name), frozenset([site]), name)
    return _putting(scene.lab, put, expression, fix.text(expression))


def _around(lab: Lab, fix: Fix, expression: Expression, site: Site | None) -> Trial | None:
    """A change that replaces the expression around the birth: a softmax written by hand, and its like."""
    found = exponentials.around(expression, fix.inner)
    outer = sites_of_node(site, found[0]) if found is not None and site is not None else frozenset()
    if found is None or not outer:
        return None
    return _putting(lab, Put(exponentials.swap(fix.inner), outer), expression, found if found[1] else None)


def _in_place(scene: Scene, fix: Fix, expression: Expression, site: Site | None) -> Trial | None:
    """A change of the operation itself or of one of its operands."""
    assert scene.lab is not None
    runtime = _runtime_name(scene, expression)
    if runtime != source_name(expression.name):
        expression = expression.as_plain_call()
    if not _fits(scene, fix, runtime):
        return None
    change = fix.text(expression) if _handed_through(scene, fix, expression, runtime) else None
    stopped: list[Stopped] = []
    sites = frozenset([site]) if site is not None else frozenset()
    made = _putting(scene.lab, Put(fix.swap(expression, runtime, stopped), sites, runtime), expression, change, stopped=stopped)
    made.vary = lambda other: Put(other.swap(expression, runtime), sites, runtime)
    return made


# -- what a trial gave ------------------------------------------------------------------------------------------------


def judged(scene: Scene, finding: Finding, fix: Fix, trial: Trial) -> Remedy:
    """Play a trial; judge it by finiteness, by the step in float64 and by the healthy steps before."""
    lab = scene.lab
    assert lab is not None
    _widen(scene)
    if moved := quotients_moved(scene, fix):
        return Remedy(fix.title, trial.diff, fix.safe, "failed", moved)
    try:
        outcome = trial.play(None)
    except Exception as error:
        return Remedy(fix.title, "", fix.safe, "failed", f"{type(error).__name__}: {error}")
    if outcome is NO_MEMORY:
        return Remedy(fix.title, trial.diff, fix.safe, "not tried", "there was too little memory for another replay")
    if not lab.hit:
        return Remedy(fix.title, "", fix.safe)
    now = len(trial.stopped)  # what follows is of healthy steps
    stopped, diff = max(trial.stopped, default=Stopped()), trial.diff
    title = _placed(fix.title, lab.places) if trial.far else fix.title
    if trial.far and not diff:
        diff = joined(trial.far.written([_read_at(scene, site) for site in lab.places]))
    same = _finite_loss(scene) if trial.tolerance == TOLERANCE else None
    if outcome.error and scene.symptom.place != "exception" and lab.run().error == outcome.error:
        return Remedy(title, diff, fix.safe, "not tried", f"the step cannot be replayed to its end: {outcome.error}")
    good, words = lab.judge(outcome, finding.empty, same, low=fix.safe or _fell(scene), bound=fix.operand is not None and not fix.safe)
    if outcome.error and ".float()" in fix.template and re.search("dtype|scalar type", outcome.error):
        words = f"an operation after it then gets float32 beside float16 and refuses that: these have to be widened too ({outcome.error})"
    if good:
        good, more = lab.weigh(outcome, trial.play, trial.tolerance, _has_an_edge(scene))
        words = f"{words}; {more}" if good and more else more or words
    if good and (wrong := wrong_slope(scene, lab, trial.put) or unlike_wide(lab, fix, outcome)):
        good, words = False, wrong
    if good and (silent := stopped.words()):
        good, words = False, silent
    if good and (stays := _stays(scene, lab, fix, trial)):
        good, words = False, stays
    if good and not lab.is_true(outcome) and (starved := starved_by(trial.stopped[:now], trial.stopped[now:])):
        good, words = False, f"{starved} ({outcome.effect()})"
        finding.proven = True  # of this step it was the cause
    if good and not finding.empty and not lab.is_true(outcome) and (hidden := hides_all(scene, trial.put, trial.stopped)):
        good, words = False, f"{hidden} ({outcome.effect()})"
        finding.proven = True  # of this step it was the cause
    if good and (paid := rewarded_by(scene, trial.stopped)):
        good, words = False, f"{paid} ({outcome.effect()})"
    exact = lab.is_true(outcome)  # where that leads is not the change's doing
    walk = onward(scene, trial.put, trial.stopped) if good and trial.put is not None and not exact else None
    if walk is not None:
        good, words = (False, wrong) if (wrong := walk.objection()) else (True, f"{words}; {walk.words()}")
        finding.proven |= not good  # of this step it was the cause
        scene.drifts |= not good and bool(stopped.dead)
    scene.tried(fix.title, words)
    if stopped.dead and good:
        words += f"; no gradient passes through {stopped.dead} of {stopped.among} elements there"
    if good and not lab.cut and scene.birth is not None and scene.birth.phase is Phase.OPTIMIZER:
        words += "; the update is finite"
    if good and not diff:
        title, words = title + _made_at(scene, fix), f"with that: {words}"
    return Remedy(title, diff, fix.safe, "proven" if good else "failed", words, alive=not stopped.dead, only=_beyond(scene, fix, words) if good else "")


def _stays(scene: Scene, lab: Lab, fix: Fix, trial: Trial) -> str:
    """Say what is wrong with a bound under an operation without a gradient, whose result may be set into a weight."""
    view = scene.birth.forward if scene.birth is not None else None
    if view is None or view.op.node >= 0 or trial.put is None or trial.vary is None:
        return ""
    return kept_in_weights(lab, fix, trial.put, trial.vary)


def _beyond(scene: Scene, fix: Fix, words: str) -> str:
    """Say past which number alone a bound acts, where the healthy steps kept their loss with it; and from how far off it takes this one there."""
    found = BOUND.fullmatch(fix.template) if fix.operand is not None and "same loss on the kept" in words else None
    if found is None or found["top"]:
        return "" if found is None else f"above {found['top']}"
    view = scene.birth.forward if scene.birth is not None else None
    held = view.input(fix.operand or 0) if view is not None and fix.site is None else None
    finite = held[held.isfinite()] if held is not None and held.is_floating_point() else None
    lowest = float(finite.min()) if finite is not None and finite.numel() else 0.0
    return f"below {found['low']}" + (f": here {number(lowest)} becomes {found['low']}" if lowest < 0 else "")


def _made_at(scene: Scene, fix: Fix) -> str:
    """Say where that is made which a change needs and which is not at hand at its place: the argument of a sigmoid inside a module."""
    view = scene.birth.forward if scene.birth is not None else None
    if view is not None and fix is LOG_OF_EXP and view.name != "exp":
        makers = lineage(view, ELEMENTWISE | {"sum", "mean", "prod"}, depth=8)
        lines = sorted({place.line for made in makers if made.name == "exp" and (place := resolve(made.site)).known})
        return f", from the exponents at line{'s' * (len(lines) > 1)} {' and '.join(map(str, lines))}" if lines else ""
    made = as_view(without_zeros(view.maker(0))) if view is not None and fix.inner in ("sigmoid", "softmax") else None
    if made is None or made.name.strip("_") != fix.inner:
        return ""
    place, module = resolve(made.site), f"`{made.op.module}`" if made.op.in_module and made.op.module else f"the {fix.inner}"
    return f", from what goes into {module}" + (f" at line {place.line}" if place.known else "")


def _placed(title: str, sites: list[Site | None]) -> str:
    """Name all the places of a change, each once."""
    lines = list(dict.fromkeys(str(place.line) for place in map(resolve, sites) if place.known))
    return f"{title} (line{'s' * (len(lines) > 1)} {' and '.join(lines)})" if lines else title


def _widen(scene: Scene) -> None:
    """Play the step in float64 before the first remedy is tried, and write down what that gave."""
    lab = scene.lab
    assert lab is not None
    if lab.wide is None and (outcome := lab.widen()) is not None:
        scene.tried("the step as it is, in float64", outcome.effect() if outcome.finite else "not finite either")


def _has_an_edge(scene: Scene) -> bool:
    """Whether the birth is of an operation that is not defined, or has no slope, beyond some argument."""
    view = scene.birth.forward if scene.birth is not None else None
    return view is not None and bool(guarded(view.name, view.op.dtype))


def _finite_loss(scene: Scene) -> float | None:
    """The loss of the failing step where it was finite: a remedy for its gradient must not change it."""
    losses = scene.birth.losses if scene.birth is not None and scene.symptom.place == "gradient" and scene.jump is None else []
    scale = scene.lab.scale if scene.lab is not None else 1.0
    return losses[-1] / scale if losses and math.isfinite(losses[-1]) else None


def _fell(scene: Scene) -> bool:
    """Whether the loss was -inf: it is low by the program's own mathematics, not by a remedy."""
    return scene.birth is not None and scene.birth.losses[-1:] == [-math.inf]


def _fits(scene: Scene, fix: Fix, runtime: str) -> bool:
    """A change written for an elementary operation says nothing of a function that contains one (a cosine is no quotient)."""
    view = scene.birth.forward if scene.birth is not None else None
    written_for_it = fix.keyword or fix.inner or "{rest}" in fix.template
    if view is None or written_for_it or not guarded(view.name, "float32"):
        return True
    names = ("div" if view.name == "reciprocal" else "", source_name(view.name), "")
    return runtime in names or not view.op.call or source_name(view.op.call.rsplit(".", 1)[-1]) != runtime


def _handed_through(scene: Scene, fix: Fix, expression: Expression, runtime: str) -> bool:
    """Whether the arguments in the source are those of the function that ran: torch's own modules hand them on, other code may not."""
    if fix.keyword or fix.inner or (runtime == source_name(expression.name) and not expression.calls_object()):
        return True
    made = expression.construction()
    if made is not None:
        return made[1].__name__.lower().startswith(runtime.replace("_", ""))
    view = scene.birth.forward if scene.birth is not None else None
    if view is None or not view.op.in_module or scene.birth is None:
        return False
    if len({op.module for op in scene.birth.graph.ops if op.site == view.site and not op.backward}) > 1:
        return False  # a module of several: what it is given is not what this one of them was given
    running = [m for root in scene.program.roots for name, m in root.named_modules() if name == view.op.module]
    return any(type(m).__module__.startswith("torch.nn.") for m in running)


def _runtime_name(scene: Scene, expression: Expression) -> str:
    """A module call in the source (`self.attn(…)`) runs a function of another name."""
    name = source_name(expression.name)
    birth = scene.birth
    forward = birth.forward if birth is not None else None
    if forward is None or not isinstance(expression.node, ast.Call):
        return name
    called = source_name(forward.call.rsplit(".", 1)[-1].removeprefix("linalg_").removeprefix("special_"))
    return called if called and called not in ("backward", "grad") else name

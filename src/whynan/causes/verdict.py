"""Put a verdict together: the rule that fits, the remedies tried on the replay, the samples checked, the values shown."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from whynan.capsule.replay import Program
from whynan.capsule.sites import Site, resolve
from whynan.capsule.tape import Outside
from whynan.causes import patterns
from whynan.causes.catalogue import Finding, Rule, Scene, first_match
from whynan.causes.fixes import Fix, guarded, source_name
from whynan.causes.handed import hook_words, sample_words
from whynan.causes.lab import NO_MEMORY, TOLERANCE, Lab, Outcome, without_rows
from whynan.causes.several import Verdict, decide
from whynan.causes.source import Expression, expression_at, sites_of_node
from whynan.records import NOWHERE, Cause, Confidence, Experiment, Origin, Phase, Remedy, TensorStats
from whynan.trace.birth import View
from whynan.tripwire.values import bad_rows, stats

TRIES = 4


def judge(scene: Scene) -> tuple[Origin, Cause, list[Remedy], list[Experiment]]:
    """Explain a birth and prove the explanation as far as the replay allows."""
    scene.lab = Lab(scene.program, scene.targets, scene.history, scene.scaler, scene.healthy)
    verdict = decide(_explain(scene), _explain)
    chosen, finding = verdict.rule, verdict.finding
    scene.birth = verdict.scene.birth  # what is told beside the verdict is about the same birth
    cause = Cause(
        chosen.code,
        chosen.slug,
        chosen.title,
        Confidence.PROVEN if verdict.proven else Confidence.SUSPECTED,
        tuple(e for e in [*finding.evidence, *sample_words(scene.program, verdict.samples), *hook_words(scene.program)] if e),
        finding.label,
    )
    return _origin(verdict.scene, chosen, finding, verdict.expression, verdict.samples), cause, verdict.remedies, scene.experiments


def _explain(scene: Scene) -> Verdict:
    """Find the rule that fits a birth, and try its remedies."""
    chosen, finding = first_match(scene)
    birth = scene.birth
    site = finding.site or (birth.site if birth is not None else None)
    expression = expression_at(site, resolve(site).file) if site is not None else None
    samples = _samples(scene, finding)
    remedies = finding.remedies + _remedies(scene, finding, expression, site)
    finding.evidence += _tempting(scene, finding, expression, site)
    return Verdict(scene, chosen, finding, site, expression, samples, remedies)


def _origin(scene: Scene, chosen: Rule, finding: Finding, expression: Expression | None, samples: list[int]) -> Origin:
    birth = scene.birth
    site = finding.site or (birth.site if birth is not None else None)
    span = resolve(site) if site is not None else NOWHERE
    if birth is None:
        places = {"optimizer state": Phase.OPTIMIZER, "scaler": Phase.OPTIMIZER, "parameter": Phase.PARAMETER}
        phase = finding.phase or places.get(scene.symptom.place, Phase.FORWARD)
        known = span.known or chosen.code in ("WN803", "WN601", "WN603", "WN608")
        return Origin(phase, span, exact=known, note="" if known else scene.trouble)
    phase = birth.phase
    if finding.backward:
        phase = Phase.BACKWARD
    elif chosen.code == "WN703":
        phase = Phase.INPUT
    elif finding.site is not None and chosen.code.startswith("WN60"):
        phase = Phase.OPTIMIZER
    inputs, output = _values(scene, expression)
    op = birth.op
    module = ""
    if op is not None:
        forward = birth.forward
        module = forward.op.module if forward is not None else op.module
    return Origin(phase, span, module, op.name if op is not None else "", birth.exact, birth.note, tuple(inputs), output, tuple(samples), tuple(finding.spans))


def _values(scene: Scene, expression: Expression | None) -> tuple[list[TensorStats], TensorStats | None]:
    birth = scene.birth
    assert birth is not None
    if birth.leaf is not None:
        shown = birth.handed_in() if birth.phase is Phase.INPUT else birth.leaf.tensor.detach()
        return [stats(birth.leaf.name or birth.leaf.role, shown)], None
    view = birth.forward
    if view is None:
        return [], None
    names = _names(view, expression)
    rows = [stats(names.get(name, name), tensor) for name, tensor in list(view.inputs().items())[:4]]
    output = view.output()
    return rows, stats("result", output) if output is not None else None


def _names(view: View, expression: Expression | None) -> dict[str, str]:
    """Call an operation's arguments what the source calls them, where the two fit together."""
    if expression is None or not expression.operands or source_name(expression.name) != view.name.strip("_"):
        return {}
    kept = [s.name for s in view.op.sources]
    texts = expression.operands
    if len(kept) == 1 and len(texts) == 2 and not _looks_numeric(texts[1]) and _looks_numeric(texts[0]):
        texts = texts[1:]
    return {name: " ".join(text.split()) for name, text in zip(kept, texts, strict=False) if len(text) < 60}


def _looks_numeric(text: str) -> bool:
    return text.replace(".", "").replace("-", "").replace("e", "").strip("() ").isdigit()


def _remedies(scene: Scene, finding: Finding, expression: Expression | None, site: Site | None) -> list[Remedy]:
    tried: list[Remedy] = []
    for fix in finding.fixes:
        if sum(r.result != "not tried" for r in tried) >= TRIES:
            break
        if any(r.result == "proven" for r in tried) and not fix.template:
            tried.append(Remedy(fix.title))
            continue
        remedy = _try(scene, finding, fix, expression, site)
        if fix.template and remedy.result == "not tried" and not remedy.effect:
            continue  # it does not fit this source
        tried.append(remedy)
        if remedy.result == "proven" and remedy.alive:
            break
    order = {"proven": 0, "not tried": 1, "failed": 2}
    return sorted(tried, key=lambda r: (order[r.result], not r.alive, not r.diff))


def _tempting(scene: Scene, finding: Finding, expression: Expression | None, site: Site | None) -> list[str]:
    """Try the changes that people reach for and that are wrong; say what is wrong with them, by this step."""
    wrong = finding.wrong if scene.lab is not None and scene.lab.quick else []
    tried = [_try(scene, replace(finding, empty=False), fix, expression, site) for fix in wrong]
    words = {"failed": "does not help", "proven": "only hides it"}
    return [f"{words[remedy.result]}: {remedy.title}: {remedy.effect}" for remedy in tried if remedy.result in words]


def _try(scene: Scene, finding: Finding, fix: Fix, expression: Expression | None, site: Site | None) -> Remedy:
    lab = scene.lab
    assert lab is not None
    if fix.leave_out:
        gave = next((e.answer for e in scene.experiments if "without samples" in e.question), "")
        good = bool(gave) and "still" not in gave
        return Remedy(fix.title, "", True, "proven" if good else "not tried", f"without these samples: {gave}" if good else "")
    if fix.site is not None:
        return _try_at(scene, finding, fix)
    if not fix.template or expression is None:
        return Remedy(fix.title, "", fix.safe)
    if fix.inner in patterns.OUTER:
        return _try_around(scene, finding, fix, expression, site)
    if fix.inner == "bfloat16":
        return _try_bfloat16(scene, finding, fix)
    if fix.inner in patterns.ELSEWHERE:
        return _try_elsewhere(scene, finding, fix)
    runtime = _runtime_name(scene, fix, expression)
    if runtime != source_name(expression.name):
        expression = expression.as_plain_call()
    if not _fits(scene, fix, runtime):
        return Remedy(fix.title, "", fix.safe)
    change = fix.text(expression) if _handed_through(scene, fix, expression, runtime) else None
    diff = expression.diff(*change) if change is not None else ""
    _widen(scene)
    stopped: list[tuple[int, int]] = []
    swap, sites = fix.swap(expression, runtime, stopped), frozenset([site]) if site is not None else frozenset()
    try:
        outcome = lab.run(swap, sites)
    except Exception as error:
        return Remedy(fix.title, "", fix.safe, "failed", f"{type(error).__name__}: {error}")
    if outcome is NO_MEMORY:
        return Remedy(fix.title, diff, fix.safe, "not tried", "there was too little memory for another replay")
    if not lab.hit:
        return Remedy(fix.title, "", fix.safe)
    dead, among = max(stopped, default=(0, 0))
    good, words = lab.judge(outcome, finding.empty, _finite_loss(scene))
    if good:
        good, words = _weighed(lab, outcome, lambda program: lab.run(swap, sites, program=program), words)
    scene.tried(fix.title, words)
    if not good and scene.symptom.place == "exception" and not outcome.error:
        good = outcome.finite
    if dead and good:
        words += f"; no gradient passes through {dead} of {among} elements there"
    return Remedy(fix.title, diff, fix.safe, "proven" if good else "failed", words, alive=not dead)


def _widen(scene: Scene) -> None:
    """Play the step in float64 before the first remedy is tried, and write down what that gave."""
    lab = scene.lab
    assert lab is not None
    if lab.wide is None and (outcome := lab.widen()) is not None:
        scene.tried("the step as it is, in float64", outcome.effect() if outcome.finite else "not finite either")


def _weighed(lab: Lab, outcome: Outcome, again: Callable[[Program], Outcome], words: str, tolerance: float = TOLERANCE) -> tuple[bool, str]:
    """Judge a remedy by more than finiteness."""
    good, more = lab.weigh(outcome, again, tolerance)
    return good, f"{words}; {more}" if good and more else more or words


def _try_at(scene: Scene, finding: Finding, fix: Fix) -> Remedy:
    """Try a change at another line than the birth's: where the mask was decided, where a value was made."""
    lab = scene.lab
    assert lab is not None and fix.site is not None
    expression = expression_at(fix.site, resolve(fix.site).file)
    change = fix.text(expression) if expression is not None else None
    if expression is None or change is None:
        return Remedy(fix.title, "", fix.safe)
    _widen(scene)
    swap, sites = fix.swap(expression, source_name(expression.name)), frozenset([fix.site])
    outcome = lab.run(swap, sites)
    if not lab.hit:
        return Remedy(fix.title, "", fix.safe)
    good, words = lab.judge(outcome, finding.empty, _finite_loss(scene))
    if good:
        good, words = _weighed(lab, outcome, lambda program: lab.run(swap, sites, program=program), words)
    scene.tried(fix.title, words)
    return Remedy(fix.title, expression.diff(*change), fix.safe, "proven" if good else "failed", words)


def _fits(scene: Scene, fix: Fix, runtime: str) -> bool:
    """A change written for an elementary operation says nothing of a function that contains one (a cosine is no quotient)."""
    view = scene.birth.forward if scene.birth is not None else None
    if view is None or fix.keyword or fix.inner or not guarded(view.name, "float32"):
        return True
    names = ("div" if view.name == "reciprocal" else "", source_name(view.name), "")
    return runtime in names or not view.op.call or source_name(view.op.call.rsplit(".", 1)[-1]) != runtime


def _handed_through(scene: Scene, fix: Fix, expression: Expression, runtime: str) -> bool:
    """Whether the arguments in the source are those of the function that ran: torch's own modules hand them on, other code may not."""
    if runtime == source_name(expression.name) or fix.keyword or fix.inner:
        return True
    view = scene.birth.forward if scene.birth is not None else None
    if view is None or not view.op.in_module:
        return False
    running = [m for root in scene.program.roots for name, m in root.named_modules() if name == view.op.module]
    return any(type(m).__module__.startswith("torch.nn.") for m in running)


def _finite_loss(scene: Scene) -> float | None:
    """The loss of the failing step where it was finite: a remedy for its gradient must not change it."""
    losses = scene.birth.losses if scene.birth is not None and scene.symptom.place == "gradient" else []
    scale = scene.lab.scale if scene.lab is not None else 1.0
    return losses[-1] / scale if losses and math.isfinite(losses[-1]) else None


def _try_around(scene: Scene, finding: Finding, fix: Fix, expression: Expression, site: Site | None) -> Remedy:
    """Try a change that replaces the expression around the birth: a softmax written by hand, and its like."""
    lab = scene.lab
    assert lab is not None and site is not None
    found = patterns.around(expression, fix.inner)
    outer = sites_of_node(site, found[0]) if found is not None else frozenset()
    if found is None or not outer:
        return Remedy(fix.title, "", fix.safe)
    _widen(scene)
    swap = patterns.outer_swap(fix.inner)
    outcome = lab.run(swap, outer)
    if not lab.hit:
        return Remedy(fix.title, "", fix.safe)
    good, words = lab.judge(outcome, finding.empty, _finite_loss(scene))
    if good:
        good, words = _weighed(lab, outcome, lambda program: lab.run(swap, outer, program=program), words)
    scene.tried(fix.title, words)
    return Remedy(fix.title, expression.diff(*found), fix.safe, "proven" if good else "failed", words)


def _try_bfloat16(scene: Scene, finding: Finding, fix: Fix) -> Remedy:
    """Try the whole step with bfloat16 in the place of float16; it rounds more, so healthy losses may move a little."""
    lab = scene.lab
    assert lab is not None
    _widen(scene)
    try:
        outcome = lab.in_bfloat16()
    except Exception:  # code that insists on float16
        return Remedy(fix.title, "", fix.safe, "not tried", "it could not be replayed in bfloat16")
    good, words = lab.judge(outcome, finding.empty)
    if good:
        good, words = _weighed(lab, outcome, lab.in_bfloat16, words, 5 * TOLERANCE)
    scene.tried(fix.title, words)
    return Remedy(fix.title, "", fix.safe, "proven" if good else "failed", f"with that: {words}" if good else words)


def _try_elsewhere(scene: Scene, finding: Finding, fix: Fix) -> Remedy:
    """Try a change of two calls that may stand far apart; the remedy names the place of the second."""
    lab = scene.lab
    assert lab is not None
    _widen(scene)
    swap = patterns.elsewhere_swap(fix.inner)
    outcome = lab.run(swap, None)
    if not lab.hit or lab.where is None:
        return Remedy(fix.title, "", fix.safe)
    place = resolve(lab.where)
    good, words = lab.judge(outcome, finding.empty)
    if good:
        good, words = _weighed(lab, outcome, lambda program: lab.run(swap, None, program=program), words)
    scene.tried(fix.title, words)
    title = f"{fix.title} (line {place.line})" if place.known else fix.title
    return Remedy(title, "", fix.safe, "proven" if good else "failed", f"with that: {words}" if good else words)


def _runtime_name(scene: Scene, fix: Fix, expression: Expression) -> str:
    """A module call in the source (`self.attn(…)`) runs a function of another name."""
    name = source_name(expression.name)
    birth = scene.birth
    forward = birth.forward if birth is not None else None
    if forward is None or not isinstance(expression.node, ast.Call):
        return name
    called = source_name(forward.call.rsplit(".", 1)[-1].removeprefix("linalg_").removeprefix("special_"))
    return called if called and called not in ("backward", "grad") else name


def _samples(scene: Scene, finding: Finding) -> list[int]:
    """Return the rows of the batch the damage belongs to, checked by replaying without them."""
    birth, lab = scene.birth, scene.lab
    if birth is None or lab is None or birth.phase is Phase.OPTIMIZER:
        return []
    size = _batch_size(scene)
    rows = finding.rows
    if not rows and birth.op is not None:
        for index in (birth.op.index, birth.forward.op.index if birth.forward is not None else -1):
            output = birth.outputs.get(index)
            if output is not None and output.dim() and output.shape[0] == size:
                rows = bad_rows(output)
                break
    if not rows or not size or len(rows) >= size or max(rows) >= size or finding.among not in (0, size):
        return finding.rows
    try:
        with without_rows(scene.program, rows, size):
            outcome: Outcome = lab.run()
    except Exception:  # a program that cannot do without these rows has its answer elsewhere
        return rows
    if outcome.error:
        return rows
    scene.tried(f"the step without samples {rows[:8]}{' …' if len(rows) > 8 else ''}", outcome.effect() if outcome.finite else "still not finite")
    return rows if outcome.finite or finding.rows else []


def _batch_size(scene: Scene) -> int:
    """The most common first dimension of what was handed in."""
    sizes: dict[int, int] = {}
    for entry in scene.program.entries:
        for leaf in entry.reads:
            tensor: Any = leaf.tensor if isinstance(leaf, Outside) else None
            if tensor is not None and tensor.dim() and not tensor.requires_grad:
                sizes[tensor.shape[0]] = sizes.get(tensor.shape[0], 0) + 1
    return max(sizes, key=lambda s: sizes[s], default=0)

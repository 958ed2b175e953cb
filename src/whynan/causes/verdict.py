"""Put a verdict together: the rule that fits, the remedies tried on the replay, the samples checked, the values shown."""

from __future__ import annotations

import ast
import math
from typing import Any

from whynan.capsule.sites import Site, resolve
from whynan.capsule.tape import Outside
from whynan.causes import patterns
from whynan.causes.catalogue import Finding, Rule, Scene, first_match
from whynan.causes.fixes import Fix, guarded, source_name
from whynan.causes.lab import NO_MEMORY, Lab, Outcome, without_rows
from whynan.causes.several import Verdict, decide
from whynan.causes.source import Expression, expression_at, sites_of_node
from whynan.records import NOWHERE, Cause, Confidence, Experiment, Origin, Phase, Remedy, TensorStats
from whynan.trace.birth import View
from whynan.tripwire.values import bad_rows, stats

TRIES = 4


def judge(scene: Scene) -> tuple[Origin, Cause, list[Remedy], list[Experiment]]:
    """Explain a birth and prove the explanation as far as the replay allows."""
    scene.lab = Lab(scene.program, scene.targets, scene.history)
    verdict = decide(_explain(scene), _explain)
    chosen, finding = verdict.rule, verdict.finding
    cause = Cause(
        chosen.code,
        chosen.slug,
        chosen.title,
        Confidence.PROVEN if verdict.proven else Confidence.SUSPECTED,
        tuple(e for e in finding.evidence if e),
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
    return Verdict(scene, chosen, finding, site, expression, samples, remedies)


def _origin(scene: Scene, chosen: Rule, finding: Finding, expression: Expression | None, samples: list[int]) -> Origin:
    birth = scene.birth
    site = finding.site or (birth.site if birth is not None else None)
    span = resolve(site) if site is not None else NOWHERE
    if birth is None:
        phase = (
            Phase.OPTIMIZER
            if scene.symptom.place in ("optimizer state", "scaler")
            else Phase.PARAMETER
            if scene.symptom.place == "parameter"
            else Phase.FORWARD
        )
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
        if remedy.result == "proven":
            break
    order = {"proven": 0, "not tried": 1, "failed": 2}
    return sorted(tried, key=lambda r: (order[r.result], not r.diff))


def _try(scene: Scene, finding: Finding, fix: Fix, expression: Expression | None, site: Site | None) -> Remedy:
    lab = scene.lab
    assert lab is not None
    if fix.leave_out:
        gave = next((e.answer for e in scene.experiments if "without samples" in e.question), "")
        good = bool(gave) and "still" not in gave
        return Remedy(fix.title, "", True, "proven" if good else "not tried", f"without these samples: {gave}" if good else "")
    if not fix.template or expression is None:
        return Remedy(fix.title, "", fix.safe)
    if fix.inner in patterns.OUTER:
        return _try_around(scene, finding, fix, expression, site)
    runtime = _runtime_name(scene, fix, expression)
    if runtime != source_name(expression.name):
        expression = expression.as_plain_call()
    if not _fits(scene, fix, runtime):
        return Remedy(fix.title, "", fix.safe)
    change = fix.text(expression) if _handed_through(scene, fix, expression, runtime) else None
    diff = expression.diff(*change) if change is not None else ""
    name = runtime
    try:
        outcome = lab.run(fix.swap(expression, name), frozenset([site]) if site is not None else frozenset())
    except Exception as error:
        return Remedy(fix.title, "", fix.safe, "failed", f"{type(error).__name__}: {error}")
    if outcome is NO_MEMORY:
        return Remedy(fix.title, diff, fix.safe, "not tried", "there was too little memory for another replay")
    if not lab.hit:
        return Remedy(fix.title, "", fix.safe)
    good, words = lab.judge(outcome, finding.empty, _finite_loss(scene))
    scene.tried(fix.title, words)
    if not good and scene.symptom.place == "exception" and not outcome.error:
        good = outcome.finite
    return Remedy(fix.title, diff, fix.safe, "proven" if good else "failed", words)


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
    return losses[-1] if losses and math.isfinite(losses[-1]) else None


def _try_around(scene: Scene, finding: Finding, fix: Fix, expression: Expression, site: Site | None) -> Remedy:
    """Try a change that replaces the expression around the birth: a softmax written by hand, and its like."""
    lab = scene.lab
    assert lab is not None and site is not None
    found = patterns.around(expression, fix.inner)
    outer = sites_of_node(site, found[0]) if found is not None else frozenset()
    if found is None or not outer:
        return Remedy(fix.title, "", fix.safe)
    outcome = lab.run(patterns.outer_swap(fix.inner), outer)
    if not lab.hit:
        return Remedy(fix.title, "", fix.safe)
    good, words = lab.judge(outcome, finding.empty, _finite_loss(scene))
    scene.tried(fix.title, words)
    return Remedy(fix.title, expression.diff(*found), fix.safe, "proven" if good else "failed", words)


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

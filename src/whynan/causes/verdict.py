"""Put a verdict together: the rule that fits, the remedies tried on the replay, the samples checked, the values shown."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from whynan.capsule.sites import Site, is_installed, resolve
from whynan.causes.absorbed import absorbed
from whynan.causes.arguments import factorised
from whynan.causes.arrays import as_warned, in_arrays
from whynan.causes.beforehand import beforehand
from whynan.causes.catalogue import Finding, Rule, Scene, first_match, forgiven
from whynan.causes.extremes import Extreme, extreme_input, left_out
from whynan.causes.fewer import without_rows
from whynan.causes.general import lost_bounds, where_all_failed
from whynan.causes.handed import batch_size, feeds_a_model, held_by_data, hook_words, line_in_data, sample_words
from whynan.causes.in_samples import divided_in_samples
from whynan.causes.kept_out import kept_out
from whynan.causes.lab import Lab, Outcome
from whynan.causes.naming import names_of
from whynan.causes.sampled import are_coupled, are_fed
from whynan.causes.several import Verdict, decide
from whynan.causes.source import Expression, expression_at
from whynan.causes.terms import named_terms, term_words
from whynan.causes.trying import remedies_of, tempting
from whynan.causes.weighing import bad_weight, is_weight, source_text, weight_name
from whynan.errors import let_through
from whynan.records import DEAD, NOWHERE, Cause, Confidence, Experiment, Origin, Phase, Remedy, Span, TensorStats, number
from whynan.trace.birth import Birth, View
from whynan.trace.graph import Colour, Leaf, Op
from whynan.trace.hidden import hidden_birth
from whynan.trace.locate import locate, setup_birth, weights_birth
from whynan.trace.mending import places_of, without
from whynan.trace.slicing import HAND_ON, base
from whynan.tripwire.values import bad_rows, stats

FAILED = 2  # changes that did not help which are told
_LAYERS = ("addmm", "mm", "bmm", "convolution", "native_layer_norm", "native_batch_norm", "native_group_norm")  # no mask goes into these


def judge(scene: Scene) -> tuple[Origin, Cause, list[Remedy], list[Experiment]]:
    """Explain a birth and prove the explanation as far as the replay allows."""
    scene.lab = Lab(scene.program, scene.targets, scene.history, scene.scaler, scene.healthy, scene.jump, scene.symptom.place)
    scene.lab.one_of_several = scene.backwards > sum(e.kind == "backward" for e in scene.program.entries) > 0
    first = _first(scene)
    first = _in_the_batch(scene, first) or first
    verdict = decide(first, _explain) if scene.jump is None else first
    verdict.remedies = _left_out(verdict) + verdict.remedies
    chosen, finding = verdict.rule, verdict.finding
    scene.birth = verdict.scene.birth  # what is told beside the verdict is about the same birth
    scene.terms = named_terms(scene.birth)
    remedies, useless = where_all_failed(chosen, [_as_recorded(scene.lab, r) for r in _listed(verdict.remedies)], finding.advice)
    guarded, guards = ([], []) if finding.backward else kept_out(verdict.scene)  # WN502 tells it itself
    finding.spans += [span for span in guards if (span.file, span.line) not in {(s.file, s.line) for s in finding.spans}]
    beside = [
        *guarded,
        *lost_bounds(verdict.scene, chosen, finding),
        *_members(scene),
        *([f"met in evaluation {scene.evaluation} of the closure in this step"] if scene.evaluation > 1 else []),
        *term_words(scene.birth, scene.terms, scene.lab.scale),
        *sample_words(scene.program, verdict.samples),
        *hook_words(scene.program),
        *useless,
    ]
    cause = Cause(
        chosen.code,
        chosen.slug,
        finding.title or chosen.title,
        Confidence.PROVEN if verdict.proven else Confidence.SUSPECTED,
        tuple(e for e in [*finding.evidence, *beside] if e),
        finding.label,
    )
    origin = _origin(verdict.scene, chosen, finding, verdict.expression, verdict.samples)
    if scene.birth is not None and (before := _outside_of_steps(verdict.scene, scene.birth, origin, cause)) is not None:
        return *before, scene.experiments
    if scene.birth is not None and (outside := in_arrays(scene, scene.birth, origin, cause)) is not None:
        return *outside, scene.experiments
    if chosen.code in ("WN701", "WN702") and scene.birth is not None:
        samples = list(origin.samples)
        origin, cause = _in_data(scene, scene.birth, origin, cause)
        if scene.in_data is not None:
            remedies = [*divided_in_samples(scene, scene.birth, scene.in_data, samples), *remedies]
    return origin, cause, remedies, scene.experiments


def _listed(remedies: list[Remedy]) -> list[Remedy]:
    """Leave out all but the best of the changes that failed: those that made the step finite, at least. All of them are among the experiments."""
    failed: dict[str, Remedy] = {}
    for remedy in remedies:
        if remedy.result == "failed":
            failed.setdefault(remedy.effect, remedy)  # two that gave the same are one
    best = sorted(failed.values(), key=lambda r: not r.effect.startswith(("finite", "it only hides")))[:FAILED]
    return [r for r in remedies if r.result != "failed" or any(r is kept for kept in best)]


def _as_recorded(lab: Lab, remedy: Remedy) -> Remedy:
    """Take back the proof of a remedy where the replay is not the whole step: what it lets through can be bad further on."""
    return replace(remedy, result="not proven") if lab.cut and remedy.result == "proven" else remedy


def _outside_of_steps(scene: Scene, birth: Birth, origin: Origin, cause: Cause) -> tuple[Origin, Cause, list[Remedy]] | None:
    """Go on to the line that made a bad value of finite ones before the step, or a weight between two, where it is known."""
    before = setup_birth(scene.program, birth, held_by_data(scene.program))
    found = before or (weights_birth(scene.program, birth) if cause.code in ("WN601", "WN602") else None)
    if found is None:
        return None
    there = replace(scene, birth=found.birth, program=found.program, targets=found.targets, lab=None, healthy={}, experiments=[], met=birth)
    chosen, finding = first_match(there)
    if chosen.code in ("WN701", "WN702", "WN901", "WN802"):
        return None
    site = finding.site or found.birth.site
    expression = expression_at(site, resolve(site).file) if site is not None else None
    first = _origin(there, chosen, finding, expression, [])
    how, phase = ("handed in", Phase.INPUT) if before else ("met", Phase.PARAMETER)
    words = f"made {found.when}, and {how} at {origin.span.place}"
    remedies = beforehand(scene, there, found, finding, expression)
    sure = Confidence.PROVEN if any(r.result == "proven" for r in remedies) else cause.confidence
    told = Cause(chosen.code, chosen.slug, finding.title or chosen.title, sure, (*finding.evidence, words), finding.label)
    span = replace(origin.span, label=f"{how} here")
    return replace(first, phase=phase, from_=(*first.from_, span)), told, remedies


def _in_data(scene: Scene, birth: Birth, origin: Origin, cause: Cause) -> tuple[Origin, Cause]:
    """Go on to the line of the data set that made a bad sample, where there is one."""
    scene.in_data = line = scene.in_data or line_in_data(scene.program, birth, list(origin.samples))
    if line is None:
        return as_warned(birth, origin, cause)
    span = resolve(line.site)
    whole = replace(span, column=max(span.indent, 0), end_column=max(span.indent, 0) + len(span.code), end_line=span.line)
    kind = "nan" if birth.leaf is not None and birth.leaf.damage.nan else "inf"
    values = f": {', '.join(line.values)}" if line.values else ""
    words = f"in sample {origin.samples[0]} the first {kind} appears at {whole.place}"
    handed_in = replace(origin.span, label=cause.label)
    return (
        replace(origin, span=whole, from_=(handed_in, *origin.from_)),
        replace(cause, evidence=(*cause.evidence, words), label=f"{kind} appears here first{values}"),
    )


def _members(scene: Scene) -> list[str]:
    """Say which members of a list of modules got a bad gradient, where these are some of them."""
    words = scene.symptom.detail.partition(": ")[2] if scene.symptom.place == "gradient" and scene.jump is None else ""
    return [f"not finite: the gradients of {words}"] if " of " in words else []


def _explain(scene: Scene) -> Verdict:
    """Find the rule that fits a birth, and try its remedies."""
    chosen, finding = first_match(scene)
    birth = scene.birth
    site = finding.site or (birth.site if birth is not None else None)
    expression = expression_at(site, resolve(site).file) if site is not None else None
    samples, without = _samples(scene, finding)
    if (extreme := extreme_input(scene, chosen.code)) is not None:
        samples, without = (samples, without) if samples else _without_extreme(scene, extreme)
        gone = without is not None and without.finite and set(samples) == set(extreme.places)
        if gone and without:
            finding.evidence.append(f"{extreme.words}; without {'it' if len(samples) == 1 else 'them'}: {without.effect()}")
        elif extreme.kind == "column" or (without is None and scene.healthy):  # a row without which the step is as bad is not what broke it
            finding.evidence.append(extreme.words)
    remedies = finding.remedies + remedies_of(scene, finding, expression, site)
    with forgiven(scene, "changes that are often made"):
        finding.evidence += tempting(scene, finding, expression, site)
    return Verdict(scene, chosen, finding, site, expression, samples, remedies, without=without)


def _first(scene: Scene) -> Verdict:
    """Explain the birth, or an infinity that was hidden on the way to it where that alone explains the step."""
    try:
        found = _older(scene, scene.birth) if scene.birth is not None and scene.jump is None else None
    except MemoryError:
        found = None
    if found is None or scene.birth is None:
        return _explain(scene)
    birth, hider = found
    older = _explain(replace(scene, birth=birth))
    alone = without(scene.program, scene.targets, places_of(birth)).finite  # else a change there may heal another place by the way
    if not alone or not any(r.result == "proven" and r.diff for r in older.remedies):  # another dtype heals more than this place
        younger = _explain(scene)
        if (younger.healed and not older.healed) or not alone:
            return younger
    older.finding.evidence += _where_hidden(hider, birth, scene.birth) + _only_in_gradient(scene, hider, scene.birth)
    return older


def _older(scene: Scene, birth: Birth) -> tuple[Birth, Op] | None:
    return absorbed(scene, birth) or hidden_birth(scene.program, scene.targets, birth)


def _where_hidden(hider: Op, older: Birth, younger: Birth) -> list[str]:
    """Say at which line an infinity was made finite, and at which it shows, where these are not one."""
    here, there, born = (resolve(site).line if site is not None else 0 for site in (hider.site, younger.site, older.site))
    shows = "in the gradient" if there == born and younger.derivative else f"at line {there}"
    return [] if here == there else [f"the infinity was hidden at line {here} (its result is finite); what came of it shows {shows}"]


def _only_in_gradient(scene: Scene, hider: Op, younger: Birth) -> list[str]:
    """Say that the loss does not show an infinity that was taken in on the way to it, and how the gradient does."""
    if not younger.derivative or not younger.losses or not math.isfinite(younger.losses[-1]) or scene.symptom.place == "loss":
        return []
    loss = younger.losses[-1] / (scene.lab.scale if scene.lab is not None else 1.0)
    back = "on the way back its slope there, 0, meets the infinite one: 0 * inf is nan" if scene.symptom.kind == "nan" else "the gradient is not"
    return [f"the loss ({number(loss)}) is finite: {base(hider).strip('_')} makes a finite value of the infinity; {back}"]


def _in_the_batch(scene: Scene, verdict: Verdict) -> Verdict | None:
    """Explain a step by an infinity that the loop itself wrote into its batch.

    It could be a mask; not where a layer computes with it, nor where nothing else explains the step. Then it is a bad input, as a NaN is.
    """
    birth, code = verdict.scene.birth, verdict.rule.code
    if birth is None or birth.op is None or scene.jump is not None or not (birth.slice.written_by or birth.op.colour is Colour.DELIBERATE):
        return None
    if code != "WN901" and (code not in ("WN301", "WN302") or base(birth.op) not in _LAYERS or not birth.op.in_module):
        return None
    try:
        read = locate(scene.program, scene.targets, meant=False)
    except MemoryError:
        return None
    if read is None or read.leaf is None or read.phase is not Phase.INPUT:
        return None
    found = _explain(replace(scene, birth=read))
    return found if found.rule.code in ("WN701", "WN702") else None


def _origin(scene: Scene, chosen: Rule, finding: Finding, expression: Expression | None, samples: list[int]) -> Origin:
    birth = scene.birth
    site = finding.site or (birth.site if birth is not None else None)
    span = resolve(site) if site is not None else NOWHERE
    if birth is None:
        places = {"gradient": Phase.BACKWARD, "optimizer state": Phase.OPTIMIZER, "scaler": Phase.OPTIMIZER, "parameter": Phase.PARAMETER}
        phase = finding.phase or places.get(scene.symptom.place, Phase.FORWARD)
        known = span.known or chosen.code in (*DEAD, "WN603", "WN803")
        return Origin(phase, span, exact=known, note="" if known else scene.trouble)
    phase = birth.phase
    if finding.backward:
        phase = Phase.BACKWARD
    elif chosen.code == "WN703":
        phase = Phase.INPUT
    elif finding.site is not None and chosen.code.startswith("WN60"):
        phase = Phase.OPTIMIZER
    inputs, output = _values(scene, chosen, expression)
    op = birth.op
    module = ""
    if op is not None:
        forward = birth.forward
        module = forward.op.module if forward is not None else op.module
    spans = (*finding.spans, *_called_from(scene, site))
    return Origin(phase, span, module, op.name if op is not None else "", birth.exact, birth.note, tuple(inputs), output, tuple(samples), spans)


def _called_from(scene: Scene, site: Site | None) -> list[Span]:
    """Return the line of the program that called the library a birth happened in."""
    birth = scene.birth
    if site is None or birth is None or not is_installed(site.code):
        return []
    forward = birth.forward
    entry = next((e for e in scene.program.entries if forward is not None and e.number == forward.op.entry), None)
    recorded = None if entry is None else entry.caller or (entry.site if entry.site is not None and not is_installed(entry.site.code) else None)
    caller = birth.caller or recorded
    sites = [birth.between if site == birth.site else None, caller]
    return [resolve(s, "called from here") for s in sites if s is not None]


def _values(scene: Scene, chosen: Rule, expression: Expression | None) -> tuple[list[TensorStats], TensorStats | None]:
    birth = scene.birth
    assert birth is not None
    if birth.leaf is not None:
        shown = birth.handed_in() if birth.phase is Phase.INPUT else birth.leaf.tensor.detach()
        role = birth.leaf.role if chosen.code != "WN702" else "target"
        if role in ("target", "constant"):
            role = source_text(birth, expression) or role
        elif birth.phase is Phase.INPUT and is_weight(birth):
            role = weight_name(birth, expression)
        return [stats(birth.leaf.name or role, shown)], None
    view = birth.forward
    if view is None:
        return [], None
    output = view.output()
    if chosen.code in ("WN602", "WN701") and (weight := bad_weight(view)) is not None:
        return [stats(weight[1], weight[0].dense())], stats("result", output) if output is not None else None
    view = factorised(view) or view
    names = names_of(view, expression)
    rows = [stats(names.get(name, name), tensor) for name, tensor in list(view.inputs().items())[:4]]
    return list(dict.fromkeys(rows)), stats("result", output) if output is not None else None


def _samples(scene: Scene, finding: Finding) -> tuple[list[int], Outcome | None]:
    """Return the rows of the batch the damage belongs to, checked by replaying without them, and what that gave."""
    birth, lab = scene.birth, scene.lab
    if birth is None or lab is None or birth.phase is Phase.OPTIMIZER:
        return [], None
    size = batch_size(scene.program)
    rows = every = finding.rows
    if size and are_coupled(birth, size):
        return [], None
    if not rows and birth.op is not None and feeds_a_model(scene.program, size) and are_fed(birth, size):
        for index in (birth.op.index, birth.forward.op.index if birth.forward is not None else -1):
            output = birth.outputs.get(index)
            if output is not None and output.dim() and output.shape[0] == size:
                meant = bool(output.isnan().any()) and any(s.colour is Colour.DELIBERATE for s in birth.graph.ops[index].sources)
                rows = bad_rows(torch.where(output.isnan(), output, 0) if meant else output)  # infinities that came in stay in their rows
                every, rows = rows, _that_go_on(birth, size, rows)
                break
    if size and finding.among not in (0, size):
        return (finding.rows if _is_cut(birth, size, finding.among) else []), None  # else they are rows of something else than the batch
    known = finding.rows if not finding.among or are_fed(birth, finding.among) else []  # what no replay without them can show
    if not rows or not size or len(rows) >= size or max(rows) >= size:
        return known, None
    outcome = _without(scene, lab, rows, size)
    if rows != every and len(every) < size and (outcome is None or not outcome.finite):
        rows = every  # the others spoil the gradient
        outcome = _without(scene, lab, rows, size)
    if outcome is None:
        return known if finding.rows else rows, None  # a program that cannot do without these rows has its answer elsewhere
    lab.left = outcome.loss if outcome.finite else lab.left
    good = lab.judge(outcome)[0] if scene.jump is not None else outcome.finite
    scene.tried(f"the step without samples {rows[:8]}{' …' if len(rows) > 8 else ''}", outcome.effect() if good else f"still {wrong(scene)}")
    return (rows if good or (finding.rows and scene.jump is None) else []), outcome


def _without_extreme(scene: Scene, extreme: Extreme) -> tuple[list[int], Outcome | None]:
    """Play the step without the rows that lie far outside the others; return them where that heals it, and what it gave."""
    lab, size = scene.lab, batch_size(scene.program)
    rows, put = left_out(scene, extreme)
    if lab is None or not rows or (size and are_coupled(scene.birth, size)):  # type: ignore[arg-type]
        return [], None
    outcome = _without(scene, lab, rows, size) if put is None else lab.run(put)
    if outcome is None or outcome.error or not outcome.finite:
        return [], None
    lab.left = outcome.loss
    scene.tried(f"the step without samples {rows[:8]}{' …' if len(rows) > 8 else ''}", outcome.effect())
    return rows, outcome


def _that_go_on(birth: Birth, size: int, rows: list[int]) -> list[int]:
    """Return the rows of the batch whose bad values still are there further on: a loss of classes picks one of each row."""
    for view in birth.path()[1:] if not birth.derivative else ():
        output = birth.outputs.get(view.op.index)
        picked = _picked_by_a_loss(view)
        if picked is None and (output is None or output.dim() == 0 or output.shape[0] != size):
            break
        further = [row for row in bad_rows(output if picked is None else picked) if row in rows]  # type: ignore[arg-type]
        if not further:
            break
        rows = further
    return rows


def _picked_by_a_loss(view: View) -> torch.Tensor | None:
    """Return the values that a loss over classes picks, one of each row."""
    if not view.name.startswith("nll_loss"):
        return None
    scores, target = view.input("self"), view.input("target")
    if scores is None or target is None or scores.dim() < 2:
        return None
    inside = target.clamp(0, scores.shape[1] - 1).unsqueeze(1)
    left_out = view.scalar("ignore_index")
    return torch.where(target != (left_out if isinstance(left_out, int) else -100), scores.gather(1, inside).squeeze(1), 0)


def _without(scene: Scene, lab: Lab, rows: list[int], size: int) -> Outcome | None:
    """Play the step without some rows; where that fails, once more with the size of the batch changed where a call was given it."""
    for sized in (False, True):
        try:
            with without_rows(scene.program, rows, size, sized):
                outcome: Outcome = lab.run()
        except Exception as error:
            let_through(error)
            continue
        if not outcome.error:
            return outcome
    return None


def _left_out(verdict: Verdict) -> list[Remedy]:
    """Offer to leave the bad samples out where no change is proven, they are few, and without them the step and those after it are usual ones."""
    scene, outcome = verdict.scene, verdict.without
    if verdict.healed or scene.drifts or scene.lab is None or outcome is None or 2 * len(verdict.samples) >= batch_size(scene.program):
        return []
    good, words = scene.lab.judge(outcome)
    them = "this sample" if len(verdict.samples) == 1 else "these samples"
    advice = next((r.title for r in verdict.remedies if r.result == "not tried"), f"look into what is in {them}")
    return [Remedy(f"{advice}, or leave {them} out, which changes results", "", False, "proven", f"without {them}: {words}")] if good else []


def _is_cut(birth: Birth, size: int, among: int) -> bool:
    """Whether the step cut that many rows out of what it was given."""
    cuts = [op for op in birth.graph.ops if op.sources and op.shape[:1] == (among,) and base(op) in HAND_ON]
    makers = [birth.graph.maker(op.sources[0]) for op in cuts]
    return any(isinstance(made, Leaf) and tuple(made.tensor.shape[:1]) == (size,) for made in makers)


def wrong(scene: Scene) -> str:
    """Say what a step that was not mended still is."""
    return "not finite" if scene.jump is None else "absurd"

"""The sentences that every form of a report has in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from whynan.records import LEFT_OUT, Incident, Remedy, TensorStats, count, number, short_dtype
from whynan.report.reading import Run

Key = tuple[str, str, int]

_DONE = {
    "skipped": "that batch was skipped; weights, moments and buffers were left as before it",
    "terms dropped": "the bad terms of the loss were left out; what only they reach is as before the step",
    "rolled back": "the run went back to its last good state",
    "stopped": "the training was stopped; weights are as before the bad step",
    "observed": "nothing was changed",
    "left out": "the program itself left that step out",
}


def key_of(incident: Incident) -> Key:
    """What makes two incidents the same kind."""
    return incident.cause.code, incident.origin.span.file, incident.origin.span.line


def kinds_of(incidents: Iterable[Incident]) -> dict[Key, list[Incident]]:
    """Gather incidents by cause and place, in the order they came."""
    found: dict[Key, list[Incident]] = {}
    for incident in incidents:
        found.setdefault(key_of(incident), []).append(incident)
    return found


def plural(number: int, word: str) -> str:
    """Count things.

    >>> plural(1, "step"), plural(12000, "incident")
    ('1 step', '12 000 incidents')
    """
    return f"{count(number)} {word}{'' if number == 1 else 's'}"


def place_of(incident: Incident) -> str:
    """Where the damage was born, for a sentence."""
    span = incident.origin.span
    return span.place if span.known else "a place not known"


def inside_title(incident: Incident) -> str:
    """Whose values are listed side by side."""
    where = incident.origin.module or incident.origin.span.function
    return f"Values inside {where}" if where else "Values there"


def inside_row(value: TensorStats) -> tuple[str, ...]:
    """One value in a table: name, shape, counts, least and largest finite one."""
    shape = f"{short_dtype(value.dtype)}[{', '.join(map(str, value.shape))}]" if value.shape else short_dtype(value.dtype)
    ends = ["" if end is None else number(end) for end in (value.min, value.max)]
    return value.name, shape, str(value.nan), str(value.posinf + value.neginf), *ends


def symptom_text(incident: Incident) -> str:
    """What was seen, as the beginning of a sentence."""
    symptom = incident.symptom
    name = symptom.name
    if symptom.kind == "absurd":
        return f"the {name} was absurd"
    if symptom.place == "loss":
        return f"the loss became {symptom.kind}"
    if symptom.place == "gradient":
        return f"the gradient of {name} became {symptom.kind}"
    if symptom.place in ("parameter", "buffer", "optimizer state"):
        word = "weight" if symptom.place == "parameter" else symptom.place
        return f"the {word} {name} became {symptom.kind}" if name else f"a {word} became {symptom.kind}"
    if symptom.place == "exception":
        return f"{symptom.kind} was raised"
    return " ".join(filter(None, (symptom.place, name if name != symptom.place else "", symptom.kind)))


def verdict(run: Run) -> str:
    """The run in one sentence."""
    if not run.incidents:
        warned = f", {plural(len(run.warnings), 'early warning')}" if run.warnings else ""
        return f"No incident in {plural(run.steps, 'step')}{warned}."
    first = run.incidents[0]
    sure = "" if first.cause.confidence == "proven" else ", suspected"
    span = first.origin.span
    place = f"{span.file.rpartition('/')[2]}:{span.line}" if span.known else "a place not known"
    return f"At step {count(first.step)} {symptom_text(first)}: {first.cause.title} ({first.cause.code}{sure}) at {place}."


def outcome(run: Run) -> str:
    """What was done about it, and how many there were."""
    if not run.incidents:
        return "Every loss, gradient and weight that was looked at is finite." if run.steps else "The run has written no step yet."
    total, kinds = len(run.incidents), len(kinds_of(run.incidents))
    counted = run.watched.get("incidents")
    more = counted - total if isinstance(counted, int) else 0
    rest = f" {plural(more, 'later step')} bad for the same reason {'is' if more == 1 else 'are'} counted, not told." if more > 0 else ""
    if total == 1:
        taken = "left out" if LEFT_OUT in run.incidents[0].cause.evidence else run.incidents[0].action.taken
        words = "its update was left out; putting back what it had changed has failed" if run.watched.get("unsure") else _DONE.get(taken, taken)
        return words[:1].upper() + words[1:] + "." + rest
    counts = Counter(i.action.taken for i in run.incidents)
    done = ", ".join(f"{n} {word}" for word, n in counts.most_common())
    return f"{plural(total, 'incident')} in {plural(run.steps, 'step')}, {plural(kinds, 'different kind')}: {done}.{rest}"


def label_of(remedy: Remedy) -> str:
    """How a remedy is labelled: safe, changes results, or kills the gradient."""
    if "gradient is dead" in remedy.effect or getattr(remedy, "gradient", "") == "dead":
        return "kills the gradient"
    return "safe: same mathematics" if remedy.safe else changing(remedy)


def changing(remedy: Remedy) -> str:
    """Say that a remedy changes results, and where alone it does."""
    return "changes results" + f" only {remedy.only}" * bool(remedy.only)


def proof_of(remedy: Remedy, step: int) -> str:
    """What the replay said of a remedy."""
    if remedy.result in ("proven", "not proven"):
        return f"{remedy.result}: step {step} replayed {'with this change' if remedy.diff else ''}: {remedy.effect}".replace("replayed :", "replayed:")
    if remedy.result == "failed":
        return f"did not help: {remedy.effect}"
    return f"not tried: {remedy.effect}" if remedy.effect else "not tried on the replay"


def contents_text(source: bool, values: bool) -> str:
    """What a report holds, for its head."""
    held = [word for word, there in (("source lines", source), ("values of the run", values)) if there]
    gone = [word for word, there in (("source lines", source), ("values of the run", values)) if not there]
    text = f"This page contains {' and '.join(held) or 'neither source lines nor values of the run'}"
    return text + (f", and no {gone[0]}." if len(gone) == 1 else ".")


def watched_lines(run: Run) -> list[str]:
    """What was watched."""
    facts = run.watched
    lines = [f"loss and gradients: every optimizer step, {plural(len(run.curves) or run.steps, 'step')}"]
    models = _dicts(facts.get("models"))
    lines += [_model(model) for model in models[:6]]
    lines += [f"{len(models) - 6} more models"] * (len(models) > 6)
    optimizers = _words(facts.get("optimizers"))
    if optimizers:
        lines.append(f"optimizers: {', '.join(optimizers[:6])}{' …' if len(optimizers) > 6 else ''}")
    elif facts.get("by_hand"):
        lines.append("no optimizer: the program updates its weights itself; gradients were looked at after each backward pass")
    lines.append("weights, buffers and optimizer state: when they were made or loaded, and buffers after each forward pass that changed them")
    if facts.get("spike"):
        lines.append(f"spikes of loss and gradient norm: {facts['spike']}")
    tracked = _words(facts.get("track"))
    if tracked:
        lines.append(f"tracked values: {', '.join(tracked)}")
    if isinstance(facts.get("readings"), dict) and facts["readings"]:
        lines.append("float16 weights: their largest value every 100 steps")
    return lines


def _model(model: dict[str, object]) -> str:
    kinds, places, size = _words(model.get("dtypes")), _words(model.get("devices")), model.get("parameters")
    weights = count(size) if isinstance(size, int) else "?"
    return f"model {model.get('kind')}: {weights} weights, {', '.join(kinds) or 'no dtype'} on {', '.join(places) or 'no device'}"


def unwatched_lines(run: Run) -> list[str]:
    """What was not."""
    lines = [
        "activations while nothing is wrong: the values inside modules are seen only when a bad step is replayed",
        "how large weights in float32 and bfloat16 are between incidents",
        "other threads, and optimizer steps inside a compiled function",
        "whether the loss you compute is the one you mean",
    ]
    if not run.curves.has("scale"):
        lines.append("a loss scale: no gradient scaler was used, or its scale was not known on the host")
    if not run.watched:
        lines.append("this run wrote no run.json at its end: it was killed, still runs, or is of an older version; models and optimizers are not known")
    if run.unreadable:
        lines.append(f"{plural(run.unreadable, 'line')} of the run's files could not be read and {'is' if run.unreadable == 1 else 'are'} left out")
    if (run.folder / "internal-error.txt").exists():
        lines.append("whynan itself failed in this run (internal-error.txt): what came after is not watched")
    return lines


def _dicts(value: object) -> Sequence[dict[str, object]]:
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []


def _words(value: object) -> list[str]:
    return [str(v) for v in value] if isinstance(value, list) else []

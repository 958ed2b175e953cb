"""What the numbers of a run say about its settings. Each rule answers only where its numbers are plain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median

from whynan.forensics.logs.names import Role
from whynan.records import number
from whynan.settings.advice import Advice, Configured, nice_down, nice_up, quantile
from whynan.settings.layout import Setting
from whynan.settings.meaning import Meaning, meaning_of_name, words_of
from whynan.settings.measured import Measured

Series = list[tuple[int, float]]
Turn = tuple[tuple[int, float], tuple[int, float]]  # step and value where the loss was lowest, and at the end
_ENOUGH = 20  # values before a quantile means anything
_NEVER = 5.0  # times the 99th percentile: a clip that high never acts
_FALLS = 3.0  # how much larger the first gradients are before a warm-up is worth a word
_SETTLED = 1.5  # times the later median: the first gradients have calmed down
_BELOW_THE_EDGE = 0.5  # of the rate at which the loss was lowest: there it is about to turn
_NEXT = 1 / 3  # of a rate that was the same all the time
_NOISY = 10.0  # 90th over 10th percentile of the gradient norm around its running median
_APART = 1000.0  # terms of one loss that differ by more than this
_LEFT = 10.0  # how far apart they may stay


def of_run(configured: Configured, run: Measured) -> Iterator[Advice]:
    """Yield what the run says, the most dangerous first."""
    turned = _turning(run.series(Role.LOSS))
    yield from _rate(configured, run, turned)
    before = run if turned is None else replace(run, until=turned[0][0])  # what follows is judged by the part that was well
    yield from _clip(configured, before)
    yield from _warmup(configured, before)
    yield from _accumulation(configured, before)
    yield from _weights(configured, before)


def went_well(run: Measured) -> bool:
    """Whether the first steps of a run were seen and nothing went wrong: no warm-up is missing then."""
    loss = run.series(Role.LOSS)
    return len(loss) >= 2 * _ENOUGH and run.bad_at is None and _turning(loss) is None


# -- learning rate ----------------------------------------------------------------------------------------------


def _rate(configured: Configured, run: Measured, turned: Turn | None) -> Iterator[Advice]:
    settings = [s for s in configured.all(Meaning.RATE) if s.number]
    rates = dict(run.series(Role.RATE))
    yield from _overridden(settings, rates)
    if turned is None:
        return
    (low_at, _), (end_at, _) = turned
    peak, then = max((r for s, r in rates.items() if s <= end_at), default=0.0), rates.get(low_at, 0.0)
    while_it_rose = 0 < then <= 0.7 * peak  # else it turned at the rate it was to have
    top = max([peak, *(s.number or 0.0 for s in settings)])
    factor = _BELOW_THE_EDGE * then / top if while_it_rose else _NEXT
    reason = _story(run, turned, then if while_it_rose else 0.0, peak)
    for setting in settings:
        value = nice_down((setting.number or 0.0) * factor)
        yield Advice(str(Meaning.RATE), reason, True, setting, value)


def _story(run: Measured, turned: Turn, then: float, peak: float) -> str:
    (low_at, low), (end_at, end) = turned
    story = f"the loss was lowest at step {low_at} ({number(low)}) and rose to {_rough(end)} by step {end_at}"
    at_rate = f", at a rate of {number(peak)}: a third is the next to try" if peak else ": a third is the next to try"
    where = f"; the rate was {number(then)} there and {number(peak)} at its highest: take half of the first" if then else at_rate
    last = "; not finite at the next step" if run.bad_at == end_at + 1 else ""
    return f"{story}{where}{last}{_growth(run)}"


def _overridden(settings: list[Setting], rates: dict[int, float]) -> Iterator[Advice]:
    """Say where the log shows a rate above every configured one."""
    top = max(rates, key=lambda s: rates[s], default=None)
    largest = max((s.number or 0.0 for s in settings), default=0.0)
    if top is not None and largest and rates[top] > 1.05 * largest:
        reason = f"the log shows {number(rates[top])} at step {top}: this setting is not in effect; a loaded scheduler may have replaced it (WN607)"
        yield Advice(str(Meaning.RATE), reason, True, settings[0])


def _turning(loss: Series) -> Turn | None:
    """Return where the loss was lowest and how high it ended, where it clearly rose in between.

    Clearly: most of the last quarter lies above most of the values around the lowest place, or it climbs steeply at the very end.
    """
    if len(loss) < _ENOUGH:
        return None
    width = max(9, len(loss) // 20)
    smooth = _running(loss, width)
    low = min(range(len(smooth)), key=lambda i: smooth[i])
    around = [v for _, v in loss[max(0, low - width // 2) : low + width // 2 + 1]]
    late = [v for _, v in loss[-max(width, len(loss) // 4) :]]
    end = median(v for _, v in loss[-width:])
    risen = quantile(late, 0.25) > quantile(around, 0.75) and end - smooth[low] > 0.1 * abs(smooth[low])
    climbing = loss[-3][1] < loss[-2][1] < loss[-1][1] and loss[-1][1] > 3 * smooth[low] > 0
    if not (climbing or (risen and low < len(loss) - width)):
        return None
    return (loss[low][0], smooth[low]), (loss[-1][0], loss[-1][1] if climbing else end)


def _running(series: Series, width: int) -> list[float]:
    values = [v for _, v in series]
    half = width // 2
    return [median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def _rough(value: float) -> str:
    return number(value) if abs(value) < 1e4 else f"{value:.2g}"


def _growth(run: Measured) -> str:
    norms = [v for _, v in run.series(Role.NORM)]
    if len(norms) < _ENOUGH:
        return ""
    usual, last = median(norms), max(norms[-5:])
    return f"; the gradient norm went from {number(usual)} (median) to {_rough(last)}" if last > 3 * usual else ""


# -- clipping ---------------------------------------------------------------------------------------------------


def _clip(configured: Configured, run: Measured) -> Iterator[Advice]:
    norms = [v for _, v in run.series(Role.NORM) if v > 0]
    if len(norms) < _ENOUGH:
        return
    usual, high, largest = median(norms), quantile(norms, 0.99), max(norms)
    facts = f"the gradient norm is {number(usual)} in the median, below {number(high)} in 99 of 100 steps, {number(largest)} at most"
    setting, value = configured.first(Meaning.CLIP), nice_up(high)
    if setting is None:
        yield from _no_clip(configured, facts, value)
    elif setting.off:
        yield Advice(str(Meaning.CLIP), f"it is off; {facts}: {number(value)} would touch only the outliers", True, setting, value)
    elif setting.number is not None and setting.number > _NEVER * high:
        yield Advice(str(Meaning.CLIP), f"it never acted; {facts}: {number(value)} would touch only the outliers", True, setting, value)


def _no_clip(configured: Configured, facts: str, value: float) -> Iterator[Advice]:
    rate, key = configured.first(Meaning.RATE), _asked_for(configured, Meaning.CLIP)
    if rate is not None and key:
        yield Advice(str(Meaning.CLIP), f"`{key}` is read by the code and not set; {facts}", True, rate, value, key)
    elif configured.read is not None and not clips_by_itself(configured):
        yield Advice(str(Meaning.CLIP), f"nothing clips; {facts}: clip_grad_norm_(model.parameters(), {number(value)}) before the step", True)


def _asked_for(configured: Configured, meaning: Meaning) -> str:
    """Return a name of this meaning under which the code asks for a setting, where the file does not have it."""
    return min((k for k in configured.keys if not k.endswith("_") and meaning_of_name(k) is meaning), key=len, default="")


def clips_by_itself(configured: Configured) -> bool:
    """Whether the code clips without being asked: a call of its own, or a trainer that does."""
    known = {"clip_grad_norm_", "clip_grad_norm", "clip_gradients", "TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig"}
    return configured.read is None or bool(known & configured.read)


# -- warm-up ----------------------------------------------------------------------------------------------------


def _warmup(configured: Configured, run: Measured) -> Iterator[Advice]:
    norms = run.series(Role.NORM)
    if len(norms) < 2 * _ENOUGH:
        return
    smooth = _running(norms, 9)
    start, later = median(v for _, v in norms[:5]), median(v for _, v in norms[len(norms) // 2 :])
    calm = next((step for (step, _), value in zip(norms, smooth, strict=True) if value <= _SETTLED * later), None)
    if later <= 0 or start < _FALLS * later or not calm or not _settles(norms, calm):
        return
    total = configured.number(Meaning.STEPS)
    for meaning in (Meaning.WARMUP_STEPS, Meaning.WARMUP_RATIO):
        setting = configured.first(meaning)
        now = 0.0 if setting is None or setting.off else setting.number or 0.0
        as_steps = now if meaning is Meaning.WARMUP_STEPS else now * (total or 0)
        if setting is None or as_steps >= calm or (meaning is Meaning.WARMUP_RATIO and not total):
            continue
        steps = nice_up(calm)
        value = steps if meaning is Meaning.WARMUP_STEPS else nice_up(steps / (total or 1))
        reason = f"the gradient norm falls from {number(start)} to {number(later)} and is calm from step {calm} on; the warm-up ends at step {number(as_steps)}"
        yield Advice(str(meaning), reason, True, setting, value)
        return


def _settles(norms: Series, calm: int) -> bool:
    """Whether the norm falls early and then stays: one that falls all the time is a loss that is learnt."""
    quarter = len(norms) // 4
    third, last = (median(v for _, v in part) for part in (norms[2 * quarter : 3 * quarter], norms[3 * quarter :]))
    return calm <= norms[quarter][0] and last > 0.5 * third


# -- accumulation -----------------------------------------------------------------------------------------------


def _accumulation(configured: Configured, run: Measured) -> Iterator[Advice]:
    setting = configured.first(Meaning.ACCUMULATION)
    batch = configured.number(Meaning.BATCH)
    norms = run.series(Role.NORM)
    if setting is None or not configured.in_effect(setting) or setting.number is None or batch is None or len(norms) < 2 * _ENOUGH:
        return
    smooth = _running(norms, 17)
    around = [v / s for (_, v), s in zip(norms, smooth, strict=True) if s > 0][len(norms) // 4 :]
    spread = quantile(around, 0.9) / max(quantile(around, 0.1), 1e-30)
    if spread < _NOISY or batch * setting.number > 8:
        return
    samples = f"{number(batch)} x {number(setting.number)} samples"
    reason = f"from step to step the gradient norm varies by a factor of {number(spread)} with {samples}: four times as many halve the noise"
    yield Advice(str(Meaning.ACCUMULATION), reason, True, setting, setting.number * 4)


# -- loss weights -----------------------------------------------------------------------------------------------


def _weights(configured: Configured, run: Measured) -> Iterator[Advice]:
    """Compare terms that have the same weight, which is to say none that somebody has chosen."""
    sizes = {term: size for term, size in run.terms().items() if size > 0}
    found = {term: _weight_of(term, configured.all(Meaning.WEIGHT)) for term in sizes}
    known = {term: setting for term, setting in found.items() if setting is not None and setting.number}
    if len(known) < 2 or len({setting.number for setting in known.values()}) > 1:
        return
    large, small = max(known, key=lambda t: sizes[t]), min(known, key=lambda t: sizes[t])
    ratio, setting = sizes[large] / sizes[small], known[large]
    if ratio >= _APART:
        counts = f"{large} is about {number(sizes[large])}, {small} {number(sizes[small])}: with the same weight {small} teaches nothing"
        yield Advice(str(Meaning.WEIGHT), f"{counts} (changes the objective)", True, setting, nice_up((setting.number or 0.0) * _LEFT / ratio))


def _weight_of(term: str, weights: list[Setting]) -> Setting | None:
    """Return the weight that shares its words with a term: `text_weight` of `train/text_loss`, `lambda_kl` of `kl`."""
    words = set(words_of(term)) - {"loss", "train", "training"}
    shared = {s: len(words & set(words_of(s.key))) for s in weights}
    best = max(shared, key=lambda s: shared[s], default=None)
    return best if best is not None and shared[best] else None

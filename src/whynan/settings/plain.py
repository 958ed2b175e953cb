"""What is plainly wrong in the file itself, without a run: recommended, not measured."""

from __future__ import annotations

from collections.abc import Iterator

from whynan.records import number
from whynan.settings.advice import Advice, Configured, nice_up
from whynan.settings.fromrun import clips_by_itself
from whynan.settings.meaning import Meaning

_LARGE_RATE = 1e-3  # for an Adam without warm-up
_SMALLEST_HALF = 5.960464477539063e-08  # half of it and all below is 0 in float16


def of_file(configured: Configured, told: set[str]) -> Iterator[Advice]:
    """Yield what the file says; what a run has told already is left out."""
    for rule in (_clip, _eps, _warmup, _too_long, _unread):
        yield from (a for a in rule(configured) if a.about not in told)


def _clip(configured: Configured) -> Iterator[Advice]:
    setting, half = configured.first(Meaning.CLIP), configured.half
    if not half:
        return
    if setting is not None and setting.off:
        reason = f"it is off and the numbers are {half}: one large gradient goes whole into the weights; 1 is the usual value"
        yield Advice(str(Meaning.CLIP), reason, False, setting, 1.0)
    elif setting is None and configured.first(Meaning.RATE) is not None and not clips_by_itself(configured):
        reason = f"nothing clips and the numbers are {half}: clip_grad_norm_(model.parameters(), 1.0) before the step"
        yield Advice(str(Meaning.CLIP), reason)


def _eps(configured: Configured) -> Iterator[Advice]:
    """An eps of the optimizer that is 0 in the weights' own type; under autocast the weights are float32 and it is fine."""
    whole = [s for s in configured.all(Meaning.DTYPE) if s.word.lower() in ("float16", "torch.float16", "half", "16-true")]
    for setting in configured.all(Meaning.EPS) if whole else ():
        if setting.number is not None and 0 < setting.number < _SMALLEST_HALF / 2:
            reason = f"`{whole[0].key}: {whole[0].word}`: in float16 {number(setting.number)} is 0, and the update divides by 0 (WN604)"
            yield Advice(str(Meaning.EPS), reason, False, setting, 1e-4)


def _warmup(configured: Configured) -> Iterator[Advice]:
    setting, rate = configured.first(Meaning.WARMUP_STEPS), configured.number(Meaning.RATE)
    adam = configured.adam or bool(configured.read and {"Adam", "AdamW"} & configured.read)
    if setting is None or not setting.off or not adam or rate is None or rate < _LARGE_RATE:
        return
    total = configured.number(Meaning.STEPS)
    reason = f"Adam's first updates have the full size of the rate, {number(rate)}, whatever the gradient is"
    yield Advice(str(Meaning.WARMUP_STEPS), reason, False, setting, min(1000.0, nice_up(total / 50)) if total else 100.0)


def _too_long(configured: Configured) -> Iterator[Advice]:
    setting, total = configured.first(Meaning.WARMUP_STEPS), configured.number(Meaning.STEPS)
    if setting is not None and setting.number and total and setting.number >= total:
        reason = f"the run has {number(total)} steps: the configured rate is never reached"
        yield Advice(str(Meaning.WARMUP_STEPS), reason, False, setting, nice_up(total / 20))


def _unread(configured: Configured) -> Iterator[Advice]:
    for setting in configured.all(Meaning.ACCUMULATION):
        if not configured.in_effect(setting) and setting.number and setting.number > 1:
            batch = configured.number(Meaning.BATCH)
            meant = f"; a step sees {number(batch)} samples, not {number(batch * setting.number)}" if batch else ""
            yield Advice(str(Meaning.ACCUMULATION), f"no code reads it, so this is what runs{meant}", False, setting, 1.0)

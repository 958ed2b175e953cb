"""The codes that lint reports: cause codes where the hazard has one, WL codes for practices. Never renumbered."""

from __future__ import annotations

from whynan.lint.findings import Severity

_H, _M, _L = Severity.HIGH, Severity.MEDIUM, Severity.LOW

CODES: dict[str, tuple[str, Severity]] = {
    "WN101": ("log-of-zero", _H),
    "WN102": ("log-of-negative", _H),
    "WN103": ("division-by-zero", _H),
    "WN104": ("zero-over-zero", _H),
    "WN105": ("root-of-negative", _H),
    "WN106": ("negative-power-of-zero", _H),
    "WN107": ("inverse-function-out-of-range", _H),
    "WN108": ("singular-matrix", _M),
    "WN109": ("pole-of-special-function", _H),
    "WN201": ("exp-overflow", _H),
    "WN202": ("half-overflow", _M),
    "WN203": ("float-overflow", _M),
    "WN204": ("epsilon-lost", _H),
    "WN302": ("zero-times-inf", _H),
    "WN303": ("inf-over-inf", _H),
    "WN401": ("fully-masked-softmax", _H),
    "WN402": ("mean-of-nothing", _H),
    "WN403": ("variance-of-one", _M),
    "WN404": ("constant-batch", _H),
    "WN405": ("infeasible-target", _M),
    "WN501": ("infinite-slope", _H),
    "WN502": ("branch-not-taken", _H),
    "WN503": ("gradient-overflow", _M),
    "WN504": ("degenerate-decomposition", _M),
    "WN604": ("update-not-finite", _H),
    "WN607": ("learning-rate-overridden", _M),
    "WN608": ("uninitialised-parameter", _H),
    "WL101": ("clipping-before-unscale", _H),
    "WL102": ("loss-checked-after-backward", _M),
    "WL103": ("nan-gradients-zeroed", _H),
    "WL104": ("nan-to-num-as-cure", _M),
    "WL105": ("gradient-norm-ignored", _L),
    "WL106": ("gradients-checked-after-clipping", _M),
    "WL107": ("one-rank-skips", _H),
    "WL108": ("checkpoint-saved-unchecked", _M),
    "WL109": ("load-without-weights-only", _M),
    "WL110": ("average-swallows-nan", _M),
    "WL111": ("host-sync-in-hot-loop", _L),
    "WL112": ("graph-cut", _M),
    "WL113": ("loss-clamped", _M),
    "WL114": ("guard-for-all-rows-only", _H),
    "WL115": ("infinite-norm-not-checked", _H),
    "WL116": ("iterative-normalisation", _M),
}

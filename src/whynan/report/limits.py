"""Where each dtype ends, without torch, and how far a value is from it."""

from __future__ import annotations

import math

LIMITS = {
    "float64": 1.7976931348623157e308,
    "float32": 3.4028234663852886e38,
    "bfloat16": 3.3895313892515355e38,
    "float16": 65504.0,
    "float8_e4m3fn": 448.0,
    "float8_e4m3fnuz": 240.0,
    "float8_e5m2": 57344.0,
    "float8_e5m2fnuz": 57344.0,
}


def doublings(value: float, dtype: str) -> float | None:
    """Return how often a value can double before its dtype ends; None for a zero or an unknown dtype.

    >>> round(doublings(7100.0, "float16"), 1)
    3.2
    """
    limit = LIMITS.get(dtype)
    if limit is None or not math.isfinite(value) or value == 0:
        return None
    return math.log2(limit) - math.log2(abs(value))


def share_text(value: float, dtype: str) -> str:
    """Say a value as a share of its dtype's limit.

    >>> share_text(40000.0, "float16"), share_text(2.0, "float32")
    ('61 %', 'below 0.01 %')
    """
    limit = LIMITS.get(dtype)
    if limit is None or not math.isfinite(value):
        return ""
    share = 100 * (abs(value) / limit)
    return f"{share:.2g} %" if share >= 0.01 else "below 0.01 %"

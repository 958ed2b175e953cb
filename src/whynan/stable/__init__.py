"""Numerically safe functions: the same numbers as the plain form wherever that is finite, and a stated value and gradient where it is not.

`import whynan` does not load torch; this package does, on first use.
"""

from __future__ import annotations

from whynan.stable.arcs import acos, asin
from whynan.stable.averages import MovingAverage
from whynan.stable.codec import rgb_to_tokens, tokens_to_rgb
from whynan.stable.elementwise import div, log, pow, sqrt
from whynan.stable.information import beta_mutual_information
from whynan.stable.masked import masked_mean, masked_softmax
from whynan.stable.norms import cosine_similarity, normalize, rms_norm
from whynan.stable.transport import sinkhorn
from whynan.stable.variance import RunningVariance, fraction_of_variance_unexplained

__all__ = [
    "MovingAverage",
    "RunningVariance",
    "acos",
    "asin",
    "beta_mutual_information",
    "cosine_similarity",
    "div",
    "fraction_of_variance_unexplained",
    "log",
    "masked_mean",
    "masked_softmax",
    "normalize",
    "pow",
    "rgb_to_tokens",
    "rms_norm",
    "sinkhorn",
    "sqrt",
    "tokens_to_rgb",
]

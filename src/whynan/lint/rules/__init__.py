"""The rules, found by what they look at: a call, a binary operation, a statement, a function."""

from __future__ import annotations

from whynan.lint.rules import (
    decompositions,
    division,
    exponentials,
    half,
    inverses,
    logarithms,
    loops,
    masks,
    objectives,
    reductions,
    roots,
    saving,
    state,
    switching,
)
from whynan.lint.rules.registry import BINARY_RULES, CALL_RULES, FUNCTION_RULES, STATEMENT_RULES

__all__ = [
    "BINARY_RULES",
    "CALL_RULES",
    "FUNCTION_RULES",
    "STATEMENT_RULES",
    "decompositions",
    "division",
    "exponentials",
    "half",
    "inverses",
    "logarithms",
    "loops",
    "masks",
    "objectives",
    "reductions",
    "roots",
    "saving",
    "state",
    "switching",
]

"""`whynan explain`: the page of a code, also found from an error message or a piece of log. Starts without torch."""

from __future__ import annotations

import re

from whynan.causes.catalogue import Rule, rules
from whynan.errors import UsageError
from whynan.lint.pages import Page, pages

_HINTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"(Sqrt|Pow|Norm|Acos|Asin|Acosh|Hypot|Std|Cdist|Dist|Abs)Backward\d* returned nan|'(Sqrt|Pow|Acos|Asin|LinalgVectorNorm)Backward", ("WN501", "WN502")),
    (r"(Where|MaskedFill|NanToNum|Index|Mul)Backward", ("WN502", "WN501")),
    (r"(LinalgEigh|LinalgSvd|Eigh|Svd)\w*Backward", ("WN504",)),
    (r"(Log|Log1P|Xlogy)Backward", ("WN101", "WN502")),
    (r"(Div|Reciprocal|Rsqrt)Backward", ("WN104", "WN103", "WN404")),
    (r"(LogSoftmax|Softmax|Logsumexp|ScaledDotProduct)\w*Backward", ("WN401",)),
    (r"Exp\w*Backward", ("WN201",)),
    (r"(Ctc|ctc)", ("WN405",)),
    (r"index out of range in self|is out of bounds|device-side assert|IndexError", ("WN703",)),
    (r"not positive.definite|singular|factorization could not be completed|cholesky|linalg\.(inv|solve)", ("WN108",)),
    (r"more than 1 value per channel|degrees of freedom is <= 0", ("WN403",)),
    (r"value cannot be converted to type.*Half without overflow|c10::Half", ("WN202",)),
    (r"Mean of empty slice|reduction on.*empty", ("WN402",)),
    (r"No inf checks were recorded|Gradient overflow|loss scale|Skipping step|scale (went|decreased)", ("WN606",)),
    (r"Expected parameter (logits|loc|scale|probs)", ("WN901", "WN701")),
    (r"invalid multinomial distribution|probability tensor contains either", ("WN101", "WN401")),
    (r"total norm of .* non-finite|error_if_nonfinite", ("WN503", "WN501")),
    (r"(grad(ient)?[_ ]?norm)\W*(inf|nan)", ("WN503", "WN501")),
    (r"loss\W{1,4}(nan|inf)", ("WN605", "WN101", "WN401", "WN701")),
    (r"returned nan values", ("WN501", "WN502")),
)


def explain(text: str) -> str:
    """Return the page of a code, or the pages that fit an error message.

    >>> explain("WN101").splitlines()[0]
    'WN101 log-of-zero: log of an exact zero'
    """
    known: dict[str, Rule | Page] = {**rules(), **pages()}
    code = text.strip().upper()
    if code in known:
        return page(known[code])
    by_slug = next((r for r in known.values() if r.slug == text.strip().lower()), None)
    if by_slug is not None:
        return page(by_slug)
    if re.fullmatch(r"W[NL]\d+", code):
        raise UsageError(f"there is no code {code}; `whynan explain` without an argument lists them")
    inside = [c for c in dict.fromkeys(re.findall(r"W[NL]\d{3}", text)) if c in known]
    found = inside or next((list(codes) for pattern, codes in _HINTS if re.search(pattern, text, re.IGNORECASE)), [])
    if not found:
        raise UsageError(f"nothing in the catalogue fits {text.strip()[:60]!r}; run the script under `whynan run` to find the cause")
    head = [f"This text alone does not name the cause; {'it is' if len(found) == 1 else 'most likely first, it is one of'}:", ""]
    head += [f"  {c}  {known[c].title}" for c in found]
    head += ["", "`whynan run your_script.py` finds the line and the values. The page of the first:", ""]
    return "\n".join(head) + "\n" + page(known[found[0]])


def page(rule: Rule | Page) -> str:
    """Return a rule's page."""
    return f"{rule.code} {rule.slug}: {rule.title}\n\n{rule.page}\n"


def listing() -> str:
    """Return all codes with their titles, one a line."""
    known: dict[str, Rule | Page] = {**pages(), **rules()}
    return "\n".join(f"{r.code}  {r.slug:<30} {r.title}" for r in known.values())

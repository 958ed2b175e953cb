"""An infinity that the program wrote itself: a large finite number in its place, tried at the line that writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whynan.causes.fixes import Fix
from whynan.causes.source import expression_at

if TYPE_CHECKING:
    from whynan.capsule.sites import Site
    from whynan.trace.birth import Birth

_TITLE = "use a large finite number instead of the infinity"


def finite_instead(birth: Birth) -> Fix:
    """Return the change at the call that filled in the infinity (masked_fill, where); advice alone where there is none, or more than one."""
    sites = {site: birth for writer in birth.slice.written_by if (site := getattr(writer, "site", None)) is not None}
    site = next(iter(sites)) if len(sites) == 1 else None
    place = _filled_in(site) if site is not None else None
    if site is None or place is None:
        return Fix(_TITLE)
    operand, sign = place
    return Fix(_TITLE, f"{sign}1e4", operand, site=site, choice=f"{sign}2e4")  # beside 1e9 a threshold of 1 is rounded away


def _filled_in(site: Site) -> tuple[int, str] | None:
    """Return which operand of a call is the infinity, and its sign."""
    expression = expression_at(site, "")
    if expression is None or expression.name.strip("_") not in ("masked_fill", "where"):
        return None
    infinite = [(place, text.strip()) for place, text in enumerate(expression.operands) if place and "inf" in text]
    return next(((place, "-" if "-" in text else "") for place, text in infinite), None) if len(infinite) == 1 else None

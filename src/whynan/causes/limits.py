"""Family 9: what could not be seen."""

from __future__ import annotations

from whynan.causes.catalogue import Finding, Scene, rule


@rule("WN901", "origin-not-observed", "damage whose birth was not seen", rank=99)
def origin_not_observed(scene: Scene) -> Finding | None:
    """The damage is real, its birth was not seen; this says what was and was not watched."""
    birth = scene.birth
    if birth is None:
        reason = scene.trouble or "the replay did not show the damage"
        return Finding(
            "the place is not known",
            [f"not seen: {reason}", "wrap the step in a function marked with @guard.step for an exact replay"],
        )
    name = birth.op.name if birth.op is not None else birth.leaf.role if birth.leaf is not None else "?"
    return Finding("the first non-finite value appears here", [f"{name} gave a non-finite result; no rule of the catalogue fits"])

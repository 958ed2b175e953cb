"""Family 9: what could not be seen."""

from __future__ import annotations

from whynan.causes.catalogue import Finding, Scene, rule

_EXACT = "wrap the step in a function marked with @guard.step for an exact replay"


@rule("WN901", "origin-not-observed", "damage whose birth was not seen", rank=99)
def origin_not_observed(scene: Scene) -> Finding | None:
    """The damage is real, but its birth was not seen.

    What happened
    A loss, gradient or weight was non-finite, and the replay could not show the operation that
    made it, or showed one that no rule of the catalogue fits. The report says which: too little
    memory for a replay, a step with more calls than the tape holds, a tensor changed in place
    after it was read, a tensor from code that whynan does not see.

    Why the result is non-finite
    That is not known. whynan says so instead of guessing.

    Example
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> x = torch.tensor([0.0, 1.0], requires_grad=True)
        >>> with ThreadPoolExecutor(1) as pool:
        ...     h = pool.submit(torch.log, x).result()  # in a thread that is not watched
        >>> h.sum().item()
        -inf

    Instead
    Compute where the training runs, so that each operation is seen, and read the values around
    the place that is given. A step marked with @guard.step is replayed as a whole.
        >>> h = torch.log(F.softplus(x))
        >>> h.sum().backward()
        >>> h.detach(), x.grad
        (tensor([-0.3665,  0.2725]), tensor([0.7213, 0.5567]))

    How sure
    The damage is certain: the values were read. The place, where one is given, is the first
    non-finite value that was seen, and the cause is not named.

    Not this when
    The replay was exact and finite (WN802, WN803; also a value written past torch, such as
    through numpy), or the bad value was there before the step began (WN601, WN602, WN701).
    """
    from whynan.trace.graph import OUTSIDE
    from whynan.trace.saying import called

    birth = scene.birth
    if birth is None:
        reason = scene.trouble or "the replay did not show the damage"
        advice = "free memory, or use a smaller batch, and run that step again" if "memory" in reason else _EXACT
        return Finding("the place is not known", [f"not seen: {reason}", *([advice] if scene.program.entries else [])])
    if birth.leaf is not None and birth.leaf.role == OUTSIDE:
        made = f"`{birth.leaf.name}` computes with something else than torch (numpy, a library of C): what it did in there was not seen"
        return Finding(f"the arguments of `{birth.leaf.name}` are finite, its result is not", [made])
    name = called(birth.op) if birth.op is not None else birth.leaf.role if birth.leaf is not None else "?"
    return Finding("the first non-finite value appears here", [f"{name} gave a non-finite result; {_unanswered(scene.failed)}"])


def _unanswered(failed: list[str]) -> str:
    """Say why no rule answered; one that failed might have."""
    if not failed:
        return "no rule of the catalogue fits"
    return f"{'the rules' if len(failed) > 1 else 'the rule'} for {', '.join(failed)} failed, which is a fault of whynan, and no other fits"

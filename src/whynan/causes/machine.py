"""Family 8: the machine, the compiler."""

from __future__ import annotations

from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.fixes import Fix


@rule("WN803", "compiled-only", "only the compiled step is not finite", rank=14)
def compiled_only(scene: Scene) -> Finding | None:
    """The eager step is finite, the compiled one is not."""
    if scene.birth is not None or not scene.compiled or scene.trouble:
        return None
    return Finding(
        "the same step run eagerly is finite",
        ["the step was replayed with the eager originals of its compiled parts and was finite"],
        [Fix("run this part without torch.compile, and report the case to PyTorch with the capsule")],
        proven=True,
    )


@rule("WN802", "not-reproducible", "the same step run again was finite", rank=15)
def not_reproducible(scene: Scene) -> Finding | None:
    """The same step, run again with the same inputs and random state, was finite."""
    if scene.birth is not None or scene.trouble or scene.symptom.place not in ("loss", "gradient", "buffer") or scene.lab is None:
        return None
    again = scene.lab.run()
    if again.error or not again.finite:
        return None
    scene.tried("the same step once more", again.effect())
    return Finding(
        "replayed twice from the same state, finite both times",
        ["two replays with the same weights, batch and random state were finite", f"the second gave {again.effect()}"],
        [Fix("look for a nondeterministic kernel (torch.use_deterministic_algorithms(True)) or faulty hardware")],
        proven=True,
    )


@rule("WN801", "another-rank", "value that came in from another rank", rank=91)
def another_rank(scene: Scene) -> Finding | None:
    """The bad value came in through a collective from another rank."""
    return None

"""Family 5: the gradient of eigh, svd, qr or cholesky, where it divides by 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whynan.causes.arguments import from_spans
from whynan.causes.backward import parts
from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.facts import doubled
from whynan.causes.fixes import Fix, guarded
from whynan.records import number

if TYPE_CHECKING:
    from whynan.trace.birth import View


_DECOMPOSITIONS = ("linalg_eigh", "_linalg_eigh", "linalg_svd", "_linalg_svd", "linalg_eig", "linalg_qr", "symeig", "linalg_cholesky_ex")
_TRIANGULAR = {"linalg_qr": ("qr", "R"), "linalg_cholesky_ex": ("cholesky", "L")}  # and the factor that their gradient solves with
_NOT_VECTORS = "build the loss on the values or on a projector instead of single vectors, or add a little noise to the matrix"


@rule("WN504", "degenerate-decomposition", "gradient of a degenerate decomposition", rank=37)
def degenerate_decomposition(scene: Scene) -> Finding | None:
    """The gradient of a decomposition was divided by 0: by the distance of two equal values, or by a singular factor.

    What happened
    eigh, eig or svd had a finite result, and a loss used its vectors. Two eigenvalues or
    singular values coincided: an identity matrix, a covariance without preferred direction.
    Or qr or cholesky met a singular matrix: columns that are 0 or depend on each other.

    Why the result is non-finite
    The gradient of the vectors contains 1 / (value i - value j). Where the values are equal the
    vectors are not unique, so no gradient exists. The gradient of qr and of cholesky solves with
    their triangular factor, which has a 0 on its diagonal where the matrix is singular.

    Example
        >>> a = torch.eye(2, requires_grad=True)
        >>> v = torch.linalg.eigh(a)[1][:, :1]
        >>> (v @ v.T)[0, 1].backward()
        >>> a.grad.isnan().all().item()
        True

    Instead
    Use the values only, or what does not need single vectors: their gradient is well defined.
        >>> a.grad = None
        >>> torch.linalg.eigvalsh(a).square().sum().backward()
        >>> a.grad.tolist()
        [[2.0, 0.0], [0.0, 2.0]]

    If the vectors are needed, separate the values; the gradient grows as 1 / distance.
        >>> a.grad = None
        >>> v = torch.linalg.eigh(a + torch.diag(torch.tensor([0.0, 0.01])))[1][:, :1]
        >>> (v @ v.T)[0, 1].backward()
        >>> a.grad[0, 1].round().item()
        -50.0

    Before qr and cholesky add a small multiple of the identity.

    How sure
    whynan shows the smallest distance between two values of the matrix, or how many matrices are
    singular. Proven when the step, replayed with a small spread on the diagonal, has finite
    gradients that are alive; otherwise suspected. Rounding can leave 1e-8 instead of 0: a finite
    gradient without meaning.

    Not this when
    The forward pass fails or is infinite (WN108), or the root or logarithm of an eigenvalue of
    0 is at fault (WN501, WN101).
    """
    found = parts(scene)
    if found is None or not found[0].op or not found[0].op.backward:
        return None
    _, forward = found
    if forward.name not in _DECOMPOSITIONS:
        return None
    if forward.name in _TRIANGULAR:
        return _singular_factor(forward)
    matrix = forward.input(0)
    evidence = []
    if matrix is not None:
        import torch

        try:
            values = torch.linalg.svdvals(doubled(matrix))
            gap = float((values[..., :-1] - values[..., 1:]).abs().min()) if values.shape[-1] > 1 else 0.0
            evidence.append(f"the smallest distance between two values is {number(gap)}")
        except RuntimeError:
            pass
    name = forward.call.rsplit(".", 1)[-1].removeprefix("linalg_")
    return Finding(
        "two values coincide: the gradient divides by their difference",
        evidence,
        [*(guarded(name, forward.op.dtype) or guarded("eigh", forward.op.dtype)), Fix(_NOT_VECTORS)],
        from_spans(forward),
    )


def _singular_factor(forward: View) -> Finding:
    """The gradient of qr and of cholesky solves with the triangular factor that they give."""
    import torch

    name, factor = _TRIANGULAR[forward.name]
    matrix, evidence = forward.input(0), []
    if matrix is not None and matrix.isfinite().all():
        wide = doubled(matrix)
        rank = torch.linalg.matrix_rank(wide, rtol=max(matrix.shape[-2:]) * torch.finfo(matrix.dtype).eps)
        full = min(matrix.shape[-2:])
        count = int((rank < full).sum())
        what = "the matrix is" if rank.numel() == 1 else f"{count} of {rank.numel()} matrices are"
        evidence = [f"{what} singular: rank {int(rank.min())} of {full}"] if count else []
    label = f"the gradient of {name} solves with {factor}, which is singular: its diagonal holds a 0"
    return Finding(label, evidence, guarded(name, forward.op.dtype), from_spans(forward))

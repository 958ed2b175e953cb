"""The cheap questions asked at every step, and the exact ones asked when a cheap one fails."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from whynan.tripwire.values import CLEAN, Damage, damage_of, parts

_dot, _Tensor, _float32 = torch.dot, torch.Tensor, torch.float32  # looked up once: asked for every gradient
_TINY = 1e-15  # norms below it are taken in float64: squares of float32 lose their digits there, as they end at 1e38


def gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the dense gradients that exist (the values of sparse ones)."""
    return [part for p in parameters if p.grad is not None for part in parts(_summed(p.grad))]


def _summed(grad: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient with one entry per place; on a device that would mean to wait for it."""
    return grad.coalesce() if grad.layout is torch.sparse_coo and grad.is_cpu else grad


def flat_ones(parameters: Iterable[torch.Tensor]) -> list[bool]:
    """Say of each parameter whether it has one dimension; nothing where they are not all plain float32 on the CPU."""
    held = list(parameters)
    plain = all(p.dtype is _float32 and p.is_cpu and p.layout is torch.strided for p in held)
    return [p.ndim == 1 for p in held] if plain else []


def norm_of_gradients(parameters: Iterable[torch.Tensor], flat: list[bool]) -> torch.Tensor | float | None:
    """Return the norm over all gradients: a number on the CPU, elsewhere on their device and not waited for. `flat` is from `flat_ones`, perhaps long ago.

    Cost: one fused pass over the gradients.
    """
    square = found = 0.0
    try:
        for parameter, is_flat in zip(parameters, flat, strict=True):
            grad = parameter.grad
            if type(grad) is _Tensor:
                found = 1.0
                if not is_flat:
                    grad = grad.view(-1)
                square += _dot(grad, grad).item()  # a quarter faster than a norm, which guards against overflow
            elif grad is not None:
                break
        else:
            if not found:
                return None
            if _TINY**2 < square < math.inf:
                return math.sqrt(square)
    except (RuntimeError, ValueError):  # sparse, not in one piece, of another shape or number
        pass
    return total_norm(gradients(parameters))


def worse(norm: torch.Tensor | float, later: torch.Tensor | float | None) -> torch.Tensor | float:
    """Return the norm of gradients as they were made, or the later one where that is not finite. A device is not waited for."""
    if later is None:
        return norm
    if isinstance(later, torch.Tensor):
        return torch.where(torch.isfinite(later), norm, later)
    return norm if math.isfinite(later) else later


def surely_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether some tensors hold finite values only, by a quick look; false also where it cannot tell (values above 1e19, odd kinds)."""
    square = 0.0
    try:
        for tensor in tensors:
            if type(tensor) is not _Tensor:
                return False
            flat = tensor.view(-1)
            square += _dot(flat, flat).item()
    except RuntimeError:  # sparse, not in one piece, without values
        return False
    return square < math.inf


def total_norm(tensors: list[torch.Tensor]) -> torch.Tensor | float | None:
    """Return the norm over all tensors, of whatever kind and place."""
    usable = [t for t in tensors if t.numel() and (t.is_floating_point() or t.is_complex())]
    if not usable:
        return None
    norms: list[torch.Tensor] = []
    with torch.no_grad():
        for group in _by_kind(usable):
            norms += torch._foreach_norm(group)
    device = norms[0].device
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([n.to(device, torch.float32) for n in norms]))
    if device.type != "cpu":
        return norm
    size = float(norm)
    if _TINY < size < math.inf or math.isnan(size):
        return size
    wide = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in usable)
    return math.sqrt(sum(float(torch.linalg.vector_norm(t)) ** 2 for t in wide))


def _by_kind(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    first = tensors[0]
    if all(t.dtype is first.dtype and t.device == first.device for t in tensors):
        return [tensors]
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())


def nonfinite(named: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor, Damage]]:
    """Return the tensors that really hold a non-finite value. A norm that overflowed is not one."""
    found = []
    with torch.no_grad():
        for name, tensor in named:
            damage = damage_of(tensor.detach())
            if damage:
                found.append((name, tensor, damage))
    return found


def scalar_damage(value: float) -> Damage:
    """Say what is wrong with a number."""
    if math.isfinite(value):
        return CLEAN
    return Damage(nan=math.isnan(value), posinf=value == math.inf, neginf=value == -math.inf)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return what an optimizer updates."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def optimizer_state(optimizer: torch.optim.Optimizer) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield the floating-point tensors of an optimizer's state with readable names."""
    for number, state in enumerate(optimizer.state.values()):
        if isinstance(state, dict):
            for key, held in state.items():
                for value in held if isinstance(held, list) else (held,):  # LBFGS keeps its history in lists
                    if isinstance(value, torch.Tensor) and value.is_floating_point():
                        yield f"{key} of parameter {number}", value


def fits_beside(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a copy of an optimizer's weights and state fits into the free memory of their GPU, with as much to spare."""
    parameters = parameters_of(optimizer)
    if not parameters or not parameters[0].is_cuda:
        return True
    state = [v for s in optimizer.state.values() if isinstance(s, dict) for v in s.values() if isinstance(v, torch.Tensor)]
    size = sum(t.numel() * t.element_size() for t in (*parameters, *state))
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return bool(2 * size < torch.cuda.mem_get_info()[0] + cached)


KNOWN_SAFE = frozenset({"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "Adadelta", "ASGD", "SparseAdam", "Muon", "Rprop"})


def may_break(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this optimizer can make non-finite weights of finite gradients.

    torch's own optimizers cannot in float32 with a sane eps; half-precision weights, an eps that vanishes, and
    optimizers we do not know get a copy of the state before each step and a look after it.
    """
    if not type(optimizer).__module__.startswith("torch.optim") or type(optimizer).__name__ not in KNOWN_SAFE:
        return True
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if isinstance(eps, int | float) and eps < 1e-30:
            return True
        if any(p.dtype in (torch.float16, torch.bfloat16) and p.requires_grad for p in group["params"]):
            return True
    return False

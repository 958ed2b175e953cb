"""How many elements a change lets no gradient through of: a clamp makes a step finite by killing its gradient."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import CodeType
from typing import Any


@dataclass(frozen=True, order=True)
class Stopped:
    """How many elements a change lets no gradient through of: a clamp makes finite by killing the gradient."""

    dead: int = 0
    healthy: int = 0  # of these, those whose gradient was finite without it
    among: int = 1
    only: bool = True  # no other operand has a gradient: a quotient still has its numerator's
    outside: int = 0  # elements outside of the domain that the loss counts as better than all others since they are held at its edge
    reward: float = 0.0  # by how much it is lower by that, where it is linear in the result
    beyond: int = 0  # of the dead: those for which the operation is not defined; at its edge nothing need lead back

    def words(self) -> str:
        """Say what is wrong with that, if it is too much."""
        if self.healthy > SILENCED * self.among:
            return f"finite, but no gradient passes through {self.healthy} of {self.among} elements there that had a finite one"
        return "finite, but no gradient passes through any element there: nothing leads back" if self.dead == self.among > 1 and self.only else ""


def count_stopped(stopped: list[Stopped], code: CodeType, scope: dict[str, Any], call: Callable[[Any], Any], result: Any, only: bool, endless: bool) -> None:
    """Tell which elements a change of an operand lets no gradient through of; again when it is known what gradient came to the result."""
    torch, x = scope["torch"], scope["_x"]
    if differentiated(x):
        stopped.append(_stopped_in_transform(code, scope, call, only))
        return
    dead = _dead(code, scope)
    if dead is None or not dead.any():
        stopped.append(Stopped() if dead is None else Stopped(among=x.numel()))
        return
    value = result.detach() if isinstance(result, torch.Tensor) else None  # a hook that holds its own tensor is never freed
    place = len(stopped)
    stopped.append(Stopped(int(dead.sum()), _healthy(torch, dead, x, call), x.numel(), only))

    def arrived(gradient: Any) -> None:
        with torch._C.DisableTorchFunction():  # nothing is put in its place here
            lost = dead & _given(gradient, x)
            undefined = call(x.detach()).isnan()
            outside, reward = _rewarded(torch, undefined, value, gradient) if endless else (0, 0.0)
            beyond = int((lost & undefined).sum()) if undefined.shape == lost.shape else 0
            stopped[place] = Stopped(int(lost.sum()), _healthy(torch, lost, x, call, gradient), x.numel(), only, outside, reward, beyond)

    if value is not None and result.requires_grad:
        result.register_hook(arrived)


def _stopped_in_transform(code: CodeType, scope: dict[str, Any], call: Callable[[Any], Any], only: bool) -> Stopped:
    """Tell the same inside `torch.func.grad`, which has no hooks: by the values alone, outside of it."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    plain = {name: bare(value) for name, value in scope.items()}
    with temporarily_clear_interpreter_stack():
        plain["_x"] = x = plain["_x"].detach().requires_grad_()
        dead = _dead(code, plain)
        return Stopped(int(dead.sum()), _healthy(scope["torch"], dead, x, call), x.numel(), only) if dead.any() else Stopped(among=x.numel())


def differentiated(x: Any) -> bool:
    """Whether a value is one that `torch.func.grad` follows, alone: not as one of many in a `vmap`."""
    import torch

    while isinstance(x, torch.Tensor) and torch._C._functorch.is_gradtrackingtensor(x):
        x = torch._C._functorch.get_unwrapped(x)
        if not torch._C._functorch.is_functorch_wrapped_tensor(x):
            return True
    return False


def bare(value: Any) -> Any:
    """Return what `torch.func.grad` follows as a plain tensor; other things, and lists of them, as they are."""
    import torch

    while differentiated(value):
        value = torch._C._functorch.get_unwrapped(value)
    return tuple(map(bare, value)) if type(value) is tuple else value


def _dead(code: CodeType, scope: dict[str, Any]) -> Any:
    """Return the elements whose slope a change of an operand sets to 0; None where the operand has no gradient."""
    torch, x = scope["torch"], scope["_x"]
    if not isinstance(x, torch.Tensor) or not x.requires_grad:
        return None
    with torch.enable_grad(), _own_hooks(torch):
        leaf = x.detach().requires_grad_()
        made = eval(code, scope | {"_x": leaf})  # our own template
        slope = torch.autograd.grad(made.sum().real, leaf)[0] if made.requires_grad else torch.zeros_like(leaf)
    return slope == 0


def _own_hooks(torch: Any) -> AbstractContextManager[object]:
    """Keep the hooks of a checkpointed block around from what is computed here; inside `torch.func.grad` there are none, and none can be set."""
    forbidden = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None
    return nullcontext() if forbidden else torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)  # type: ignore[no-any-return]


def _as_it_is(tensor: Any) -> Any:
    return tensor


def _given(gradient: Any, x: Any) -> Any:
    """Return the elements of an operand to which a gradient came at all: one of 0 has nothing to lose."""
    try:
        return (gradient != 0).double().sum_to_size(x.shape) != 0
    except RuntimeError:  # the operation is no elementwise one
        return x == x


def _healthy(torch: Any, dead: Any, x: Any, call: Callable[[Any], Any], gradient: Any = None) -> int:
    """Count those of some elements whose gradient is finite and other than 0 as it is: for that of the result, else for a sum of it."""
    with torch.enable_grad(), _own_hooks(torch):
        leaf = x.detach().requires_grad_()
        try:
            value = call(leaf)
            given = (value.sum().real, leaf) if gradient is None else (value, leaf, gradient.detach())
            before = torch.autograd.grad(*given)[0]
        except RuntimeError:  # an operation that writes to another argument of its own
            return 0
    healthy = dead & x.isfinite() & before.isfinite() & (before != 0)  # what is infinite itself is what a change is for
    if value.shape == x.shape:
        healthy &= value.isfinite()
    return int(healthy.sum())


def _rewarded(torch: Any, outside: Any, value: Any, gradient: Any) -> tuple[int, float]:
    """Count the elements outside of a domain that are put further than all others where the loss is lower, by more than these lie apart; say what that pays."""
    if value.is_complex() or not outside.any() or outside.all():
        return 0, 0.0
    low, high = value[~outside].min(), value[~outside].max()
    ahead = torch.where(gradient > 0, low - value, value - high)
    paid = outside & (ahead > high - low) & (gradient != 0)
    return int(paid.sum()), float((ahead * gradient.abs())[paid].sum())


SILENCED = 0.1  # share of the elements whose finite gradient a change may set to 0

"""What an operation is called in a text: as in the program, and not by the names that torch has for its own parts."""

from __future__ import annotations

from whynan.trace.graph import Op
from whynan.trace.slicing import base

_MAKING = frozenset({"tensor", "as_tensor", "asarray"})
_CASTS = frozenset({"to", "type", "type_as", "half", "float", "double", "bfloat16", "cpu", "cuda", "cfloat", "cdouble", *_MAKING})
# torch's own steps on the way of a call: the calls that are known by their own name, and what to say of others
_INTERNAL = {
    "lift_fresh": (_MAKING, "a number"),
    "lift_fresh_copy": (_MAKING, "a number"),
    "to_copy": (_CASTS, "a cast"),
    "alias": (frozenset({"view_as"}), "detach"),
    "addmm": (frozenset({"linear"}), "addmm"),
}


def called(op: Op) -> str:
    """Return an operation's name as a person knows it: `softmax` for `_softmax`, `view` for `_unsafe_view`, `half` for the cast it makes.

    >>> called(Op(0, "aten._softmax.default", [], {}, None, "", False, -1, "torch.nn.functional.softmax", -1, ""))
    'softmax'
    >>> called(Op(0, "aten.lift_fresh.default", [], {}, None, "", False, -1, "torch.tensor", -1, ""))
    'torch.tensor'
    >>> called(Op(0, "aten._to_copy.default", [], {}, None, "", False, -1, "torch.nn.functional.linear", -1, ""))
    'a cast'
    """
    name = base(op).strip("_").removeprefix("unsafe_")
    if op.backward and name in ("detach", "alias"):
        return "gradient"  # autograd puts it into its place
    if name not in _INTERNAL:
        return name
    known, other = _INTERNAL[name]
    call = op.call.rsplit(".", 1)[-1]
    if op.backward or call not in known:
        return other
    return f"torch.{call}" if call in _MAKING else call

"""Checkpoints: saved unchecked, loaded with code in them, a learning rate that comes back."""

from __future__ import annotations

import ast
import re

from whynan.lint.calls import Operation
from whynan.lint.findings import Edit, Fix, Place
from whynan.lint.model import Function
from whynan.lint.rules.loops import own_nodes
from whynan.lint.rules.registry import on_call, on_function
from whynan.lint.spot import LOW, MEDIUM, Spot, place

_CHECK = re.compile(r"isnan|isfinite|isinf|whynan")


@on_call("load")
def loaded(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at torch.load without weights_only."""
    if op is None or op.module != "torch.load" or any(k.arg is None for k in node.keywords):
        return
    given = op.keywords.get("weights_only")
    if given is None:
        end = place(node)
        at = Place(end.end_line, end.end_column - 1, end.end_line, end.end_column - 1)
        fix = Fix((Edit(at, ", weights_only=True"),), False)
        words = ("torch.load without weights_only", "before torch 2.6 this runs whatever code the file holds", "pass weights_only=True")
        spot.report("WL109", *words, MEDIUM, fix=fix)
    elif isinstance(given, ast.Constant) and given.value is False:
        words = (
            "torch.load with weights_only=False",
            "the file may hold code, and it is run",
            "pass weights_only=True, with torch.serialization.add_safe_globals for what is missing",
        )
        spot.report("WL109", *words, LOW)


@on_function(r"torch\.save\(")
def saved(spot: Spot, function: Function | ast.Module) -> None:
    """Look at a training function that saves and never asks whether what it saves is finite."""
    if isinstance(function, ast.Module):
        return
    written = spot.module.lines[function.lineno - 1 : function.end_lineno]
    text = "\n".join(written)
    if ".backward(" not in text or "torch.save(" not in text or _CHECK.search(text):
        return
    for node in own_nodes(function):
        if isinstance(node, ast.Call) and spot.module.dotted(node.func) == "torch.save" and node.args and "state_dict" in text:
            words = (
                "checkpoint saved unchecked",
                "after the first nan every save replaces a good checkpoint by a dead one",
                "check the weights and buffers before saving, or save with whynan's keeper, which never lets a bad state push out the last good one",
            )
            spot.report("WL108", *words, MEDIUM, node=node)


@on_call("()load_state_dict")
def restored(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at an optimizer or scheduler restored after a learning rate was chosen."""
    if not isinstance(node.func, ast.Attribute):
        return
    target = ast.unparse(node.func.value)
    if not re.search(r"(optim|opt|sched|lr_)", target.rpartition(".")[2].lower()) or "scaler" in target:
        return
    after = "\n".join(spot.module.lines[node.lineno : node.lineno + 12])
    if re.search(r"param_groups|\.lr\b|\[.lr.\]|base_lrs", after):
        return
    made = re.search(rf"{re.escape(target)}\s*=.*(lr\s*=|Scheduler|LR\()", spot.module.text)
    words = (
        "learning rate overwritten by a restored state",
        "the state holds the old rate: the one configured here is not in effect",
        "set it again after loading: for g in optimizer.param_groups: g['lr'] = lr",
    )
    spot.report("WN607", *words, MEDIUM if made else LOW)

"""Training loops: checks in the wrong order, checks that miss, remedies that do harm."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from whynan.lint.calls import Operation, operation
from whynan.lint.model import Function
from whynan.lint.rules.registry import on_call, on_function, on_statement
from whynan.lint.spot import HIGH, LOW, MEDIUM, Spot

_CHECK = re.compile(r"isnan|isfinite|isinf")
_LARGEST_HALF = 6e4
_DISTRIBUTED = re.compile(r"DistributedDataParallel|init_process_group|FullyShardedDataParallel|fully_shard|Accelerator\(")


def own_nodes(function: Function | ast.Module) -> Iterator[ast.AST]:
    """The nodes of a function in the order of the source, nested functions and classes left out."""
    stack: list[ast.AST] = list(reversed(function.body))
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        yield node
        stack.extend(reversed(list(ast.iter_child_nodes(node))))


def _calls(function: Function | ast.Module) -> list[tuple[str, ast.Call]]:
    found = []
    for node in own_nodes(function):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
            if name:
                found.append((name, node))
    return sorted(found, key=lambda c: (c[1].lineno, c[1].col_offset))


def _text(node: ast.AST) -> str:
    return ast.unparse(node)


@on_function(r"\.backward\(|clip_grad_norm_?\(")
def training(spot: Spot, function: Function | ast.Module) -> None:
    """Look at the order of backward, unscale, clip, check and step."""
    calls = _calls(function)
    names = {n for n, _ in calls}
    if "backward" not in names and not names & {"clip_grad_norm_", "clip_grad_norm"}:
        return
    clips = [c for n, c in calls if n in ("clip_grad_norm_", "clip_grad_value_")]
    backwards = [c for n, c in calls if n == "backward"]
    _unscaled(spot, calls, clips)
    _late_check(spot, function, backwards)
    _norm(spot, function, [c for n, c in calls if n == "clip_grad_norm_"])
    _after_clipping(spot, calls, clips)
    _one_rank(spot, function)


def _unscaled(spot: Spot, calls: list[tuple[str, ast.Call]], clips: list[ast.Call]) -> None:
    scaled = [c for n, c in calls if n == "scale" and "scal" in _text(c.func).lower()]
    unscaled = [c.lineno for n, c in calls if n == "unscale_"]
    steps = [c.lineno for n, c in calls if n == "step" and "scaler" in _text(c.func).lower()]
    if not scaled or not steps:
        return
    for clip in clips:
        since = max((c.lineno for c in scaled if c.lineno < clip.lineno), default=None)
        if since is not None and not any(since <= u <= clip.lineno for u in unscaled) and any(s > clip.lineno for s in steps):
            words = (
                "gradients clipped before they are unscaled",
                "they are still multiplied by the loss scale (65536 at first): the clip shrinks every step to nothing",
                "call scaler.unscale_(optimizer) before the clip",
            )
            spot.report("WL101", *words, HIGH, node=clip)


def _late_check(spot: Spot, function: Function | ast.Module, backwards: list[ast.Call]) -> None:
    checks = [n for n in own_nodes(function) if isinstance(n, ast.If | ast.Assert) and _CHECK.search(_text(n.test)) and "loss" in _text(n.test)]
    for check in checks:
        before = [b for b in backwards if b.lineno < check.lineno and _same_block(function, b, check)]
        early = [c for c in checks if any(c.lineno < b.lineno for b in before)]
        if before and not early:
            words = ("loss checked after backward", "the gradients, and in the next step the moments, already hold the nan", "check the loss before backward")
            spot.report("WL102", *words, MEDIUM, node=check.test, origin=before[-1], origin_label="backward runs here")


def _same_block(function: Function | ast.Module, first: ast.AST, second: ast.AST) -> bool:
    """Whether both stand in the same innermost loop, so that one follows the other in every round."""
    loops = [n for n in own_nodes(function) if isinstance(n, ast.For | ast.While)]

    def innermost(node: ast.AST) -> ast.AST | None:
        around = [lp for lp in loops if lp.lineno <= node.lineno <= (lp.end_lineno or 0)]  # type: ignore[attr-defined]
        return max(around, key=lambda lp: lp.lineno) if around else None

    return innermost(first) is innermost(second)


def _norm(spot: Spot, function: Function | ast.Module, clips: list[ast.Call]) -> None:
    body = _text(function) if not isinstance(function, ast.Module) else ""
    for node in own_nodes(function):
        if isinstance(node, ast.Expr) and node.value in clips:
            call = node.value
            assert isinstance(call, ast.Call)
            if any(k.arg == "error_if_nonfinite" for k in call.keywords) or _CHECK.search(body) or "GradScaler" in spot.module.text:
                continue
            words = (
                "gradient norm thrown away",
                "an infinite norm multiplies every gradient by 0: inf * 0 is nan, and the step takes it",
                "keep the norm and skip the step where it is not finite, or pass error_if_nonfinite=True",
            )
            spot.report("WL105", *words, LOW, node=call)
        elif isinstance(node, ast.Assign) and node.value in clips and isinstance(node.targets[0], ast.Name):
            _only_nan(spot, function, node.targets[0].id)


def _only_nan(spot: Spot, function: Function | ast.Module, name: str) -> None:
    asked = [n for n in own_nodes(function) if isinstance(n, ast.If) and _decides(n)]
    tests = [n.test for n in asked if re.search(rf"\b{name}\b", _text(n.test)) and _CHECK.search(_text(n.test))]
    for test in tests:
        written = _text(test)
        if "isnan" in written and "isinf" not in written and "isfinite" not in written:
            words = (
                "gradient norm checked for nan only",
                "the first bad norm is usually inf: it passes, the clip multiplies inf by 0, and the weights become nan",
                "ask isfinite instead of isnan",
            )
            spot.report("WL115", *words, HIGH, node=test)


def _decides(node: ast.If) -> bool:
    """Whether a condition decides about the step, and does not only print."""
    leaves = (ast.Continue, ast.Break, ast.Return, ast.Raise)
    for part in (n for s in [*node.body, *node.orelse] for n in ast.walk(s)):
        if isinstance(part, leaves) or (isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in ("step", "zero_grad")):
            return True
    return False


def _after_clipping(spot: Spot, calls: list[tuple[str, ast.Call]], clips: list[ast.Call]) -> None:
    if not clips:
        return
    for name, call in calls:
        if name in ("isnan", "isfinite", "isinf") and re.search(r"\.grad\b", _text(call)) and call.lineno > clips[0].lineno:
            words = (
                "gradients checked after clipping",
                "one bad gradient makes the norm nan, and the clip makes every gradient nan: the check can no longer name the tensor",
                "check before the clip, or check the norm that the clip returns",
            )
            spot.report("WL106", *words, MEDIUM, node=call, origin=clips[0], origin_label="clipped here")
            return


def _one_rank(spot: Spot, function: Function | ast.Module) -> None:
    if not _DISTRIBUTED.search(spot.module.text):
        return
    for node in own_nodes(function):
        if isinstance(node, ast.If) and _CHECK.search(_text(node.test)) and any(isinstance(s, ast.Continue) for s in node.body):
            around = "\n".join(spot.module.lines[max(node.lineno - 8, 0) : (node.body[-1].end_lineno or node.lineno)])
            if not re.search(r"all_reduce|all_gather|broadcast|barrier|\.gather\(|\.reduce\(", around):
                words = (
                    "one rank leaves the step alone",
                    "the others wait in all-reduce for gradients that never come: the run hangs",
                    "agree first: all_reduce the flag, then every rank skips",
                )
                spot.report("WL107", *words, MEDIUM, node=node.test)


@on_statement(ast.Assign, ast.Expr, ast.If)
def zeroed(spot: Spot, node: ast.stmt) -> None:
    """Look at gradients whose nan entries are set to 0 before the step."""
    if not spot.mentions(".grad"):
        return
    if isinstance(node, ast.Assign):
        target, value = _text(node.targets[0]), _text(node.value)
        patched = re.search(r"\.grad\[.*(isnan|isfinite|isinf).*\]", target) or (
            target.endswith((".grad", ".grad.data")) and ("nan_to_num" in value or ("where" in value and _CHECK.search(value)))
        )
    elif isinstance(node, ast.Expr):
        value = _text(node.value)
        patched = re.search(r"nan_to_num_?\(\S*\.grad|\.grad(\.data)?\.nan_to_num_", value)
    elif isinstance(node, ast.If):
        body = " ".join(_text(s) for s in node.body)
        patched = (
            _CHECK.search(_text(node.test))
            and "grad" in _text(node.test)
            and re.search(r"\.grad(\.data)?\.zero_\(\)|set_to_none=False|\.grad = torch\.zeros", body)
            and not re.search(r"continue|return|raise|break", body)
        )
    else:
        return
    if patched:
        words = (
            "nan gradients zeroed and the step taken",
            "with momentum or Adam a zeroed gradient still moves the weights, and the cause stays",
            "skip the step, and find where the nan is born: whynan run",
        )
        spot.report("WL103", *words, HIGH, node=node.test if isinstance(node, ast.If) else node)


@on_statement(ast.Assert)
def asserted(spot: Spot, node: ast.stmt) -> None:
    """Look at asserts that wait for the device."""
    if not isinstance(node, ast.Assert) or not re.search(r"isnan|isfinite|isinf", written := _text(node.test)) or re.search(r"math\.|np\.|numpy", written):
        return
    if spot.scope.name in ("forward", "training_step", "__call__") or spot.frame.loops:
        words = (
            "check that waits for the device",
            "each call copies one number to the host: measured, a check per tensor makes a step 1.3 to 1.5 times as long",
            "let whynan watch: a flag on the device, read one step late",
        )
        spot.report("WL111", *words, MEDIUM if "torch" in written or ".any()" in written or ".all()" in written else LOW)


@on_statement(ast.Assign, ast.AugAssign)
def running(spot: Spot, node: ast.stmt) -> None:
    """Look at running averages: one nan stays in them for ever."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.BinOp) or not isinstance(node.value.op, ast.Add) or len(node.targets) != 1:
        return
    name, value = _text(node.targets[0]), node.value
    parts = [p for p in (value.left, value.right) if isinstance(p, ast.BinOp) and isinstance(p.op, ast.Mult)]
    if len(parts) != 2:
        return
    mine = [p for p in parts if name in (_text(p.left), _text(p.right))]
    other = [p for p in parts if p not in mine]
    if (
        len(mine) != 1
        or len(other) != 1
        or not re.search(r"(decay|momentum|beta|alpha|ema|0?\.\d+|rho|gamma)", _text(value))
        or not re.search(r"1(\.0)? - |0\.\d", _text(value))
    ):
        return
    fed = _text(other[0])
    body = _function_text(spot)
    if _CHECK.search(body) or not re.search(r"loss|\.item\(\)|\.mean\(|\.var\(|\.sum\(|grad|batch", fed):
        return
    words = (
        "running average that keeps a nan",
        "one nan in is nan for ever after",
        "take the value in only where it is finite: torch.where(torch.isfinite(x), ..., average)",
    )
    spot.report("WL110", *words, MEDIUM)


def _function_text(spot: Spot) -> str:
    node = spot.scope.node
    return "" if isinstance(node, ast.Module) else "\n".join(spot.module.lines[node.lineno - 1 : node.end_lineno])


@on_statement(ast.If)
def cut(spot: Spot, node: ast.stmt) -> None:
    """Look at a loss replaced by a constant in one branch."""
    if not isinstance(node, ast.If):
        return
    for statement in [*node.body, *node.orelse]:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
            op = operation(spot.module, statement.value)
            if op is None or op.name not in ("zeros_like", "tensor", "zeros", "new_zeros", "full_like") or "requires_grad" in op.keywords:
                continue
            if "loss" not in _text(statement.targets[0]).lower():
                continue
            name = _text(statement.targets[0])
            if _grows_later(spot, node, name):
                continue
            itself = op.name in ("zeros_like", "full_like") and op.operand is not None and _text(op.operand) == name
            checked = not re.search(r"is (not )?None", _text(node.test)) and (
                _CHECK.search(_text(node.test)) or re.search(r"==\s*0|<=\s*\S+|> 0|numel|len\(|\.any\(|not ", _text(node.test))
            )
            words = (
                "loss replaced by a constant",
                "a constant has no graph: backward raises, or the batch silently teaches nothing",
                "keep the graph: prediction.sum() * 0, or skip the batch",
            )
            spot.report("WL112", *words, (HIGH if itself else MEDIUM) if checked else LOW, node=statement)


def _grows_later(spot: Spot, node: ast.If, name: str) -> bool:
    """Whether the constant is only the start of a sum."""
    lines = spot.module.lines[node.lineno - 1 : (node.end_lineno or node.lineno) + 20]
    return any(re.search(rf"\b{re.escape(name)} (\+= |= {re.escape(name)} \+ )", line) for line in lines)


@on_call("clamp", "clamp_max", "minimum")
def clamped_loss(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at a loss that is cut off from above."""
    if op is None or op.operand is None or (op.argument(2, "max") is None and op.name == "clamp"):
        return
    written = _text(op.operand)
    bound = spot.of(op.argument(2 if op.name == "clamp" else 1, "max", "other"))
    if bound.high >= _LARGEST_HALF and (bound.number is not None or bound.kind == "foreign"):
        return  # stops only what would be inf in half
    if re.fullmatch(r"(self\.)?(\w*_)?loss(es)?", written) and (op.name != "minimum" or bound.number is not None):
        words = (
            "loss cut off from above",
            "past the bound the gradient is exactly 0: the worst samples teach nothing",
            "use a loss that grows slower (Huber), or clip the gradient instead",
        )
        spot.report("WL113", *words, HIGH if bound.number is not None else MEDIUM)


@on_function(r"/=? *\(?[\w.\[\]]+\.sum\(|/=? *torch\.sum\(")
def iterated(spot: Spot, function: Function | ast.Module) -> None:
    """Look at rows and columns normalised in turn, outside log space (Sinkhorn)."""
    for loop in own_nodes(function):
        if not isinstance(loop, ast.For | ast.While):
            continue
        quotients: list[tuple[ast.expr | ast.stmt, str]] = []
        for node in ast.walk(loop):
            below = (
                node.right
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
                else node.value
                if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div)
                else None
            )
            op = operation(spot.module, below) if isinstance(below, ast.Call) else None
            if op is not None and op.name == "sum" and op.argument(1, "dim") is not None and isinstance(node, ast.BinOp | ast.AugAssign):
                quotients.append((node, _text(op.argument(1, "dim"))))  # type: ignore[arg-type]
        if len({d for _, d in quotients}) >= 2:
            words = (
                "rows and columns normalised in turn, outside log space",
                "a row whose entries underflowed has sum 0: 0 / 0 is nan",
                "iterate on log values with logsumexp",
            )
            spot.report("WL116", *words, HIGH, node=quotients[0][0])
            return


@on_function(r" @ self\.")
def recurrence(spot: Spot, function: Function | ast.Module) -> None:
    """Look at a state multiplied by the same matrix in every round of a loop."""
    for loop in own_nodes(function):
        if not isinstance(loop, ast.For) or isinstance(function, ast.Module):
            continue
        names = {t.id for s in ast.walk(loop) if isinstance(s, ast.Assign) for t in s.targets if isinstance(t, ast.Name)}
        for node in ast.walk(loop):
            if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.MatMult):
                continue
            if isinstance(node.left, ast.Name) and node.left.id in names and _text(node.right).startswith("self."):
                words = (
                    "state multiplied by one matrix again and again",
                    "a largest singular value above 1 grows with every round: values, or gradients, leave the range",
                    "normalise the state, or bound the matrix (orthogonal, spectral norm); clip the gradients",
                )
                spot.report("WN503", *words, LOW, node=node)
                break

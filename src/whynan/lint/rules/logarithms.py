"""Logarithms of what can be 0 or negative, and of what has a stable form of its own."""

from __future__ import annotations

import ast
from math import inf

from whynan.lint.callees import layer, owner_of
from whynan.lint.callers import NO_SLOPE, made_of
from whynan.lint.calls import Operation, operation, same
from whynan.lint.edits import name_of, replaced, rest_of_call, source
from whynan.lint.facts import OTHER, TORCH, Fact
from whynan.lint.findings import Confidence, Fix
from whynan.lint.picked import picked
from whynan.lint.rules.exponentials import SHIFTED
from whynan.lint.rules.registry import on_call
from whynan.lint.spot import HIGH, LOW, MEDIUM, Spot

_EDGE = {"log1p": -1.0}
_SATURATED = {
    "softmax": ("log of a softmax", "a softmax rounds to 0: log(0) is -inf", "take log_softmax of the logits"),
    "sigmoid": ("log of a sigmoid", "a sigmoid rounds to 0 below about -104: log(0) is -inf", "take logsigmoid of the logits"),
    "one-minus-sigmoid": ("log of one minus a sigmoid", "a sigmoid rounds to 1 above about 17: log(0) is -inf", "take logsigmoid of the negated logits"),
    "one-minus-softmax": ("log of one minus a softmax", "a softmax rounds to 1: log(0) is -inf", "work with the logits, or clamp away from 0"),
    "one-minus-probability": (
        "log of one minus a probability",
        "the probability rounds to 1: log(0) is -inf",
        "work with the logits, or use log1p(-exp(log_p)) with log_p below 0",
    ),
    "one-minus-tanh-squared": ("log of 1 - tanh(x)**2", "tanh rounds to 1 above about 9: log(0) is -inf", "use 2 * (log(2) - x - softplus(-2 * x))"),
    "probability": ("log of a probability", "exp of a log-probability underflows to 0: log(0) is -inf", "keep the log-probability"),
}
_ZEROES = frozenset(
    {
        "relu", "abs", "square", "sum-squares", "mean-squares", "norm", "std", "var", "mask-sum", "count", "sum-abs", "masked-sum",
        "root-sum-squares", "root-mean-squares", "matmul", "one-hot", "uniform", "range", "scattered-sum", "masked-product", "hypot", "sum", "mean",
        "power", "root",
    }
)  # fmt: skip


@on_call("log", "log2", "log10", "log1p")
def logarithm(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at the argument of a logarithm."""
    if op is None or op.operand is None or _covered(spot) or (not op.module and op.keywords):  # torch's method takes none: another library's
        return
    fact = spot.of(op.operand)
    edge = _EDGE.get(op.name, 0.0)
    if _by_hand(spot, op, fact, node) or fact.owner == OTHER:
        return
    if op.name == "log1p":
        _log1p(spot, op, fact)
        return
    if fact.low > edge or fact.eased or (fact.positive and fact.kind not in _SATURATED):
        return
    _judge(spot, op, fact, node)


def _covered(spot: Spot) -> bool:
    return any(
        isinstance(o, ast.Call) and isinstance(o.func, ast.Attribute) and o.func.attr in ("where", "nan_to_num", "masked_fill", "clamp", "clamp_min")
        for o in spot.above()
    )


def _judge(spot: Spot, op: Operation, fact: Fact, node: ast.Call) -> None:
    assert op.operand is not None
    guard = spot.guard(op.operand)
    if guard == 2:
        return
    owner = TORCH if op.sure else fact.owner
    if fact.kind in _SATURATED:
        chosen = picked(op.operand, spot.scope) if fact.kind == "softmax" else 0
        if chosen == 2:
            return
        title, label, help_ = _SATURATED[fact.kind]
        code = _times_target(spot, op, fact)
        _report(
            spot,
            code,
            (title, label, help_),
            HIGH if spot.given(op.operand) and not chosen and fact.graph and not _narrow(spot, fact) else MEDIUM,
            owner,
            fact,
            _saturated_fix(spot, op, fact, node),
            op.operand,
        )
    elif fact.low >= 0 and fact.kind in _ZEROES:
        sure = HIGH if fact.kind in ("relu", "count", "one-hot") else MEDIUM
        written = fact.kind.replace("-", " ")
        _report(
            spot,
            "WN101",
            (f"log of a {written} that can be 0", "log(0) is -inf, and its slope 1/x is infinite", "add an eps inside the logarithm"),
            sure if not guard else sure.lowered(),
            owner,
            fact,
        )
    elif fact.low == -inf or fact.low < 0:
        _unknown(spot, op, fact, owner)
    else:
        _report(spot, "WN101", ("log of a value that can be 0", "log(0) is -inf", "add an eps inside the logarithm, or clamp"), LOW, owner, fact)


def _narrow(spot: Spot, fact: Fact) -> bool:
    """Whether what was squashed is a cosine over a temperature, which stays within what a sigmoid bears at the usual temperatures."""
    return fact.kind == "sigmoid" and fact.inner is not None and spot.of(fact.inner).kind == "scaled-cosine"


def _unknown(spot: Spot, op: Operation, fact: Fact, owner: int) -> None:
    kinds = {
        "linear": MEDIUM,
        "matmul": MEDIUM,
        "weight": MEDIUM,
        "normal": MEDIUM,
        "difference": MEDIUM,
        "tanh": MEDIUM,
        "unit": MEDIUM,
        "cosine": HIGH,
        "cos": MEDIUM,
        "sin": MEDIUM,
    }
    if fact.kind in kinds:
        words = ("log of a value that can be negative", "log of a negative number is nan", "make it positive by construction: softplus or exp")
        _report(spot, "WN102", words, kinds[fact.kind], owner, fact)
    elif fact.kind == "sum-of-two":
        _report(spot, "WN102", ("log of a sum that can be negative", "log of a negative number is nan", "make it positive by construction"), LOW, owner, fact)
    elif owner == TORCH:
        words = (
            "log of a value that nothing keeps above 0",
            "log(0) is -inf, log of a negative number is nan",
            "clamp it, or take the logarithm before it can round to 0",
        )
        _report(spot, _times_target(spot, op, fact), words, LOW, owner, fact)


def _report(
    spot: Spot, code: str, words: tuple[str, str, str], confidence: Confidence, owner: int, fact: Fact, fix: Fix | None = None, of: ast.expr | None = None
) -> None:
    sure = spot.sure(confidence, owner)
    if sure is not None and spot.covered_later():
        sure = LOW
    spot.report(code, *words, sure, origin=fact.node, origin_label="the argument was made here", fix=fix, of=of)


def _times_target(spot: Spot, op: Operation, fact: Fact) -> str:
    """`y * log(p)` with another y: 0 times -inf; `p * log(p)` is the log of zero."""
    for outer in spot.above():
        if isinstance(outer, ast.BinOp) and isinstance(outer.op, ast.Mult):
            other = outer.right if outer.left is spot.node else outer.left
            return "WN101" if same(other, op.operand) or isinstance(other, ast.Constant | ast.UnaryOp) else "WN302"
        if not isinstance(outer, ast.UnaryOp):
            return "WN101"
    return "WN101"


def _log1p(spot: Spot, op: Operation, fact: Fact) -> None:
    owner = TORCH if op.sure else fact.owner
    if fact.low > -1 or fact.eased:
        return
    if fact.kind in ("negated",) and fact.low == -1.0:
        words = ("log1p of minus a probability", "where the probability rounds to 1, log1p(-1) is -inf", "work with the logits: logsigmoid(-logit)")
        known = isinstance(op.operand, ast.UnaryOp) and spot.of(op.operand.operand).kind in ("sigmoid", "softmax")
        _report(spot, "WN101", words, HIGH if known else MEDIUM, owner, fact)
    elif fact.owner == TORCH and fact.low == -inf:
        words = ("log1p of a value that can be below -1", "log1p(-1) is -inf, below that it is nan", "keep the argument above -1: softplus, relu or a clamp")
        _report(spot, "WN102", words, LOW, owner, fact)


def _by_hand(spot: Spot, op: Operation, fact: Fact, node: ast.Call) -> bool:
    """log(1 + exp(x)), log(sum(exp(x))), log(cosh(x)), log(1 + x)."""
    assert op.operand is not None
    exp = _unbounded_exp(spot, op.operand)
    if op.name == "log1p" and exp is not None and _is_op(spot, op.operand, "exp"):
        _softplus(spot, node, exp)
        return True
    if op.name != "log":
        return False
    one = _one_plus(spot, op.operand)
    if one is not None:
        inner = _unbounded_exp(spot, one)
        if inner is not None and _is_op(spot, one, "exp"):
            _softplus(spot, node, inner)
            return True
        if op.sure and fact.low > 0:
            name = name_of(spot, "torch.log1p")
            fix = replaced(node, f"{name}({source(spot, one)})", True) if name else None
            words = ("log(1 + x) written out", "1 + x rounds to 1 for x below 1e-7: log gives 0", "use log1p, which keeps small x")
            spot.report("WN204", *words, LOW, fix=fix)
            return True
    if fact.kind == "sum-exp":
        return _logsumexp(spot, op, node)
    if fact.kind == "cosh":
        words = ("log(cosh(x)) written out", "cosh overflows above 89: the loss is inf", "use x + softplus(-2 * x) - log(2)")
        spot.report("WN201", *words, HIGH if fact.owner == TORCH else MEDIUM, node=fact.node if isinstance(fact.node, ast.expr) else None)
        return True
    return False


def _softplus(spot: Spot, node: ast.Call, inner: ast.expr) -> None:
    name = name_of(spot, "torch.nn.functional.softplus")
    fix = replaced(node, f"{name}({source(spot, inner)})", True) if name else None
    spot.report(
        "WN201",
        "softplus written by hand",
        "exp(x) overflows above 88 in float32, 11 in half: log(inf) is inf",
        "use torch.nn.functional.softplus",
        _overflow(spot, inner),
        fix=fix,
    )


def _overflow(spot: Spot, exponent: ast.expr) -> Confidence:
    """How likely an exponent passes 88: not where a condition asks about it, nor where it is a weight, which only divergence takes there."""
    return MEDIUM if spot.guard(exponent) or spot.of(exponent).kind in ("weight", "attribute", "empty") else HIGH


def _logsumexp(spot: Spot, op: Operation, node: ast.Call) -> bool:
    summed = _definition(spot, op.operand)
    if not isinstance(summed, ast.Call):
        return False
    total = operation(spot.module, summed)
    if total is None or total.name != "sum" or total.operand is None:
        return False
    inner = _unbounded_exp(spot, total.operand)
    if inner is None:
        return False
    fix = None
    name = name_of(spot, "torch.logsumexp")
    arguments = rest_of_call(spot, summed, 1 if total.module else 0)
    if name and arguments and _is_op(spot, total.operand, "exp") and summed is op.operand:
        fix = replaced(node, f"{name}({source(spot, inner)}{arguments})", True)
    words = ("logsumexp written by hand", "exp overflows above 88: the sum is inf; far below, it is 0 and its log -inf", "use torch.logsumexp")
    shifted = spot.of(inner).kind == "difference" or SHIFTED.search(spot.function_text) is not None
    spot.report("WN201", *words, spot.sure(MEDIUM if shifted else _overflow(spot, inner), spot.of(inner).owner or TORCH), fix=fix)
    return True


def _unbounded_exp(spot: Spot, node: ast.expr) -> ast.expr | None:
    """x, where an expression is exp(x), also times something, and nothing bounds x from above."""
    node = _definition(spot, node) or node
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _unbounded_exp(spot, node.left) or _unbounded_exp(spot, node.right)
    op = operation(spot.module, node) if isinstance(node, ast.Call) else None
    if op is None or op.name != "exp" or op.operand is None:
        return None
    inner = spot.of(op.operand)
    return op.operand if inner.high > 80 and not inner.eased and inner.owner != OTHER else None


def _is_op(spot: Spot, node: ast.expr, name: str) -> bool:
    op = operation(spot.module, node) if isinstance(node, ast.Call) else None
    return op is not None and op.name == name


def _definition(spot: Spot, node: ast.expr | None) -> ast.expr | None:
    """The expression a name was last assigned, or the node itself."""
    if isinstance(node, ast.Name):
        bound = spot.scope.reaching(node.id, (node.lineno, node.col_offset))
        return bound[0].value if bound and bound[0].index is None and not bound[0].patch and not bound[0].loop else None
    return node


def _one_plus(spot: Spot, node: ast.expr) -> ast.expr | None:
    node = _definition(spot, node) or node
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        for a, b in ((node.left, node.right), (node.right, node.left)):
            if isinstance(a, ast.Constant) and a.value in (1, 1.0) and not isinstance(b, ast.Constant):
                return b
    return None


def _saturated_fix(spot: Spot, op: Operation, fact: Fact, node: ast.Call) -> Fix | None:
    """log(softmax(x, dim)) → log_softmax(x, dim); log(sigmoid(x)) → logsigmoid(x)."""
    inner = op.operand
    made = operation(spot.module, inner) if isinstance(inner, ast.Call) else None
    if made is None or made.operand is None or op.name != "log":
        return None
    if made.name == "softmax" and fact.kind == "softmax":
        name = name_of(spot, "torch.log_softmax")
        return replaced(node, f"{name}({source(spot, made.operand)}{rest_of_call(spot, made.call, 1 if made.module else 0)})", True) if name else None
    if made.name == "sigmoid" and fact.kind == "sigmoid":
        name = name_of(spot, "torch.nn.functional.logsigmoid")
        return replaced(node, f"{name}({source(spot, made.operand)})", True) if name else None
    return None


@on_call("xlogy", "entr")
def x_log_y(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at x log x, whose slope at 0 is infinite."""
    if op is None or not op.operands:
        return
    inner = op.operands[-1]
    fact = spot.of(inner)
    if fact.low <= 0 and not fact.eased and (op.sure or fact.owner == TORCH):
        spot.report(
            "WN501",
            f"slope of {op.name} at 0",
            "the value at 0 is 0, the slope is infinite",
            "clamp the argument of the logarithm, or start from log-probabilities",
            MEDIUM if op.name == "xlogy" and len(op.operands) == 2 and same(*op.operands) else LOW,
        )


@on_call("binary_cross_entropy", "BCELoss")
def entropy_after_sigmoid(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at a binary cross entropy of a sigmoid."""
    if op is None or op.name != "binary_cross_entropy" or not op.operands:
        return
    fact = spot.of(op.operands[0])
    if fact.kind != "sigmoid":
        return
    made = operation(spot.module, op.operands[0]) if isinstance(op.operands[0], ast.Call) else None
    name = name_of(spot, "torch.nn.functional.binary_cross_entropy_with_logits")
    fix = None
    if made is not None and made.name == "sigmoid" and made.operand is not None and name:
        fix = replaced(node, f"{name}({source(spot, made.operand)}{rest_of_call(spot, node, 1)})", True)
    words = (
        "binary cross entropy of a sigmoid",
        "a saturated sigmoid is exactly 0 or 1: the loss stops at 100 and its gradient is wrong; in half it raises",
        "use binary_cross_entropy_with_logits on the logits",
    )
    spot.report("WN101", *words, _trained(spot, op.operands[0]), origin=fact.node, origin_label="the sigmoid", fix=fix, of=op.operands[0])


@on_call("()")
def module_after_sigmoid(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at nn.BCELoss()(sigmoid(x), y)."""
    if not node.args or not isinstance(node.func, ast.Name | ast.Attribute) or len(node.args) != 2 or layer(node.func, spot.scope) != "BCELoss":
        return
    if spot.of(node.args[0]).kind == "sigmoid":
        words = (
            "binary cross entropy of a sigmoid",
            "a saturated sigmoid is exactly 0 or 1: the loss stops at 100 and its gradient is wrong",
            "use BCEWithLogitsLoss on the logits",
        )
        spot.report("WN101", *words, _trained(spot, node.args[0]), origin=spot.of(node.args[0]).node, origin_label="the sigmoid", of=node.args[0])


def _trained(spot: Spot, given: ast.expr) -> Confidence:
    """Medium where no gradient is wanted through a probability, or where the network that gives it is made anew in this function and never trained."""
    written = made_of(given, spot.scope)
    if NO_SLOPE.search(written):
        return MEDIUM
    fresh = any(owner_of(c.func, spot.scope) is not None and _is_local(c.func, spot) for c in _calls(given, spot))
    return MEDIUM if fresh and ".step(" not in spot.function_text else HIGH


def _calls(node: ast.expr, spot: Spot) -> list[ast.Call]:
    made = _definition(spot, node)
    return [c for c in ast.walk(made) if isinstance(c, ast.Call)] if made is not None else []


def _is_local(called: ast.expr, spot: Spot) -> bool:
    return isinstance(called, ast.Name) and called.id in spot.scope.bindings and not isinstance(spot.scope.node, ast.Module)

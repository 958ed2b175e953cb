"""Denominators that can be 0: norms, spreads, counts, sums, what is left of a saturated probability, temperatures."""

from __future__ import annotations

import ast
import re

from whynan.lint.aftermath import patched
from whynan.lint.callers import PADDED, made_of
from whynan.lint.calls import Operation, names_in
from whynan.lint.edits import wrapped
from whynan.lint.facts import COUNTS, NORMS, SATURATING, TORCH, Fact
from whynan.lint.findings import Confidence
from whynan.lint.rules.registry import on_binary, on_call, on_statement
from whynan.lint.spot import HIGH, LOW, MEDIUM, Spot

_TEMPERATURE = re.compile(r"(^|_|\.)(temp|temperature|tau|t_scale)($|_)", re.IGNORECASE)
_DRAWN_MASK = re.compile(r"mask_?ratio|random_?mask")  # a share above 0 is masked; so does a tokenizer mark its special tokens in every text
_MASK_NAME = re.compile(r"mask|valid|keep|observed|ignore|!=|==|>|<|~")


@on_binary(ast.Div)
def quotient(spot: Spot, node: ast.BinOp) -> None:
    """Look at a / b."""
    examine(spot, node.left, node.right)


@on_call("div")
def called(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at torch.div(a, b), a.div(b), a.div_(b)."""
    if op is not None and len(op.operands) >= 2 and "rounding_mode" not in op.keywords:
        examine(spot, op.operands[0], op.operands[1])


@on_statement(ast.AugAssign)
def in_place(spot: Spot, node: ast.stmt) -> None:
    """Look at a /= b."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        examine(spot, node.target, node.value)


@on_call("remainder", "fmod")
def remainder(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at a divisor of remainder and fmod."""
    if op is None or len(op.operands) < 2:
        return
    below = spot.of(op.operands[1])
    if below.number is None and below.can_be_zero and spot.guard(op.operands[1]) < 2 and (op.sure or below.owner == TORCH):
        spot.report(
            "WN109",
            f"{op.name} by a value that can be 0",
            f"{op.name}(x, 0) is nan",
            "keep the divisor away from 0, or select it before: torch.where(d == 0, 1.0, d)",
            LOW,
        )


def examine(spot: Spot, above: ast.expr, below: ast.expr) -> None:
    """Judge a quotient by what is known of its denominator."""
    fact = spot.of(below)
    if not fact.can_be_zero or fact.number is not None or fact.kind in ("size", "foreign", "epsilon", "number", "loop", "ones"):
        return
    top = spot.of(above)
    owner = max(fact.owner, top.owner) if top.kind != "foreign" else fact.owner
    judged = _judge(spot, above, below, fact, owner)
    if judged is None:
        return
    code, confidence, title, label, help_ = judged
    sure = spot.sure(confidence, owner)
    guard = spot.guard(below)
    if sure is None or guard == 2 or _inside_where(spot):
        return
    if guard == 1 or not spot.given(below):
        sure = sure.lowered()
    if patched(spot):
        _patched_quotient(spot, fact, top)
        return
    if spot.covered_later():
        sure = LOW
    fix = wrapped(spot, below, ".clamp_min(1)" if fact.kind in COUNTS else ".clamp_min(1e-6)")
    said = f"the denominator is a {_SAID.get(fact.kind, fact.kind.replace('-', ' '))}"
    spot.report(code, title, label, help_, sure, origin=fact.node, origin_label=said, fix=fix, of=below)


def _patched_quotient(spot: Spot, below: Fact, above: Fact) -> None:
    """The value is mended under a mask in the lines that follow; what is left is the slope."""
    if below.graph and spot.learning:
        words = (
            "entries overwritten after the division, not before",
            "the entry that is overwritten still sends back 0 * inf: nan",
            "make the denominator safe first: torch.where(d == 0, 1.0, d)",
        )
        spot.report("WN502", *words, spot.sure(MEDIUM, max(below.owner, above.owner)))


Judged = tuple[str, Confidence, str, str, str]
_SAID = {"sum-squares": "sum of squares", "mean-squares": "mean of squares", "root-mean-squares": "root mean square", "sum-abs": "sum of magnitudes"}


def _is_centred(node: ast.AST) -> bool:
    """Whether something is reduced from which its own mean was taken: x - x.mean()."""
    for part in ast.walk(node):
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub):
            means = [c for c in ast.walk(part.right) if isinstance(c, ast.Call) and isinstance(c.func, ast.Attribute) and c.func.attr == "mean"]
            left = ast.dump(part.left)
            if any(left in (ast.dump(m.func.value), *map(ast.dump, m.args)) for m in means if isinstance(m.func, ast.Attribute)):
                return True
    return False


def _judge(spot: Spot, above: ast.expr, below: ast.expr, fact: Fact, owner: int) -> Judged | None:
    written = spot.text(below)
    kin = _kin(spot, above, below)
    if fact.kind in NORMS or fact.kind in ("root-mean-squares", "hypot", "distance"):
        return (
            "WN104" if kin else "WN103",
            HIGH if kin and spot.direct(below) else MEDIUM,
            "division by a norm that can be 0",
            f"`{written}` is 0 for a zero vector: 0 / 0 is nan",
            _norm_help(below),
        )
    if fact.kind in ("std", "var"):
        return (
            "WN404",
            HIGH if kin and spot.direct(below) else MEDIUM,
            "division by a spread that can be 0",
            f"`{written}` is 0 where all values are the same",
            "put eps under the root: (x.var(...) + eps).sqrt()",
        )
    if fact.kind == "range":
        return (
            "WN404",
            HIGH if spot.direct(above) else MEDIUM,
            "division by a range that can be 0",
            f"`{written}` is 0 where all values are the same: 0 / 0 is nan",
            "add an eps to the range, or treat a constant input apart",
        )
    if fact.kind in COUNTS or (fact.kind in ("sum", "mean") and _MASK_NAME.search(written)):
        return _count(spot, above, below, fact, written)
    if fact.kind in SATURATING and fact.kind.startswith("one-minus"):
        return (
            "WN103",
            HIGH,
            "division by what a saturated probability leaves",
            f"`{written}` rounds to 0 where the probability rounds to 1",
            "work with the logits: exp(logit) is p / (1 - p)",
        )
    if fact.kind in ("sum-squares", "mean-squares") and fact.node is not None and _is_centred(fact.node):
        return (
            "WN404",
            MEDIUM,
            "division by a variance that can be 0",
            f"`{written}` is 0, or almost, where all rows are the same: the quotient is nan, inf or absurdly large",
            "divide by a running variance, or leave such a batch out; an eps only makes the quotient huge instead of infinite",
        )
    if fact.kind in ("sum", "masked-sum", "sum-abs", "sum-squares", "scattered-sum", "mean-squares"):
        return _total(fact, written, kin and spot.direct(below))
    if fact.kind in ("relu", "abs", "square", "masked-product") and fact.nonnegative:
        return "WN103", MEDIUM, "division by a value that can be 0", f"`{written}` can be exactly 0", "add an eps, or divide only where it is not 0"
    if fact.kind == "max" and (kin or fact.nonnegative):
        return (
            "WN104",
            HIGH if kin and fact.nonnegative and spot.direct(below) else MEDIUM,
            "division by a maximum that can be 0",
            f"`{written}` is 0 where every value is 0",
            "clamp the maximum from below",
        )
    if _TEMPERATURE.search(written) and fact.kind in ("weight", "attribute", "parameter", "argument", ""):
        return _temperature(fact, written)
    if fact.kind in ("sum-of-two", "difference", "product") and fact.nonnegative:
        return (
            "WN104",
            MEDIUM,
            "division by a total that can be 0",
            f"`{written}` is 0 where every part is 0",
            "add a smoothing term to numerator and denominator",
        )
    if owner != TORCH or fact.kind in ("softmax", "exp", "sum-exp", "argument", "integer", "full", "constant-tensor", "arange", "sum-softmax", "softplus"):
        return None
    return "WN103", LOW, "division by a tensor that nothing keeps from 0", f"x / 0 is inf where `{written}` is 0", "clamp it, or divide only where it is not 0"


def _count(spot: Spot, above: ast.expr, below: ast.expr, fact: Fact, written: str) -> Judged:
    if fact.kind == "count":
        return (
            "WN103",
            HIGH if fact.inner is not None and spot.direct(fact.inner) else MEDIUM,
            "division by a count that can be 0",
            f"`{written}` is 0 for what does not occur",
            "divide by the count clamped at 1: count.clamp_min(1)",
        )
    if spot.of(above).number is not None:
        return (
            "WN103",
            MEDIUM,
            "division by a count that can be 0",
            f"`{written}` is 0 where nothing is selected",
            "divide by the count clamped at 1: mask.sum().clamp_min(1)",
        )
    sure = HIGH if fact.kind == "mask-sum" and _plain_mask(spot, below) else MEDIUM
    return (
        "WN402",
        sure,
        "mean over a mask that can be empty",
        f"`{written}` is 0 where nothing is selected: 0 / 0 is nan",
        "divide by the sum clamped at 1: mask.sum().clamp_min(1)",
    )


def _plain_mask(spot: Spot, below: ast.expr) -> bool:
    """Whether the mask is one that is given, or compares with an ignored value: nothing says it selects anything, as a mask of padding does."""
    base = spot.values.base(below, spot.scope)
    written = ast.unparse(base)
    if PADDED.search(made_of(base, spot.scope)) or _DRAWN_MASK.search(spot.module.text):
        return False
    return re.fullmatch(r"~?\(?[\w.]*(mask|valid|weights?)[\w.]*\)?(\[.*\])?", written) is not None or "ignore" in written


def _total(fact: Fact, written: str, kin: bool) -> Judged:
    sure = HIGH if fact.kind == "sum-abs" and kin else MEDIUM if kin or fact.nonnegative else LOW
    return "WN104", sure, "division by a sum that can be 0", f"`{written}` is 0 where every term is 0: 0 / 0 is nan", "add an eps, or clamp the sum from below"


def _temperature(fact: Fact, written: str) -> Judged:
    learned = fact.kind == "weight"
    label = f"`{written}` is learned and nothing keeps it from 0" if learned else f"nothing keeps `{written}` from 0"
    return "WN103", MEDIUM if learned else LOW, "temperature that can reach 0", label, "learn its logarithm and clamp it, or clamp the temperature from below"


def _norm_help(below: ast.expr) -> str:
    return "use torch.nn.functional.normalize, or add an eps under the root"


def _kin(spot: Spot, above: ast.expr, below: ast.expr) -> bool:
    """Whether numerator and denominator are made from the same value, so that both are 0 together."""
    mine = _roots(spot, above)
    return bool(mine & _roots(spot, below))


def _roots(spot: Spot, node: ast.expr) -> set[str]:
    names = names_in(node)
    for name in list(names):
        for bound in (spot.scope.reaching(name, (node.lineno, node.col_offset)) or [])[:1]:
            if bound.value is not None and not bound.loop:
                names |= names_in(bound.value)
    return names - {"self", "torch", "F", "dim", "eps"}


def _inside_where(spot: Spot) -> bool:
    """A quotient in an arm of where is judged by the rule for where."""
    for outer in spot.above():
        if isinstance(outer, ast.Call):
            name = outer.func.attr if isinstance(outer.func, ast.Attribute) else ""
            if name in ("where", "nan_to_num", "masked_fill"):
                return True
    return False

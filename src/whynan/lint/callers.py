"""What the callers of a function pass for the value that a finding is about.

A function judged by itself may be given anything. Where the project shows its calls, the arguments say more: a finding stays sure only if
one of them can be at the edge; where nobody calls it, only if it is a loss, a metric or a method of a module.
"""

from __future__ import annotations

import ast
import re
from enum import Enum, auto

from whynan.lint import gradients
from whynan.lint.calls import operation
from whynan.lint.facts import OTHER, Fact
from whynan.lint.findings import Confidence
from whynan.lint.guards import guard
from whynan.lint.model import Function, Scope
from whynan.lint.sites import Site, calls_of
from whynan.lint.values import Values

HAZARDS = {
    "WN101": "score",
    "WN103": "zero",
    "WN104": "zero",
    "WN106": "zero",
    "WN201": "score",
    "WN302": "score",
    "WN303": "score",
    "WN402": "mask",
    "WN404": "spread",
    "WN501": "slope",
    "WN502": "slope",
    "WL116": "score",
}
"""What has to be true of a value for a code: it is 0, a mask of nothing, constant, large, or 0 with a gradient through it."""
_STRICT = frozenset({"zero", "mask", "slope"})  # what is not known of an argument speaks against these
_RANDOM = frozenset({"normal", "uniform", "randint"})
_NEVER_ZERO = _RANDOM | {"unit", "softmax", "exp", "ones", "eye", "probability", "constant-tensor", "sigmoid", "softplus", "epsilon"}
_REACHES_ZERO = frozenset({"linear", "module", "relu", "difference", "matmul", "weight", "product", "mean", "sum", "abs", "zeros", "scattered-sum"})
_MEASURES = re.compile(r"[Ll]oss|[Cc]riteri|(?<![a-z])[Mm]etric|[Dd]iverg|[Pp]enalt|[Oo]bjective|[Rr]egulari[sz]|(?<![a-z])[Ee]rror")
NO_SLOPE = re.compile(r"\.detach\(|state_dict|\.numpy\(|from_numpy|no_grad|\.data\b|\.item\(")
PADDED = re.compile(r"pad|lengths?(?![a-z])|seq_?len|attention_mask|_lens?\b|arange", re.IGNORECASE)
"""A mask of what is not padding: every sample has at least its first token."""
_IGNORED = re.compile(r"ignore|label|valid|target", re.IGNORECASE)
_BATCH = re.compile(r"^(batch|data|graph)(_|$)")
_MARKED = re.compile(r"no[nt]_?diff", re.IGNORECASE)
_DEPTH = 3
_BUDGET = 60  # calls looked at for one finding, those of callers of callers included: keeps the time linear
_STEPS = 40


class Given(Enum):
    """What the callers pass."""

    KEPT = auto()  # every call keeps it from the edge
    UNKNOWN = auto()
    EDGE = auto()  # at least one can pass it


def settle(code: str, node: ast.expr, scope: Scope, values: Values) -> Confidence:
    """The confidence of a finding that is sure where its function is judged by itself."""
    hazard = HAZARDS[code]
    if hazard == "slope" and (NO_SLOPE.search(made_of(node, scope)) or _undifferentiable(scope)):
        return Confidence.MEDIUM
    names = roots(node, scope)
    if not names or isinstance(scope.node, ast.Module | ast.Lambda):
        return Confidence.HIGH
    if hazard == "slope" and any(_holds_data(name, scope) for name in names):
        return Confidence.MEDIUM
    found = [_passed(scope.node, scope, name, hazard, values) for name in names]
    if Given.EDGE in found:
        return Confidence.HIGH
    if all(f is Given.KEPT for f in found) or (hazard in _STRICT and not (hazard == "zero" and measures(scope))):
        return Confidence.MEDIUM
    return Confidence.HIGH


def _holds_data(name: str, scope: Scope) -> bool:
    """Whether a parameter is a batch, not a tensor: its entries are data, and nobody wants their gradient."""
    annotation = scope.parameter(name)[2]
    written = ast.unparse(annotation) if annotation is not None else ""
    return _BATCH.search(name) is not None or (written not in ("", "Any") and "tensor" not in written.lower())


def _passed(function: Function, scope: Scope, name: str, hazard: str, values: Values) -> Given:
    key = (id(function), name, hazard)
    if key not in values.asked:
        values.asked[key] = _Asked(values, hazard).parameter(function, scope, name, 0)
    return values.asked[key]


def _undifferentiable(scope: Scope) -> bool:
    """Whether the class says by a base or a decorator that no gradient goes through it."""
    owner = scope.owner
    return owner is not None and any(_MARKED.search(ast.unparse(n)) for n in (*owner.node.bases, *owner.node.decorator_list))


def runs_once(scope: Scope, looped: bool) -> bool:
    """Whether a place runs once, on the data of a script: outside every loop, in the file itself or in a function that is only called there."""
    if looped or isinstance(scope.node, ast.Module | ast.Lambda):
        return not looped and isinstance(scope.node, ast.Module)
    if scope.owner is not None or measures(scope):
        return False
    sites, all_ = calls_of(scope.node, scope)
    return all_ and bool(sites) and all(isinstance(s.scope.node, ast.Module) and not s.looped for s in sites)


def measures(scope: Scope) -> bool:
    """Whether a function is a loss, a metric or a method of a module: what the people who train are meant to call."""
    owner = scope.owner
    if owner is None or _MEASURES.search(_named(scope)):
        return _MEASURES.search(_named(scope)) is not None
    static = any(ast.unparse(d).endswith("staticmethod") for d in getattr(scope.node, "decorator_list", []))
    return not static and (scope.name == "forward" or any("Module" in ast.unparse(b) for b in owner.node.bases))


def _named(scope: Scope) -> str:
    """The names around a function: its own, its class with the bases, its file and folder."""
    owner = scope.owner
    of_class = [owner.node.name, *map(ast.unparse, owner.node.bases)] if owner is not None else []
    return " ".join([scope.name, *of_class, *scope.module.path.parts[-2:]])


def roots(node: ast.expr, scope: Scope) -> list[str]:
    """The parameters that an expression is made of by operations alone; a call of anything else ends the way."""
    found: list[str] = []
    seen: set[tuple[str, int, int]] = set()
    stack: list[ast.AST] = [node]
    for _ in range(_STEPS):
        if not stack:
            break
        one = stack.pop()
        if isinstance(one, ast.Name):
            if (one.id, one.lineno, one.col_offset) in seen:
                continue
            seen.add((one.id, one.lineno, one.col_offset))
            bound = scope.reaching(one.id, (one.lineno, one.col_offset))
            if bound is not None:
                stack.extend(b.value for b in bound if b.value is not None and not b.loop)
            elif scope.parameter(one.id)[0] and one.id not in ("self", "cls", *found):
                found.append(one.id)
        else:
            stack.extend(_parts(one, scope))
    return found


def _parts(node: ast.AST, scope: Scope) -> list[ast.AST]:
    if isinstance(node, ast.Call):
        op = operation(scope.module, node)
        return list(op.operands[:2]) if op is not None else []
    if isinstance(node, ast.Attribute):
        return [] if node.attr in ("shape", "dtype", "device", "ndim") else [node.value]
    if isinstance(node, ast.Subscript):
        return [node.value]
    return list(ast.iter_child_nodes(node)) if isinstance(node, ast.BinOp | ast.UnaryOp | ast.Tuple | ast.IfExp) else []


class _Asked:
    """One question, followed through the callers."""

    def __init__(self, values: Values, hazard: str) -> None:
        self.values, self.hazard, self.left = values, hazard, _BUDGET

    def parameter(self, function: Function, scope: Scope, name: str, depth: int) -> Given:
        """What the calls of a function pass for one of its parameters."""
        sites, all_ = calls_of(function, scope)
        passed = [(s, a) for s in sites if (a := argument(s.call, function, scope, name)) is not None]
        if not passed:
            return self._uncalled(scope, depth)
        found = [self._one(site, given, depth) for site, given in passed]
        if Given.EDGE in found:
            return Given.EDGE
        return Given.KEPT if all_ and all(f is Given.KEPT for f in found) else Given.UNKNOWN

    def _uncalled(self, scope: Scope, depth: int) -> Given:
        """Nobody in the project calls it; of what a whole model is fed nothing is known, and it has no gradient."""
        if depth > 0 and scope.name == "forward" and not _MEASURES.search(_named(scope)):
            return Given.UNKNOWN
        return Given.EDGE if measures(scope) else Given.UNKNOWN

    def _one(self, site: Site, given: ast.expr, depth: int) -> Given:
        self.left -= 1
        if isinstance(given, ast.Starred) or self.left < 0:
            return Given.UNKNOWN
        asked = guard(given, site.scope, site.call.lineno, whole=True)
        fact = self.values.of(given, site.scope)
        if asked == 2 or self._kept(fact, given, site):
            return Given.KEPT
        base = self.values.base(given, site.scope)
        if isinstance(base, ast.Name) and not isinstance(site.scope.node, ast.Module | ast.Lambda) and _is_parameter(base, site.scope):
            return self.parameter(site.scope.node, site.scope, base.id, depth + 1) if depth < _DEPTH else Given.UNKNOWN
        return Given.EDGE if not asked and self._edge(fact, given, site) else Given.UNKNOWN

    def _kept(self, fact: Fact, given: ast.expr, site: Site) -> bool:
        if self.hazard == "mask":
            return PADDED.search(made_of(given, site.scope)) is not None
        if self.hazard == "score":
            return fact.low >= -80 and fact.high <= 16
        if self.hazard == "spread":
            return fact.kind in _RANDOM or fact.number is not None
        if self.hazard == "slope" and (site.no_grad or not fact.graph or NO_SLOPE.search(made_of(given, site.scope))):
            return True
        return fact.eased or fact.positive or fact.low > 0 or fact.high < 0 or fact.kind in _NEVER_ZERO

    def _edge(self, fact: Fact, given: ast.expr, site: Site) -> bool:
        if self.hazard == "mask":
            return fact.kind == "mask" and _IGNORED.search(made_of(given, site.scope)) is not None
        learned = gradients.flows(given, site.scope, self.values, arguments=False)
        if self.hazard == "slope" or learned:
            return learned
        return (fact.owner != OTHER and fact.kind in _REACHES_ZERO) or ast.unparse(given).endswith("grad")


def _is_parameter(node: ast.Name, scope: Scope) -> bool:
    return scope.reaching(node.id, (node.lineno, node.col_offset)) is None and scope.parameter(node.id)[0] and node.id != "self"


def made_of(node: ast.expr, scope: Scope) -> str:
    """An expression with what its names were assigned, as text."""
    written = [ast.unparse(node)]
    for name in (n for n in ast.walk(node) if isinstance(n, ast.Name)):
        for bound in (scope.reaching(name.id, (name.lineno, name.col_offset)) or [])[:2]:
            if bound.value is not None:
                written.append(ast.unparse(bound.value))
    return " ; ".join(written)


def argument(call: ast.Call, function: Function, scope: Scope, name: str) -> ast.expr | None:
    """What a call passes for a parameter; None where it leaves it out."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return None if isinstance(keyword.value, ast.Constant) and keyword.value.value is None else keyword.value
    plain = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    if plain[:1] in (["self"], ["cls"]):
        plain = plain[1:]
    at = plain.index(name) if name in plain else len(call.args)
    for index, one in enumerate(call.args[: at + 1]):
        if index == at or isinstance(one, ast.Starred):
            return None if isinstance(one, ast.Constant) and one.value is None else one
    return next((ast.Starred(k.value) for k in call.keywords if k.arg is None), None)

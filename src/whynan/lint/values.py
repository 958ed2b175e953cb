"""What an expression can be, found by following names back to where they were made. Nothing is computed that no rule asks for."""

from __future__ import annotations

import ast
import re
from math import inf
from typing import TYPE_CHECKING

from whynan.lint import facts
from whynan.lint.arguments import dtype_of, extreme, gathered, special
from whynan.lint.callees import layer, made_by, own_returns, owner_of, target
from whynan.lint.calls import Operation, foreign_name, is_foreign, names_in, operation, same
from whynan.lint.facts import NOTHING, OTHER, TINY, TORCH, UNKNOWN, Fact, constant, join
from whynan.lint.model import Binding, Function, Scope
from whynan.lint.operations import LAYERS, OPERATIONS, VIEWS

if TYPE_CHECKING:
    from whynan.lint.callers import Given

EPSILON_NAME = re.compile(r"(^|_)(eps|epsilon|tiny|smooth|smoothing|smooth_nr|smooth_dr|min_norm)\d*($|_)", re.IGNORECASE)
_DEPTH = 24
_CHOOSING = frozenset({"mask", "where", "nonzero", "argwhere"})  # what an index that was asked for is made by
_ANNOTATED = {
    "float": Fact("argument", owner=OTHER, graph=False),
    "int": Fact("argument", owner=OTHER, graph=False),
    "bool": Fact("argument", owner=OTHER, graph=False),
    "str": Fact("argument", owner=OTHER, graph=False),
}


class Values:
    """The evaluator of one run; remembers what it has found."""

    def __init__(self) -> None:
        self._known: dict[int, Fact] = {}
        self._kept: list[ast.AST | Binding] = []  # ids stay valid while the nodes live
        self._summaries: dict[int, Fact] = {}
        self._patches: dict[int, Fact] = {}
        self.asked: dict[tuple[int, str, str], Given] = {}  # what the callers of a function pass, by parameter and hazard
        self._depth = 0

    def of(self, node: ast.expr | None, scope: Scope) -> Fact:
        """What is known of an expression where it stands."""
        if node is None:
            return NOTHING
        found = self._known.get(id(node))
        if found is not None:
            return found
        if self._depth > _DEPTH:
            return NOTHING
        self._known[id(node)] = NOTHING  # a name defined by itself gives nothing
        self._kept.append(node)
        self._depth += 1
        try:
            found = self._find(node, scope)
        finally:
            self._depth -= 1
        self._known[id(node)] = found
        return found

    def _find(self, node: ast.expr, scope: Scope) -> Fact:
        match node:
            case ast.Constant(value=value):
                return constant(float(value)) if isinstance(value, int | float) and not isinstance(value, bool) else Fact("none", owner=OTHER, graph=False)
            case ast.Name(id=name):
                return self._name(name, node, scope)
            case ast.Attribute():
                return self._attribute(node, scope)
            case ast.BinOp():
                return self._binary(node, scope)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return facts.negate(self.of(operand, scope))
            case ast.UnaryOp(op=ast.Invert() | ast.Not(), operand=operand):
                return Fact("mask", 0.0, 1.0, self.of(operand, scope).owner, graph=False)
            case ast.Compare(left=left, comparators=[right]):
                return Fact("mask", 0.0, 1.0, facts.owner(self.of(left, scope), self.of(right, scope)), graph=False)
            case ast.Call():
                return self._call(node, scope)
            case ast.Subscript():
                return self._subscript(node, scope)
            case ast.IfExp(body=body, orelse=other):
                return join([self.of(body, scope), self.of(other, scope)])
            case ast.BoolOp(values=values):
                return join([self.of(v, scope) for v in values])
            case ast.Tuple(elts=[_, *_]) | ast.List(elts=[_, *_]):
                return join([self.of(x, scope) for x in node.elts[:4]])
            case ast.NamedExpr(value=value):
                return self.of(value, scope)
            case _:
                return NOTHING

    def _name(self, name: str, node: ast.expr, scope: Scope) -> Fact:
        at = (node.lineno, node.col_offset)
        bound = scope.reaching(name, at)
        if bound:
            fact = join([self._bound(b, name, scope, at) for b in bound])
            return fact.but(kind="epsilon", low=max(fact.low, TINY)) if fact.kind == "" and EPSILON_NAME.search(name) else fact
        is_parameter, default, annotation = scope.parameter(name)
        if is_parameter:
            return self._parameter(name, default, annotation, scope)
        if foreign_name(scope.module.imports.get(name, "")):
            return Fact("foreign", owner=OTHER)
        if scope.parent is not None:
            outer = scope.parent
            last = outer.bindings.get(name)
            if last:
                return join([self._bound(b, name, outer, b.end) for b in last[-3:]])
            return self._name(name, node, outer)
        dotted = scope.module.imports.get(name)
        return self._imported(dotted, scope) if dotted else NOTHING

    def _imported(self, dotted: str, scope: Scope) -> Fact:
        found = scope.module.imported(dotted)
        if found is None:
            return NOTHING
        module, name = found
        last = module.scope.bindings.get(name)
        return join([self._bound(b, name, module.scope, b.end) for b in last[-2:]]) if last else NOTHING

    def _bound(self, b: Binding, name: str, scope: Scope, at: tuple[int, int]) -> Fact:
        if b.loop:
            return self._loop(b, scope)
        if b.patch:
            return self._patched_once(b, name, scope)
        fact = self.of(b.value, scope)
        if b.index is not None:
            return self._unpacked(b, scope, fact)
        return fact

    def _loop(self, b: Binding, scope: Scope) -> Fact:
        source = b.value
        if isinstance(source, ast.Call) and isinstance(source.func, ast.Name) and source.func.id in ("range", "enumerate"):
            if source.func.id == "range" or b.index == 0:
                return Fact("loop", 0.0, inf, OTHER, graph=False)
            return NOTHING
        if isinstance(source, ast.Tuple | ast.List):
            return self.of(source, scope)
        return NOTHING

    def _patched_once(self, b: Binding, name: str, scope: Scope) -> Fact:
        """Each patch is looked at once: what stands before it is often a patch too, and then the ways through them multiply."""
        found = self._patches.get(id(b))
        if found is not None:
            return found
        if self._depth > _DEPTH:
            return NOTHING
        self._patches[id(b)] = NOTHING
        self._kept.append(b)
        self._depth += 1
        try:
            found = self._patches[id(b)] = self._patched(b, name, scope)
        finally:
            self._depth -= 1
        return found

    def _patched(self, b: Binding, name: str, scope: Scope) -> Fact:
        """x[key] = value: what x was before, with some entries overwritten."""
        before = scope.reaching(name, (b.end[0], 0)) or []
        earlier = [self._bound(p, name, scope, p.end) for p in before[:3] if p is not b]
        base = join(earlier) if earlier else NOTHING
        if not earlier:
            is_parameter, default, annotation = scope.parameter(name)
            base = self._parameter(name, default, annotation, scope) if is_parameter else NOTHING
        value = self.of(b.value, scope)
        if value.low == value.high == -inf:
            return base.but(masked=True)
        mask_of_itself = (
            b.key is not None
            and any(isinstance(n, ast.Compare | ast.Call) for n in ast.walk(b.key))
            and name in {n.id for n in ast.walk(b.key) if isinstance(n, ast.Name)}
        )
        return (
            base.but(eased=True)
            if mask_of_itself
            else base.but(low=min(base.low, value.low), high=max(base.high, value.high), kind="" if base.kind in ("zeros", "empty", "ones") else base.kind)
        )

    def _unpacked(self, b: Binding, scope: Scope, fact: Fact) -> Fact:
        if isinstance(b.value, ast.Call):
            op = operation(scope.module, b.value)
            if op is not None and op.name in ("std_mean", "var_mean"):
                return Fact(op.name[:3], 0.0, owner=TORCH) if b.index == 0 else Fact("mean", owner=TORCH)
            if op is not None and op.name in ("max", "min", "topk", "sort", "kthvalue", "median"):
                return fact if b.index == 0 else Fact("index", 0.0, owner=TORCH, graph=False)
            if op is not None and op.name in ("chunk", "split", "unbind"):
                return fact
            returned = self._returned_tuple(b.value, b.index or 0, scope)
            return returned if returned is not None else NOTHING.but(owner=fact.owner)
        if isinstance(b.value, ast.Attribute) and b.value.attr == "shape":
            return Fact("size", 0.0, owner=OTHER, graph=False)
        return NOTHING.but(owner=fact.owner if fact.kind != "size" else OTHER, kind="size" if fact.kind == "size" else "")

    def _parameter(self, name: str, default: ast.expr | None, annotation: ast.expr | None, scope: Scope) -> Fact:
        written = ast.unparse(annotation) if annotation is not None else ""
        if default is not None:
            fact = self.of(default, scope)
            if fact.number is not None:
                kind = "epsilon" if EPSILON_NAME.search(name) else "argument"
                return fact.but(kind=kind) if kind == "epsilon" or fact.number > 0 else Fact("argument", owner=OTHER, number=fact.number, graph=False)
        if EPSILON_NAME.search(name):
            return Fact("epsilon", TINY, inf, OTHER, graph=False)
        if written in _ANNOTATED:
            return _ANNOTATED[written]
        if re.search(r"ndarray|ArrayLike|np\.|DataFrame|PIL|jnp", written) and "Tensor" not in written:
            return Fact("foreign", owner=OTHER)
        tensor = "Tensor" in written or (scope.name == "forward" and scope.owner is not None and written in ("", "Tensor"))
        mask = written in ("", "Tensor", "torch.Tensor") and re.search(r"(^|_)mask(s|ed)?($|_)", name) is not None
        return Fact("mask" if mask else "parameter", 0.0 if mask else -inf, 1.0 if mask else inf, owner=TORCH if tensor else UNKNOWN, graph=not mask)

    def _attribute(self, node: ast.Attribute, scope: Scope) -> Fact:
        if node.attr in ("T", "mT", "H", "data", "values", "grad"):
            fact = self.of(node.value, scope)
            return fact.but(graph=False) if node.attr in ("data", "grad") else fact
        if node.attr in ("shape", "ndim", "size"):
            return Fact("size", 0.0, owner=OTHER, graph=False)
        own = isinstance(node.value, ast.Name) and node.value.id == "self"
        configured = self._configured(node, scope) if isinstance(node.value, ast.Name) and not own else None
        if configured is not None:
            return configured
        if not own and (node.attr in ("eps", "tiny", "smallest_normal", "resolution") or EPSILON_NAME.search(node.attr)):
            return Fact("epsilon", TINY, inf, OTHER, graph=False)
        if node.attr in ("real", "imag") and not is_foreign(scope.module, node):
            return Fact("part", owner=self.of(node.value, scope).owner or TORCH)
        dotted = scope.module.dotted(node)
        if dotted:
            return self._dotted(dotted, scope)
        if isinstance(node.value, ast.Name) and node.value.id == "self" and scope.owner is not None:
            return self._field(node, scope)
        return Fact("epsilon", TINY, inf, OTHER, graph=False) if EPSILON_NAME.search(node.attr) else Fact("attribute")

    def _configured(self, node: ast.Attribute, scope: Scope) -> Fact | None:
        """cfg.eps: the default of a class of the file, or of an argument of argparse."""
        owner = owner_of(node.value, scope)
        if owner is not None:
            assigned = owner[0].fields(owner[1]).get(node.attr, [])
            return join([self.of(value, inner) for value, inner in assigned[:4]]) if assigned else None
        if "add_argument" not in scope.module.text:
            return None
        option = rf"add_argument\(\s*[\"']--{re.escape(node.attr)}[\"'][^)]*\bdefault\s*=\s*(-?[\d.]+(?:e-?\d+)?)"
        given = re.search(option, scope.module.text)
        return constant(float(given[1])) if given is not None else None

    def _keyed(self, node: ast.Subscript, scope: Scope) -> Fact | None:
        """CONFIG["eps"] where CONFIG is a dict written in the file."""
        made = made_by(node.value, scope)
        if not isinstance(made, ast.Dict) or not isinstance(node.slice, ast.Constant):
            return None
        for key, value in zip(made.keys, made.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == node.slice.value:
                return self.of(value, scope)
        return None

    def _dotted(self, dotted: str, scope: Scope) -> Fact:
        known = {
            "math.inf": inf,
            "numpy.inf": inf,
            "torch.inf": inf,
            "math.pi": 3.14159265,
            "numpy.pi": 3.14159265,
            "torch.pi": 3.14159265,
            "math.e": 2.71828,
            "torch.nan": None,
        }
        if known.get(dotted) is not None:
            return constant(known[dotted] or 0.0)
        return Fact("foreign", owner=OTHER) if foreign_name(dotted) else self._imported(dotted, scope)

    def _field(self, node: ast.Attribute, scope: Scope) -> Fact:
        local = scope.reaching(f"self.{node.attr}", (node.lineno, node.col_offset))
        if local:
            return join([self._bound(b, node.attr, scope, b.end) for b in local])
        assert scope.owner is not None
        assigned = scope.module.fields(scope.owner).get(node.attr, [])
        found = [self.of(value, inner) for value, inner in assigned[:4]]
        fact = join(found) if found else Fact("attribute")
        if EPSILON_NAME.search(node.attr) and fact.number is None:
            return Fact("epsilon", TINY, inf, OTHER, graph=False)
        return fact.but(kind="epsilon") if fact.number is not None and EPSILON_NAME.search(node.attr) else fact

    def _binary(self, node: ast.BinOp, scope: Scope) -> Fact:
        a, b = self.of(node.left, scope), self.of(node.right, scope)
        match node.op:
            case ast.Add():
                return facts.add(a, b)
            case ast.Sub():
                made = facts.subtract(a, b, self.same_root(node.left, node.right, scope))
                weighted = isinstance(node.right, ast.BinOp) and isinstance(node.right.op, ast.Mult) and not same(node.right.left, node.right.right)
                return made.but(kind="difference") if weighted and made.kind == "cancelled-variance" else made
            case ast.Mult():
                return facts.square(a) if same(node.left, node.right) else facts.multiply(a, b)
            case ast.Div():
                return facts.divide(a, b)
            case ast.Pow():
                return facts.power(a, b)
            case ast.MatMult() if a.kind == b.kind == "unit":
                return Fact("cosine", -1.001, 1.001, TORCH, dtype=a.dtype or b.dtype, graph=a.graph or b.graph)
            case ast.MatMult():
                return Fact(
                    "matmul",
                    0.0 if a.low >= 0 and b.low >= 0 else -inf,
                    inf,
                    TORCH if facts.owner(a, b) != OTHER else OTHER,
                    dtype=a.dtype or b.dtype,
                    graph=a.graph or b.graph,
                )
            case ast.BitAnd() | ast.BitOr() | ast.BitXor():
                return Fact("mask", 0.0, 1.0, facts.owner(a, b), graph=False)
            case ast.FloorDiv() | ast.Mod():
                return Fact("integer", 0.0 if a.low >= 0 else -inf, inf, facts.owner(a, b), graph=False)
            case _:
                return NOTHING

    def same_root(self, a: ast.expr, b: ast.expr, scope: Scope) -> bool:
        """x.max() and x.min() of one x, or x and x.max(), also through names."""
        first, second = self.base(a, scope), self.base(b, scope)
        return same(first, second) or same(a, second)

    def base(self, node: ast.expr, scope: Scope) -> ast.expr:
        """The tensor that a reduction or view was taken of."""
        for _ in range(6):
            if isinstance(node, ast.Name):
                bound = scope.reaching(node.id, (node.lineno, node.col_offset))
                if not bound or not isinstance(bound[0].value, ast.Call | ast.Subscript | ast.Attribute) or bound[0].patch or bound[0].loop:
                    return node
                node = bound[0].value
            elif isinstance(node, ast.Call):
                op = operation(scope.module, node)
                if (
                    op is None
                    or op.operand is None
                    or op.name not in ("max", "min", "amax", "amin", *VIEWS, "detach", "norm", "std", "var", "sum", "mean", "abs", "square")
                ):
                    return node
                node = op.operand
            elif isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr in ("values", "data")):
                node = node.value
            else:
                return node
        return node

    def _subscript(self, node: ast.Subscript, scope: Scope) -> Fact:
        keyed = self._keyed(node, scope)
        if keyed is not None:
            return keyed
        fact = self.of(node.value, scope)
        if fact.kind == "size":
            return fact
        chosen = self.of(node.slice, scope) if isinstance(node.slice, ast.Name | ast.Compare | ast.UnaryOp | ast.BinOp) else NOTHING
        if isinstance(node.value, ast.Dict):
            return NOTHING
        if chosen.kind in _CHOOSING and fact.kind not in ("number",):
            about_itself = bool(names_in(node.value) & self._asked(node.slice, scope) - {"torch", "self"})
            return fact.but(kind="selection" if fact.kind in ("", "parameter") else fact.kind, node=node, eased=fact.eased or about_itself)
        return fact if fact.kind != "number" else NOTHING

    def _asked(self, key: ast.expr, scope: Scope) -> set[str]:
        """The names a mask asks about, through its definition."""
        names = names_in(key)
        for name in list(names):
            for bound in (scope.reaching(name, (key.lineno, key.col_offset)) or [])[:1]:
                names |= names_in(bound.value) if isinstance(bound.value, ast.Compare | ast.BinOp | ast.UnaryOp | ast.Call | ast.Subscript) else set()
        return names

    def _call(self, node: ast.Call, scope: Scope) -> Fact:
        function = node.func
        if isinstance(function, ast.Name):
            builtin = self._builtin(function.id, node, scope)
            if builtin is not None:
                return builtin
        op = operation(scope.module, node)
        if op is not None:
            return self._operation(op, node, scope)
        if isinstance(function, ast.Attribute) and function.attr == "astype":
            return Fact("foreign", owner=OTHER, graph=False)
        if is_foreign(scope.module, function) or foreign_name(scope.module.dotted(function)):
            return self._foreign(node, scope)
        return self._project_call(node, scope)

    def _foreign(self, node: ast.Call, scope: Scope) -> Fact:
        name = scope.module.dotted(node.func)
        if name.endswith((".sqrt", ".exp", ".log")) and node.args:
            inner = self.of(node.args[0], scope)
            if inner.low > 0:
                return Fact("foreign", TINY if not name.endswith("log") else -inf, inf, OTHER, graph=False)
            if inner.kind == "size" and name.endswith("sqrt"):
                return Fact("size", 0.0, owner=OTHER, graph=False)
        return Fact("foreign", owner=OTHER, graph=False)

    def _builtin(self, name: str, node: ast.Call, scope: Scope) -> Fact | None:
        args = node.args
        if name == "float" and len(args) == 1:
            if isinstance(args[0], ast.Constant) and isinstance(args[0].value, str):
                text = args[0].value.strip().lower().lstrip("+")
                return constant(-inf if text in ("-inf", "-infinity") else inf) if "inf" in text else NOTHING
            return self.of(args[0], scope).but(owner=OTHER, graph=False)
        if name == "len":
            return Fact("size", 0.0, owner=OTHER, graph=False)
        if name in ("int", "abs", "round") and args:
            fact = self.of(args[0], scope)
            return OPERATIONS["abs"](fact) if name == "abs" else fact
        if name in ("max", "min") and len(args) >= 2:
            return extreme(name, [self.of(a, scope) for a in args])
        if name == "sum" and args:
            return Fact("sum", -inf, inf, UNKNOWN)
        return None

    def _operation(self, op: Operation, node: ast.Call, scope: Scope) -> Fact:
        base = self.of(op.operand, scope)
        if base.kind == "foreign":
            return base
        owned = TORCH if op.sure or base.owner == TORCH else base.owner
        made = special(self, op, base, scope)
        if made is None:
            if op.module.startswith("torch.nn.") and op.name[:1].isupper():
                return Fact("layer", owner=OTHER)
            if op.name in VIEWS:
                made = gathered(self, op.operand, scope) if isinstance(op.operand, ast.Tuple | ast.List) and op.operand.elts else base
            elif op.name in OPERATIONS:
                made = OPERATIONS[op.name](base)
            else:
                made = Fact(op.name, dtype=base.dtype)
        if made.kind in ("size", "number") or op.name in ("item", "tolist"):
            return made
        dtype = dtype_of(op.keywords.get("dtype")) or made.dtype
        if op.module.endswith("_like") or op.name.startswith("zeros"):
            dtype = made.dtype
        return made.but(owner=owned, dtype=dtype, node=made.node or node, inner=made.inner or op.operand)

    def _project_call(self, node: ast.Call, scope: Scope) -> Fact:
        found = target(node, scope)
        if found is None:
            return self._layer(node, scope) or NOTHING
        function, inner = found
        return self.summary(function, inner)

    def _layer(self, node: ast.Call, scope: Scope) -> Fact | None:
        name = layer(node.func, scope)
        if not name:
            return None
        if name in LAYERS and node.args:
            return OPERATIONS[LAYERS[name]](self.of(node.args[0], scope)).but(node=node, inner=node.args[0], owner=TORCH)
        return Fact("linear" if name == "Linear" or name.startswith("Conv") else "module", owner=TORCH)

    def summary(self, function: Function, scope: Scope) -> Fact:
        """What a function returns, whatever it is given."""
        known = self._summaries.get(id(function))
        if known is not None:
            return known
        self._summaries[id(function)] = NOTHING
        returned = [n.value for n in own_returns(function) if n.value is not None]
        found = [self.of(value, scope) for value in returned[:4]]
        fact = join(found) if found else NOTHING
        self._summaries[id(function)] = fact
        return fact

    def _returned_tuple(self, call: ast.Call, index: int, scope: Scope) -> Fact | None:
        found = target(call, scope)
        if found is None:
            return None
        parts = [n.value.elts[index] for n in own_returns(found[0]) if isinstance(n.value, ast.Tuple) and index < len(n.value.elts)]
        return join([self.of(p, found[1]) for p in parts[:3]]) if parts else None

"""What an expression can be, found by following names back to where they were made. Nothing is computed that no rule asks for."""

from __future__ import annotations

import ast
import re
from math import inf

from whynan.lint import facts
from whynan.lint.calls import Operation, foreign_name, is_foreign, names_in, operation, same
from whynan.lint.facts import NOTHING, OTHER, TINY, TORCH, UNKNOWN, Fact, constant, join
from whynan.lint.model import Binding, Function, Module, Owner, Scope
from whynan.lint.operations import LAYERS, OPERATIONS, VIEWS

EPSILON_NAME = re.compile(r"(^|_)(eps|epsilon|tiny|smooth|smoothing|smooth_nr|smooth_dr|min_norm)\d*($|_)", re.IGNORECASE)
_DTYPES = {"float16": "float16", "half": "float16", "bfloat16": "bfloat16", "float32": "float32", "float": "float32", "float64": "float64", "double": "float64"}
_DEPTH = 24
_ANNOTATED = {"float": Fact("argument", owner=OTHER, graph=False), "int": Fact("argument", owner=OTHER, graph=False), "bool": Fact("argument", owner=OTHER, graph=False),
              "str": Fact("argument", owner=OTHER, graph=False)}  # fmt: skip


class Values:
    """The evaluator of one run; remembers what it has found."""

    def __init__(self) -> None:
        self._known: dict[int, Fact] = {}
        self._keep: list[ast.AST] = []  # ids stay valid while the nodes live
        self._summaries: dict[int, Fact] = {}
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
        self._keep.append(node)
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
            case ast.Tuple(elts=[first, *_]) | ast.List(elts=[first, *_]):
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
            return self._patched(b, name, scope)
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
        mask_of_itself = b.key is not None and any(isinstance(n, ast.Compare | ast.Call) for n in ast.walk(b.key)) and name in {n.id for n in ast.walk(b.key) if isinstance(n, ast.Name)}
        return base.but(eased=True) if mask_of_itself else base.but(low=min(base.low, value.low), high=max(base.high, value.high), kind="" if base.kind in ("zeros", "empty", "ones") else base.kind)

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
        if node.attr in ("eps", "tiny", "smallest_normal", "resolution") or (EPSILON_NAME.search(node.attr) and not (isinstance(node.value, ast.Name) and node.value.id == "self")):
            return Fact("epsilon", TINY, inf, OTHER, graph=False)
        if node.attr in ("real", "imag") and not is_foreign(scope.module, node):
            return Fact("part", owner=self.of(node.value, scope).owner or TORCH)
        dotted = scope.module.dotted(node)
        if dotted:
            return self._dotted(dotted, scope)
        if isinstance(node.value, ast.Name) and node.value.id == "self" and scope.owner is not None:
            return self._field(node, scope)
        return Fact("epsilon", TINY, inf, OTHER, graph=False) if EPSILON_NAME.search(node.attr) else Fact("attribute")

    def _dotted(self, dotted: str, scope: Scope) -> Fact:
        known = {"math.inf": inf, "numpy.inf": inf, "torch.inf": inf, "math.pi": 3.14159265, "numpy.pi": 3.14159265, "torch.pi": 3.14159265, "math.e": 2.71828, "torch.nan": None}
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
                made = facts.subtract(a, b, self._same_root(node.left, node.right, scope))
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
                return Fact("matmul", 0.0 if a.low >= 0 and b.low >= 0 else -inf, inf, TORCH if facts.owner(a, b) != OTHER else OTHER, dtype=a.dtype or b.dtype, graph=a.graph or b.graph)
            case ast.BitAnd() | ast.BitOr() | ast.BitXor():
                return Fact("mask", 0.0, 1.0, facts.owner(a, b), graph=False)
            case ast.FloorDiv() | ast.Mod():
                return Fact("integer", 0.0 if a.low >= 0 else -inf, inf, facts.owner(a, b), graph=False)
            case _:
                return NOTHING

    def _same_root(self, a: ast.expr, b: ast.expr, scope: Scope) -> bool:
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
                if op is None or op.operand is None or op.name not in ("max", "min", "amax", "amin", *VIEWS, "detach", "norm", "std", "var", "sum", "mean", "abs", "square"):
                    return node
                node = op.operand
            elif isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr == "values"):
                node = node.value
            else:
                return node
        return node

    def _subscript(self, node: ast.Subscript, scope: Scope) -> Fact:
        fact = self.of(node.value, scope)
        if fact.kind == "size":
            return fact
        chosen = self.of(node.slice, scope) if isinstance(node.slice, ast.Name | ast.Compare | ast.UnaryOp | ast.BinOp) else NOTHING
        if isinstance(node.value, ast.Dict):
            return NOTHING
        if chosen.kind == "mask" and fact.kind not in ("number",):
            about_itself = bool(names_in(node.value) & self._asked(node.slice, scope) - {"torch", "self"})
            return fact.but(kind="selection" if fact.kind in ("", "parameter") else fact.kind, node=node, eased=fact.eased or about_itself)
        return fact if fact.kind != "number" else NOTHING

    def _asked(self, key: ast.expr, scope: Scope) -> set[str]:
        """The names a mask asks about, through its definition."""
        names = names_in(key)
        for name in list(names):
            for bound in (scope.reaching(name, (key.lineno, key.col_offset)) or [])[:1]:
                names |= names_in(bound.value) if isinstance(bound.value, ast.Compare | ast.BinOp | ast.UnaryOp) else set()
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
            return self._extreme(name, [self.of(a, scope) for a in args])
        if name == "sum" and args:
            return Fact("sum", -inf, inf, UNKNOWN)
        return None

    def _extreme(self, name: str, parts: list[Fact]) -> Fact:
        pick = max if name in ("max", "maximum") else min
        low, high = pick(p.low for p in parts), pick(p.high for p in parts)
        return Fact("bounded", low, high, facts.owner(*parts), eased=any(p.eased for p in parts), graph=any(p.graph for p in parts), positive=any(p.positive for p in parts))

    def _operation(self, op: Operation, node: ast.Call, scope: Scope) -> Fact:
        base = self.of(op.operand, scope)
        if base.kind == "foreign":
            return base
        owned = TORCH if op.sure or base.owner == TORCH else base.owner
        made = self._special(op, base, scope)
        if made is None:
            if op.module.startswith("torch.nn.") and op.name[:1].isupper():
                return Fact("layer", owner=OTHER)
            if op.name in VIEWS:
                made = self._gathered(op.operand, scope) if isinstance(op.operand, ast.Tuple | ast.List) and op.operand.elts else base
            elif op.name in OPERATIONS:
                made = OPERATIONS[op.name](base)
            else:
                made = Fact(op.name, dtype=base.dtype)
        if made.kind in ("size", "number"):
            return made
        dtype = self._dtype(op.keywords.get("dtype")) or made.dtype
        if op.module.endswith("_like") or op.name.startswith("zeros"):
            dtype = made.dtype
        return made.but(owner=owned, dtype=dtype, node=made.node or node, inner=made.inner or op.operand)

    def _gathered(self, parts: ast.Tuple | ast.List, scope: Scope) -> Fact:
        """cat, stack: one of several; with a part that is never 0, neither is the whole a zero vector."""
        found = [self.of(x, scope) for x in parts.elts[:4]]
        return join(found).but(eased=any(f.eased or f.low > 0 for f in found), number=None)

    def _dtype(self, node: ast.expr | None) -> str:
        return _DTYPES.get(node.attr, "") if isinstance(node, ast.Attribute) else ""

    def _special(self, op: Operation, base: Fact, scope: Scope) -> Fact | None:
        """Operations whose arguments matter."""
        match op.name:
            case "clamp" | "clamp_min" | "clamp_max":
                return self._clamped(op, base, scope)
            case "maximum" | "minimum":
                return self._extreme(op.name, [base, self.of(op.argument(1, "other"), scope)])
            case "max" | "min" if len(op.operands) == 2 and self.of(op.operands[1], scope).owner == TORCH:
                return self._extreme(op.name, [base, self.of(op.operands[1], scope)])
            case "where":
                if len(op.operands) < 3:
                    return None
                chosen = join([self.of(op.operands[1], scope), self.of(op.operands[2], scope)])
                return chosen.but(eased=True, node=op.call)
            case "masked_fill":
                value = self.of(op.argument(2, "value"), scope)
                if value.low == value.high == -inf:
                    return base.but(masked=True, node=op.call)
                return base.but(low=min(base.low, value.low), high=max(base.high, value.high), eased=True)
            case "add" | "sub" | "mul" | "div":
                return self._arithmetic(op, base, scope)
            case "pow":
                return facts.power(base, self.of(op.argument(1, "exponent"), scope))
            case "to" | "type":
                target = op.argument(1, "dtype")
                dtype = self._dtype(target)
                return base.but(dtype=dtype or base.dtype, graph=base.graph and not base.kind == "mask") if target is not None else base
            case "full" | "full_like" | "new_full":
                value = self.of(op.argument(1 if op.name != "new_full" else 2, "fill_value"), scope)
                return Fact("full", value.low, value.high, TORCH, masked=value.low == value.high == -inf, graph=False)
            case "tensor" | "as_tensor" | "scalar_tensor":
                return base.but(owner=TORCH, graph=False, number=None, kind="tensor" if base.kind != "number" else "constant-tensor")
            case "relu":
                return OPERATIONS["relu"](base)
            case "Parameter":
                return Fact("weight", owner=TORCH)
            case "scatter_add" | "index_add" | "scatter" | "scatter_sum":
                source = self.of(op.operands[-1] if op.name != "scatter_sum" else op.operand, scope)
                return Fact("scattered-sum", 0.0 if source.low >= 0 and base.low >= 0 else -inf, inf, TORCH, graph=source.graph or base.graph)
            case "bincount" if op.argument(1, "weights") is not None:
                return Fact("scattered-sum", -inf, inf, TORCH)
            case "matmul" | "einsum":
                parts = [self.of(x, scope) for x in op.operands if not isinstance(x, ast.Constant)]
                if parts and all(p.kind == "unit" for p in parts):
                    return Fact("cosine", -1.001, 1.001, TORCH, dtype=base.dtype, graph=any(p.graph for p in parts))  # rounding takes it past 1
                return Fact("matmul", 0.0 if parts and all(p.low >= 0 for p in parts) else -inf, inf, TORCH, dtype=base.dtype, graph=any(p.graph for p in parts))
            case "sum" | "mean" if base.kind == "matmul":
                return None
            case "item" | "tolist":
                return base.but(owner=OTHER, graph=False)
            case "nan_to_num":
                return base.but(eased=True)
            case _:
                return None

    def _arithmetic(self, op: Operation, base: Fact, scope: Scope) -> Fact:
        second = op.argument(1, "other")
        other = self.of(second, scope)
        if op.name == "add":
            return facts.add(base, other)
        if op.name == "sub":
            return facts.subtract(base, other, second is not None and op.operand is not None and self._same_root(op.operand, second, scope))
        if op.name == "mul":
            return facts.square(base) if same(op.operand, second) else facts.multiply(base, other)
        return facts.divide(base, other)

    def _clamped(self, op: Operation, base: Fact, scope: Scope) -> Fact:
        low_node = op.argument(1, "min") if op.name != "clamp_max" else None
        high_node = op.argument(2, "max") if op.name == "clamp" else op.argument(1, "max") if op.name == "clamp_max" else None
        low = self.of(low_node, scope).low if low_node is not None else -inf
        high = self.of(high_node, scope).high if high_node is not None else inf
        unknown = low_node is not None and low == -inf and not (isinstance(low_node, ast.Constant) and low_node.value is None)
        return base.but(
            low=max(base.low, low), high=max(min(base.high, high), low), kind=base.kind if low <= 0 else "bounded", eased=base.eased or unknown, node=op.call, positive=base.positive or low > 0
        )

    def _project_call(self, node: ast.Call, scope: Scope) -> Fact:
        found = self.target(node, scope)
        if found is None:
            return self._layer(node, scope) or NOTHING
        function, inner = found
        return self.summary(function, inner)

    def target(self, node: ast.Call, scope: Scope) -> tuple[Function, Scope] | None:
        """The function or method of the project that a call runs."""
        module, function = scope.module, node.func
        if isinstance(function, ast.Name):
            if function.id in module.functions:
                return self._in(module, module.functions[function.id], None)
            dotted = module.imports.get(function.id)
            if dotted:
                return self._elsewhere(module, dotted)
            return self._instance(function, scope)
        if isinstance(function, ast.Attribute):
            dotted = module.dotted(function)
            if dotted:
                return self._elsewhere(module, dotted)
            if isinstance(function.value, ast.Name) and function.value.id in ("self", "cls") and scope.owner is not None:
                method = scope.owner.methods.get(function.attr)
                return self._in(module, method, scope.owner) if method is not None else self._instance(function, scope)
            owner = self._owner_of(function.value, scope)
            if owner is not None and function.attr in owner[1].methods:
                return self._in(owner[0], owner[1].methods[function.attr], owner[1])
        return None

    def _in(self, module: Module, function: Function, owner: Owner | None) -> tuple[Function, Scope]:
        return function, module.scope_of(function, owner)

    def _elsewhere(self, module: Module, dotted: str) -> tuple[Function, Scope] | None:
        found = module.imported(dotted)
        if found is None or found[1] not in found[0].functions:
            return None
        return self._in(found[0], found[0].functions[found[1]], None)

    def _instance(self, node: ast.expr, scope: Scope) -> tuple[Function, Scope] | None:
        """net(x), self.net(x): the forward method of the class that net was made from."""
        owner = self._owner_of(node, scope)
        if owner is None or "forward" not in owner[1].methods:
            return None
        return self._in(owner[0], owner[1].methods["forward"], owner[1])

    def _made_by(self, node: ast.expr, scope: Scope) -> ast.expr | None:
        """The expression that a name or an attribute of self was assigned."""
        if isinstance(node, ast.Name):
            bound = scope.reaching(node.id, (node.lineno, node.col_offset))
            if bound is None and scope.parent is not None and not scope.parameter(node.id)[0]:
                bound = scope.parent.bindings.get(node.id, [])[-1:]
            return bound[0].value if bound and not bound[0].loop else None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self" and scope.owner is not None:
            assigned = scope.module.fields(scope.owner).get(node.attr, [])
            return assigned[0][0] if assigned else None
        return None

    def _owner_of(self, node: ast.expr, scope: Scope) -> tuple[Module, Owner] | None:
        made = self._made_by(node, scope)
        while isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute) and made.func.attr in ("to", "half", "cuda", "float", "eval", "train", "double", "bfloat16"):
            made = made.func.value
        if not isinstance(made, ast.Call):
            return None
        if isinstance(made.func, ast.Name) and made.func.id in scope.module.owners:
            return scope.module, scope.module.owners[made.func.id]
        dotted = scope.module.dotted(made.func)
        found = scope.module.imported(dotted) if dotted and not dotted.startswith("torch.") else None
        return (found[0], found[0].owners[found[1]]) if found is not None and found[1] in found[0].owners else None

    def layer(self, node: ast.expr, scope: Scope) -> str:
        """The torch.nn class that a callable was made from; of a Sequential, the last one."""
        made = self._made_by(node, scope)
        if not isinstance(made, ast.Call):
            return ""
        dotted = scope.module.dotted(made.func)
        if dotted.endswith("nn.Sequential") and made.args and isinstance(made.args[-1], ast.Call):
            dotted = scope.module.dotted(made.args[-1].func)
        return dotted.rpartition(".")[2] if dotted.startswith("torch.nn") else ""

    def _layer(self, node: ast.Call, scope: Scope) -> Fact | None:
        name = self.layer(node.func, scope)
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
        returned = [n.value for n in _own_returns(function) if n.value is not None]
        found = [self.of(value, scope) for value in returned[:4]]
        fact = join(found) if found else NOTHING
        self._summaries[id(function)] = fact
        return fact

    def _returned_tuple(self, call: ast.Call, index: int, scope: Scope) -> Fact | None:
        found = self.target(call, scope)
        if found is None:
            return None
        parts = [n.value.elts[index] for n in _own_returns(found[0]) if isinstance(n.value, ast.Tuple) and index < len(n.value.elts)]
        return join([self.of(p, found[1]) for p in parts[:3]]) if parts else None


def _own_returns(function: Function) -> list[ast.Return]:
    found: list[ast.Return] = []
    stack: list[ast.stmt] = list(function.body)
    while stack:
        s = stack.pop()
        if isinstance(s, ast.Return):
            found.append(s)
        elif not isinstance(s, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for block in ("body", "orelse", "finalbody"):
                stack.extend(x for x in getattr(s, block, []) if isinstance(x, ast.stmt))
            for handler in getattr(s, "handlers", []):
                stack.extend(handler.body)
    return found

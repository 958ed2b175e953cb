"""Remedies as expressions: one template gives both the diff for the user and the computation for the replay.

`{x}` is the operand that is changed, `{0}`, `{1}` … all operands, `{rest}` the remaining arguments as they stand; `{call}` is the whole expression.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from whynan.causes import patterns
from whynan.causes.edits import as_operand, with_keyword
from whynan.causes.source import Change, Expression, positioned
from whynan.causes.stopped import Stopped, bare, count_stopped, differentiated

if TYPE_CHECKING:
    from whynan.capsule.sites import Site
    from whynan.trace.birth import View

_OURS = f"{__file__}: a remedy"  # the file of code that is put in place: no line of the program's
_ALIASES = {
    "truediv": "div", "itruediv": "div", "rtruediv": "div", "divide": "div", "true_divide": "div", "rdiv": "div", "rsub": "sub", "isub": "sub",
    "radd": "add", "iadd": "add", "rmul": "mul", "imul": "mul", "multiply": "mul", "rpow": "pow", "ipow": "pow", "inverse": "inv", "mm": "matmul",
    "bmm": "matmul", "rmatmul": "matmul", "subtract": "sub", "mod": "remainder", "rmod": "remainder", "special_xlogy": "xlogy", "arccos": "acos",
    "arccosh": "acosh", "arcsin": "asin", "arctanh": "atanh", "float_power": "pow",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fix:
    """One change at the place of birth."""

    title: str
    template: str = ""  # empty: advice without a diff
    operand: int | None = None  # change only this operand; None: the whole expression
    safe: bool = False
    keyword: str = ""  # or: set this keyword argument to the template
    leave_out: bool = False  # or: the same step without the bad samples
    inner: str = ""  # or: rewrite together with the call that made the first operand (softmax, sigmoid, sumsq)
    site: Site | None = None  # another place than the birth's
    limit: str = ""  # another template that must give the same loss: the result has a limit, and the change is it
    choice: str = ""  # another template that is as good a guess: where it gives another step, that this one is meant is not proven

    def text(self, expression: Expression) -> Change | None:
        """Return the node to replace and its new text, or None where the template does not fit the source."""
        if not self.template:
            return None
        if self.keyword:
            return self._keyword_text(expression)
        if self.inner:
            found = patterns.inner_text(expression, self.inner)
            return None if found is None else (expression.node, self.template.replace("{inner}", found[0]), *found[1:])
        if self.operand is not None:
            return self._operand_text(expression, self.operand)
        if isinstance(expression.node, ast.AugAssign) or not expression.operands or _writes_there(expression):
            return None
        if "{call}" in self.template:
            return expression.node, self.template.replace("{call}", as_operand(expression.text))
        made = self._made_of(expression)
        new = _filled(expression, self.template, made) if made is not None else None
        return None if new is None else (expression.node, new)

    def _made_of(self, expression: Expression) -> list[str] | None:
        """Return what an object that is called was made with, so that a function can stand for it; None where that is not known."""
        if not expression.calls_object():
            return []
        made = expression.construction()
        if made is None or made[0].args or not all(k.arg and patterns.is_number(k.value) for k in made[0].keywords):
            return None
        given = [f"{k.arg}={expression.segment(k.value)}" for k in made[0].keywords if f" {k.arg}=" not in self.template]
        return given if not given or "{rest}" in self.template else None

    def _operand_text(self, expression: Expression, place: int) -> Change | None:
        if place >= len(expression.nodes):
            return None
        node = expression.nodes[place]
        beside = [i for i in range(len(expression.nodes)) if i != place and f"{{{i}}}" in self.template]
        if any(not expression.is_repeatable(expression.nodes[i]) for i in beside):
            return None
        written = place == 0 and _writes_there(expression)
        if written and not expression.is_repeatable(node):
            return None
        template = "{x}.copy_(" + self.template + ")" if written else self.template
        if (inner := _without_bound(expression, node, self.template)) is not None and not written:
            template = template.replace("{x}", as_operand(inner))
        new = _filled(expression, template.replace("{x}", f"{{{place}}}"))
        if new is None:
            return None
        receiver = isinstance(expression.node, ast.Call) and isinstance(expression.node.func, ast.Attribute) and expression.node.func.value is node
        return node, as_operand(new) if receiver or isinstance(expression.node, ast.BinOp) else new

    def _keyword_text(self, expression: Expression) -> Change | None:
        if not isinstance(expression.node, ast.Call) or ("{0}" in self.template and not expression.operands):
            return None
        template, bound = self.template, ""
        if "{0}" in template:
            first = expression.nodes[0]
            if not expression.is_repeatable(first):
                bound = expression.free_name("value")
            template = template.replace("{0}", bound or _one_line(expression, first))
        given = next((k for k in expression.node.keywords if k.arg == self.keyword), None)
        if given is not None:
            return None if bound else (given.value, template.replace("{x}", as_operand(expression.segment(given.value))))
        if "{x}" in template:
            return None
        if expression.calls_object():
            return self._made_with(expression, template)
        whole = expression.rewritten(expression.node, expression.nodes[0], f"({bound} := {expression.operands[0]})") if bound else expression.text
        return expression.node, with_keyword(whole, self.keyword, template)

    def _made_with(self, expression: Expression, value: str) -> Change | None:
        """Set the keyword where the module that is called here is made."""
        made = expression.construction()
        if made is None or "{0}" in self.template or self.keyword not in inspect.signature(made[1].__init__).parameters:  # type: ignore[misc]
            return None
        given = next((k for k in made[0].keywords if k.arg == self.keyword), None)
        names = list(inspect.signature(made[1]).parameters)
        if given is None and (any(isinstance(a, ast.Starred) for a in made[0].args) or None in (k.arg for k in made[0].keywords)):
            return None
        if given is None and self.keyword in names[: len(made[0].args)]:
            return made[0].args[names.index(self.keyword)], value
        return (given.value, value) if given is not None else (made[0], with_keyword(expression.segment(made[0]), self.keyword, value))

    def swap(self, expression: Expression | None, name: str, stopped: list[Stopped] | None = None) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
        """Return the same change as a computation for the replay; `stopped` is told how many elements let no gradient through."""
        if self.keyword:
            return self._swap_keyword(name)
        if self.inner:
            return patterns.inner_swap(self.inner, name, plain_name)
        import torch

        source = _placeholders(self.template)
        code = compile(source, _OURS, "eval")

        def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if plain_name(func) != name or (self.operand is None and _writes(func)):
                return NotImplemented
            args, kwargs = positioned(args, kwargs)
            flipped = expression is not None and _flipped(expression, func, args)
            operands = list(reversed(args[:2])) + list(args[2:]) if flipped else list(args)
            if "{call}" in self.template:
                return eval(code, {"_call": func(*args, **kwargs)})  # our own template
            if self.operand is None:
                named = {k: v for k, v in kwargs.items() if f" {k}=" not in self.template}  # torch hands defaults on as if they were given
                scope = _scope(torch, operands) | {"_rest": tuple(operands[1:]), "_named": named}
                return eval(code, scope)  # our own template
            if self.operand >= len(operands) or (self.template.startswith("{x}.") and not isinstance(operands[self.operand], torch.Tensor)):
                return NotImplemented  # a number has none of a tensor's methods
            x = operands[self.operand]
            written = self.operand == 0 and _writes(func)
            scope = _scope(torch, operands) | {"_x": x.clone() if written else x}
            value = eval(code, scope)  # our own template
            result = func(*_put(operands, self.operand, x.copy_(value) if written else value, flipped), **kwargs)
            if stopped is not None:
                others = [o for place, o in enumerate(operands) if place != self.operand]
                only = not any(isinstance(o, torch.Tensor) and o.requires_grad for o in others)

                def again(x: Any) -> Any:
                    beside = operands if differentiated(x) else [bare(o) for o in operands]
                    return func(*_put(beside, self.operand, x.clone() if written else x, flipped), **kwargs)

                count_stopped(stopped, code, scope, again, result, only, name in _ENDLESS)
            return result

        return change

    def _swap_keyword(self, name: str) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
        import torch

        code = compile(_placeholders(self.template), _OURS, "eval")

        def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if plain_name(func) != name:
                return NotImplemented
            args, kwargs = positioned(args, kwargs)
            given = kwargs.get(self.keyword)
            if isinstance(given, torch.Tensor) and given.is_floating_point() and "&" in self.template:
                # attention modules turn a boolean mask into 0 and -inf before they call this function
                value = given.masked_fill((given == -torch.inf).all(-1, keepdim=True), 0.0)
                return func(*args, **{**kwargs, self.keyword: value})
            value = eval(code, _scope(torch, list(args)) | {"_x": given})  # our own template
            return func(*args, **{**kwargs, self.keyword: value})

        return change


BRAIN = Fix("use bfloat16 instead of float16: it has the range of float32", "{inner}", inner="bfloat16")
SOFTMAX = Fix("use torch.softmax, which subtracts the largest value first", "{inner}", safe=True, inner="softmax by hand")
LOGSUMEXP = Fix("use torch.logsumexp", "{inner}", safe=True, inner="logsumexp by hand")
LOG1MEXP = Fix("use expm1, which keeps 1 - exp(x) where exp(x) rounds to 1", "{inner}", safe=True, inner="log1mexp by hand")
LOG_OF_EXP = Fix("take the logarithm of the exponentials in one call: softplus, logsumexp", "{inner}", safe=True, inner="log of exp")
BY_HAND = Fix("use binary_cross_entropy, which keeps the logarithm at or above -100", "{inner}", inner="cross-entropy by hand")


def shifted(total: View) -> list[Fix]:
    """Take the largest exponent out of exponentials that are divided by this sum of them."""
    dims = total.scalar("dim")
    if not isinstance(dims, list | tuple) or len(dims) != 1:
        return []
    shift = f"{{x}} - {{x}}.amax(dim={dims[0]}, keepdim=True)"
    return [Fix("subtract the largest exponent first: the division by the sum cancels it", shift, 0, safe=True)]


def _filled(expression: Expression, template: str, made_of: list[str] | None = None) -> str | None:
    """Return a template with the operands in it. One that may not be evaluated twice is given a name where it is evaluated first."""
    order = [int(found) for found in re.findall(r"{(\d)}", template)]
    if any(place >= len(expression.nodes) for place in order):
        return None
    once = [place for place in dict.fromkeys(order) if not expression.is_repeatable(expression.nodes[place])]
    if once != sorted(once) or ("{rest}" in template and any(place > 0 for place in once)):
        return None  # evaluated in another order, or also among the remaining arguments
    names = {place: expression.free_name("divisor" if expression.name == "div" and place else "value") for place in once if order.count(place) > 1}
    if names and re.search(r"\b(if|and|or|lambda|for)\b", template):
        return None  # where it stands first may not be evaluated at all
    rest = [*expression.operands[1:], *(f"{k}={v}" for k, v in expression.keywords.items()), *(made_of or [])]
    placed: set[int] = set()

    def fill(found: re.Match[str]) -> str:
        if found[1] == "rest":
            return "".join(f", {r}" for r in rest)
        place = int(found[1])
        if place not in names:
            return _one_line(expression, expression.nodes[place]) if order.count(place) > 1 else as_operand(expression.operands[place])
        first = place not in placed
        placed.add(place)
        return f"({names[place]} := {expression.operands[place]})" if first else names[place]

    return re.sub(r"{(\d|rest)}", fill, template)


def _one_line(expression: Expression, node: ast.expr) -> str:
    text = expression.segment(node)
    return as_operand(ast.unparse(node) if "\n" in text else text)


def _put(operands: list[Any], place: int | None, value: Any, flipped: bool) -> list[Any]:
    """Return the arguments of a call with another value for one operand, in the order of the call."""
    import torch

    arguments = [value if index == place else operand for index, operand in enumerate(operands)]
    if flipped:
        arguments[:2] = reversed(arguments[:2])
        if not isinstance(arguments[0], torch.Tensor):
            arguments[0] = torch.as_tensor(arguments[0])
    return arguments


def _writes(func: Any) -> bool:
    """Whether a function writes its result into its first argument: another expression in its place would not."""
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def _without_bound(expression: Expression, node: ast.expr, template: str) -> str | None:
    """Return what stands under a bound that a larger one replaces: `x.clamp_min(0)`, or `x + 1e-8`."""
    found = _FLOOR.fullmatch(template)
    if found is None:
        return None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "clamp_min" and len(node.args) == 1 and not node.keywords:
        inner, bound, least = node.func.value, node.args[0], 1.0
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        inner, bound, least = node.left, node.right, 100.0
    else:
        return None
    number = bound.value if isinstance(bound, ast.Constant) else None
    fits = isinstance(number, int | float) and 0 <= number * least <= float(found[1]) and (least == 1 or number > 0)
    return expression.segment(inner) if fits else None


_FLOOR = re.compile(r"\{x\}\.clamp_min\(([\d.e+-]+)\)")


def _writes_there(expression: Expression) -> bool:
    called = expression.node.func if isinstance(expression.node, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr.endswith("_")


def _placeholders(template: str) -> str:
    source = template.replace("{x}", "_x").replace("{call}", "_call").replace("{rest}", ", *_rest, **_named")
    for index in range(6):
        source = source.replace(f"{{{index}}}", f"_{index}")
    return source


def _scope(torch: Any, operands: list[Any]) -> dict[str, Any]:
    scope: dict[str, Any] = {f"_{i}": o for i, o in enumerate(operands)}
    return scope | {"torch": torch, "F": torch.nn.functional, "max": max, "float": float, "int": int}


def plain_name(func: Any) -> str:
    """Return a torch function's name as the source would say it: `Tensor.__rtruediv__` is `div`."""
    name = getattr(func, "__name__", "").strip("_").removeprefix("linalg_").removeprefix("special_")
    return _ALIASES.get(name, name)


def source_name(name: str) -> str:
    """The same for a name found in source text."""
    name = name.strip("_")
    return _ALIASES.get(name, name)


def _flipped(expression: Expression, func: Any, args: tuple[Any, ...]) -> bool:
    """Whether torch got the operands the other way round: `1 / x` arrives as `x.__rtruediv__(1)`."""
    if not isinstance(expression.node, ast.BinOp) or len(args) < 2:
        return False
    name = getattr(func, "__name__", "")
    if name.startswith("__r") or name in ("rsub", "rdiv"):
        return True
    left = expression.nodes[0]
    number_left = isinstance(left, ast.Constant) or (isinstance(left, ast.UnaryOp) and isinstance(left.operand, ast.Constant))
    return number_left and hasattr(args[0], "dtype") and not hasattr(args[1], "dtype")


def small(dtype: str) -> str:
    """Return a guard that survives in a dtype and does not overflow when divided by."""
    return "1e-4" if dtype == "float16" else "1e-12"


_ENDLESS = ("log", "log2", "log10", "log1p", "xlogy", "rsqrt", "atanh", "erfinv", "logit", "ndtri")  # infinite at the edge: a bound near it decides their value
_MARGINS = {"float16": "1e-3", "bfloat16": "1e-2"}  # that 1 can be told from 1 less this in


def _inside(margin: str) -> str:
    return f"{{x}}.clamp(-1 + {margin}, 1 - {margin})"


def guarded(op: str, dtype: str, exponent: float | None = None) -> list[Fix]:
    """Return the changes that keep an operation inside its domain, best first."""
    eps = small(dtype)
    clamp = f"{{x}}.clamp_min({eps})"
    edge = _inside(_MARGINS.get(dtype, "1e-6"))
    share = f"{{x}}.clamp({_MARGINS.get(dtype, '1e-6')}, 1 - {_MARGINS.get(dtype, '1e-6')})"
    close = _inside(_MARGINS.get(dtype, "1e-7"))  # an angle of 0.001 has a cosine of 1 - 5e-7, and a healthy slope
    table: dict[str, list[Fix]] = {
        "log": [Fix(f"keep the argument of log at or above {eps}", clamp, 0)],
        "log1p": [Fix("keep the argument of log1p above -1", "{x}.clamp_min(-1 + 1e-6)", 0)],
        "sqrt": [Fix(f"keep the argument of sqrt at or above {eps}", clamp, 0)],
        "rsqrt": [Fix("add a small number inside the root", "{x} + 1e-6", 0), Fix("keep the argument above 0", "{x}.clamp_min(1e-6)", 0)],
        "reciprocal": [Fix("keep the argument away from 0", "{x}.where({x} != 0, 1.0)", 0)],
        "div": [
            Fix("let elements whose denominator is 0 count as 0", "{0} / {1}.where({1} != 0, float('inf'))"),
            Fix("keep the denominator away from 0", "{x}.clamp_min(1e-6)", 1),
            Fix("keep the denominator away from 0", "max({x}, 1e-6)", 1),
        ],
        "pow": _pow_fixes(clamp, exponent),
        "acos": [Fix("keep the argument inside (-1, 1)", close, 0)],
        "asin": [Fix("keep the argument inside (-1, 1)", close, 0)],
        "atanh": [Fix("keep the argument inside (-1, 1)", edge, 0)],
        "erfinv": [Fix("keep the argument of erfinv inside (-1, 1)", edge, 0)],
        "acosh": [Fix("keep the argument above 1", "{x}.clamp_min(1 + 1e-6)", 0)],
        "logit": [Fix("keep the argument inside (0, 1)", share, 0)],
        "ndtri": [Fix("keep the argument inside (0, 1)", share, 0)],
        "lgamma": [Fix("keep the argument above 0", "{x}.clamp_min(1e-4)", 0)],
        "digamma": [Fix("keep the argument above 0", "{x}.clamp_min(1e-4)", 0)],
        "polygamma": [Fix("keep the argument above 0", "{x}.clamp_min(1e-4)", 1)],
        "remainder": [Fix("leave the divisor out where it is 0", "{x}.where({x} != 0, 1.0)", 1)],
        "fmod": [Fix("leave the divisor out where it is 0", "{x}.where({x} != 0, 1.0)", 1)],
        "xlogy": [Fix(f"keep the argument of the logarithm at or above {eps}", clamp, 1)],
        "special_entr": [Fix(f"keep the argument at or above {eps}", clamp, 0)],
        "hypot": [Fix("write the root with a small number inside", "({0}.square() + {1}.square() + 1e-12).sqrt()")],
        "zeta": [Fix("keep the exponent above 1", "{x}.clamp_min(1 + 1e-4)", 0)],
    }
    for name, top in (("exp", "80"), ("expm1", "80"), ("sinh", "80"), ("cosh", "80"), ("exp2", "120")):
        limit = {"80": "10", "120": "15"}[top] if dtype == "float16" else top
        bound = f"{{x}}.clamp(-{limit}, {limit})" if name in ("sinh", "cosh") else f"{{x}}.clamp(max={limit})"
        table[name] = [Fix(f"keep the exponent at or below {limit}", bound, 0)]
    ridge = "{x} + 1e-4 * torch.eye({x}.shape[-1], dtype={x}.dtype, device={x}.device)"
    spread = "{x} + torch.diag(torch.linspace(0, 1e-3, {x}.shape[-1], dtype={x}.dtype, device={x}.device))"
    for name in ("inv", "solve", "cholesky", "logdet", "slogdet", "det", "cholesky_ex", "inv_ex", "solve_ex", "lu_factor", "pinv"):
        table[name] = [Fix("add a small multiple of the identity", ridge, 0)]
    oblong = "{x} + 1e-3 * torch.eye({x}.shape[-2], {x}.shape[-1], dtype={x}.dtype, device={x}.device)"
    independent = "make the columns independent with a small multiple of the identity"
    table["qr"] = [Fix(independent, oblong, 0), Fix(f"{independent}, 1e-5", oblong.replace("1e-3", "1e-5"), 0)]  # the smaller moves less and is steeper
    for name in ("eigh", "svd", "eigvalsh", "svdvals", "eig", "symeig"):
        table[name] = [
            Fix(
                "separate equal values with a spread on the diagonal, small beside it",
                f"{spread} * {{x}}.diagonal(dim1=-2, dim2=-1).abs().mean(-1)[..., None, None]",
                0,
            ),
            Fix("separate equal values with a small spread on the diagonal", spread, 0),
        ]
    for name in ("log2", "log10"):
        table[name] = table["log"]
    return table.get(op, []) if not dtype.startswith("complex") else _without_order(op, table.get(op, []))


def as_zero(view: View) -> Fix:
    """Let quotients by 0 count as 0, with the gradient 0: x / inf. Where a quotient is written in place of its numerator the denominator alone is changed."""
    whole = guarded("div", view.op.dtype)[0]
    written = view.call.endswith(("div_", "divide_", "__itruediv__"))
    return replace(whole, template="{x}.where({x} != 0, float('inf'))", operand=1) if written else whole


def _without_order(op: str, fixes: list[Fix]) -> list[Fix]:
    """Return the changes that complex numbers know: no bound can be put under them, but another number in the place of 0."""
    kept = [f for f in fixes if "clamp" not in f.template and not f.template.startswith("max(")]
    if op not in ("log", "log2", "log10", "sqrt", "rsqrt", "pow", "div"):
        return kept
    return [*kept, Fix("put a small number in the place of 0", "torch.where({x} == 0, torch.full_like({x}, 1e-6), {x})", 1 if op == "div" else 0)]


def _pow_fixes(clamp: str, exponent: float | None) -> list[Fix]:
    if exponent is not None and exponent < 0:
        return [Fix("keep the base away from 0", "{x}.clamp_min(1e-6)", 0)]
    return [Fix("keep the base above 0", clamp, 0)]

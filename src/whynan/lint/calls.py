"""Which torch operation a call is, whether written `torch.log(x)`, `F.softmax(x)`, `x.log()` or `self.act(x)`."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from whynan.lint.model import Module

_TORCH_ROOTS = ("torch.", "torch_scatter.", "torch_geometric.utils.")
_NUMBERS = {
    "numpy", "math", "cmath", "scipy", "pandas", "jax", "tensorflow", "statistics", "cupy", "sympy", "sklearn", "cv2", "PIL", "mlx", "paddle",
    "cvxpy", "numba",
}  # fmt: skip
RENAMED = {
    "arccos": "acos", "arcsin": "asin", "arctanh": "atanh", "arctan": "atan",
    "arctan2": "atan2", "arccosh": "acosh", "divide": "div", "true_divide": "div", "absolute": "abs",
    "special_expit": "sigmoid", "expit": "sigmoid", "clip": "clamp", "vector_norm": "norm", "matrix_norm": "norm", "gammaln": "lgamma", "psi":
    "digamma", "multiply": "mul", "subtract": "sub", "negative": "neg", "mm": "matmul", "bmm": "matmul", "inverse": "inv", "log_sigmoid":
    "logsigmoid", "float_power": "pow", "masked_softmax": "softmax", "special_xlogy": "xlogy", "nansum": "sum", "logsumexp": "logsumexp",
    "linalg_norm": "norm",
}  # fmt: skip
METHODS = frozenset(
    {
        "abs", "absolute", "acos", "acosh", "add", "addcmul", "addcdiv", "all", "amax", "amin", "angle", "any", "arccos", "arccosh", "arcsin",
        "arctanh", "argmax", "asin", "atan", "atan2", "atanh", "baddbmm", "bfloat16", "bincount", "bmm", "bool", "chunk", "clamp", "clamp_max", "clamp_min",
        "clip", "clone", "contiguous", "cosh", "count_nonzero", "cpu", "cuda", "cumprod", "cumsum", "detach", "diag", "diagonal", "digamma", "div", "divide",
        "double", "eq", "erfinv", "exp", "exp2", "expand", "expand_as", "expm1", "fill", "flatten", "float", "float_power", "fmod", "gather", "ge",
        "gt", "half", "hypot", "index_add", "index_select", "int", "inverse", "item", "kthvalue", "le", "lerp", "lgamma", "log", "log10", "log1p",
        "log2", "log_softmax", "logaddexp", "logdet", "logit", "logsumexp", "long", "lt", "masked_fill", "masked_scatter", "masked_select", "matmul",
        "max", "maximum", "mean", "median", "min", "minimum", "mm", "mul", "multiply", "mvlgamma", "nan_to_num", "nanmean", "nansum", "narrow", "ne",
        "neg", "new_empty", "new_full", "new_ones", "new_zeros", "nonzero", "norm", "numel", "permute", "pow", "prod", "reciprocal", "relu", "remainder",
        "repeat", "repeat_interleave", "requires_grad", "reshape", "roll", "rsqrt", "scatter", "scatter_add", "select", "sigmoid", "sign", "sin",
        "cos", "sinh", "size", "slogdet", "softmax", "sort", "split", "sqrt", "square", "squeeze", "std", "sub", "subtract", "sum", "t", "tan",
        "tanh", "to", "topk", "trace", "transpose", "tril", "triu", "true_divide", "type", "type_as", "unbind", "unflatten", "unfold", "unique",
        "unsqueeze", "values", "var", "view", "view_as", "where", "xlogy", "zero", "masked_softmax", "softplus", "cholesky", "det", "logical_not",
        "logical_and", "logical_or", "ones_like", "new_tensor", "tolist", "copy", "index_copy", "index_put",
    }
)  # fmt: skip
TENSOR_ONLY = frozenset(
    {
        "unsqueeze",
        "detach",
        "backward",
        "masked_fill",
        "masked_fill_",
        "rsqrt",
        "clamp_min",
        "clamp_max",
        "log_softmax",
        "softmax",
        "sigmoid",
        "cuda",
        "cpu",
        "half",
        "bfloat16",
        "new_zeros",
        "new_ones",
        "type_as",
        "logsumexp",
        "index_add",
        "index_add_",
        "scatter_add",
        "scatter_add_",
        "requires_grad_",
        "expand_as",
        "view_as",
        "masked_select",
        "addcmul_",
        "div_",
        "mul_",
        "add_",
        "bmm",
        "contiguous",
        "permute",
        "index_select",
        "nan_to_num_",
        "unfold",
        "log",
        "log2",
        "log10",
        "log1p",
        "sqrt",
        "exp",
        "expm1",
        "norm",
        "acos",
        "asin",
        "atanh",
        "acosh",
        "tanh",
        "relu",
        "square",
        "cosh",
        "sinh",
        "lgamma",
        "digamma",
        "logit",
        "erfinv",
        "hypot",
        "amax",
        "amin",
        "xlogy",
        "cos",
        "sin",
        "numel",
    }
)  # fmt: skip (numpy's arrays have none of these)


@dataclass(slots=True)
class Operation:
    """A call that is, or may be, a tensor operation."""

    name: str
    operands: list[ast.expr]  # the tensor first, then the positional arguments
    keywords: dict[str, ast.expr]
    call: ast.Call
    sure: bool  # it is torch's: resolved through the imports, or a method only tensors have
    in_place: bool = False
    module: str = ""  # dotted name of a function; "" for a method

    @property
    def operand(self) -> ast.expr | None:
        """The tensor it works on."""
        return self.operands[0] if self.operands else self.keywords.get("input")

    def argument(self, position: int, *names: str) -> ast.expr | None:
        """An argument by position (the tensor is 0) or by name."""
        for name in names:
            if name in self.keywords:
                return self.keywords[name]
        return self.operands[position] if position < len(self.operands) else None


def operation(module: Module, call: ast.Call) -> Operation | None:
    """The operation of a call, or None where it is none that is known.

    `math.log(x)` and `np.log(x)` give None: they are not torch's.
    """
    function = call.func
    keywords = {k.arg: k.value for k in call.keywords if k.arg}
    name = module.dotted(function)
    if name:
        if not name.startswith(_TORCH_ROOTS):
            return None
        last = name.rpartition(".")[2]
        return Operation(RENAMED.get(last.rstrip("_"), last.rstrip("_")), list(call.args), keywords, call, True, last.endswith("_"), name)
    if not isinstance(function, ast.Attribute) or is_foreign(module, function.value):
        return None
    method = function.attr
    bare = method.rstrip("_") if method.endswith("_") and not method.endswith("__") else method
    if bare not in METHODS:
        return None
    return Operation(RENAMED.get(bare, bare), [function.value, *call.args], keywords, call, method in TENSOR_ONLY, method != bare)


def is_foreign(module: Module, node: ast.expr) -> bool:
    """Whether an expression belongs to numpy, math or another library that is not torch."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return isinstance(node, ast.Name) and foreign_name(module.imports.get(node.id, ""))


def foreign_name(dotted: str) -> bool:
    """Whether a dotted name is of a library of numbers other than torch.

    >>> foreign_name("numpy.log"), foreign_name("torch.log")
    (True, False)
    """
    return dotted.partition(".")[0] in _NUMBERS


def same(a: ast.expr | None, b: ast.expr | None) -> bool:
    """Whether two expressions are written alike."""
    return a is not None and b is not None and type(a) is type(b) and ast.dump(a) == ast.dump(b)


def names_in(node: ast.AST) -> set[str]:
    """The names and attributes of self that an expression mentions, receivers of calls included."""
    found: set[str] = set()
    stack: list[ast.AST] = [node]
    while stack:
        one = stack.pop()
        if isinstance(one, ast.Name):
            found.add(one.id)
        elif isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == "self":
            found.add(f"self.{one.attr}")
            continue
        stack.extend(ast.iter_child_nodes(one))
    return found

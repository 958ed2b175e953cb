"""One walk over a file: only statements on lines that name something hazardous are looked into.

**Cost:** one regular expression over the text, one visit to each statement; expressions are visited on marked lines alone.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_left, bisect_right

from whynan.lint.calls import operation
from whynan.lint.findings import Finding
from whynan.lint.model import Function, Module, Owner, Scope, note_import
from whynan.lint.rules import BINARY_RULES, CALL_RULES, FUNCTION_RULES, STATEMENT_RULES
from whynan.lint.spot import Frame, Spot
from whynan.lint.values import Values

_MARKS = re.compile(
    r"\.(?:log|sqrt|rsqrt|pow|exp|softmax|a?cos|a?sinh?\(|atanh|arc|erfinv|icdf|reciprocal|norm|std|var|hypot|lgamma|digamma|polygamma|remainder|fmod|inv|solve|cholesky|slogdet|eig|svd|pinv"
    r"|where|nan_to_num|masked_fill|binary_cross|cross_entropy|nll_loss|ctc_loss|CTCLoss|mean\(|mse_loss|l1_loss|smooth_l1|prod|cumprod|load|save|half\(|to\(|Parameter|Adam|RMSprop|scaled_dot|all\("
    r"|clip_grad|backward|zeros|zeros_like|tensor\(|div_?\(|divide|clamp|clip\(|square\(|minimum\(|grad\b|layer_norm|LayerNorm|BatchNorm|GroupNorm|RMSNorm|cosine_sim|xlogy|entr\(|isnan|isfinite|isinf|symeig)"
    r"|\+ *(?:[\d.]+e-|\w*\.?\w*eps|EPS)|1(?:\.0)? - |0\.\d+ \* "
)
_ANYWHERE = re.compile(r"BCELoss\(|MultiheadAttention\(|TransformerEncoder\(")


class Walk:
    """The visit of one file."""

    def __init__(self, module: Module, values: Values) -> None:
        self.module, self.values = module, values
        self.found: list[Finding] = []
        text = module.text
        starts = _line_starts(text)
        self._starts = starts
        self._by_pattern: dict[str, list[int]] = {}
        self._marked = self._mark(text, starts)

    def _mark(self, text: str, starts: list[int]) -> list[int]:
        """The lines with something to look at; every line where a module of interest may be called by any name."""
        if _ANYWHERE.search(text):
            return list(range(1, len(starts) + 1))
        lines = set(_lines_of(_MARKS, text, starts))
        for sign in ("/", "**", "@ ", "assert "):
            lines.update(_lines_with(sign, text, starts))
        bare = [re.escape(a) for a, full in self.module.imports.items() if full.startswith("torch.") and a.islower()]
        if bare:
            lines.update(_lines_of(re.compile(rf"\b(?:{'|'.join(bare)})\("), text, starts))
        return sorted(lines)

    def run(self) -> list[Finding]:
        """Visit the file and return what the rules found."""
        frame = Frame(self.module.scope)
        self._function(self.module.tree, frame)
        self._block(self.module.tree.body, frame, None)
        return self.found

    def _block(self, body: list[ast.stmt], frame: Frame, owner: Owner | None) -> None:
        for statement in body:
            if _any_between(self._marked, statement.lineno, statement.end_lineno or statement.lineno):
                self._statement(statement, frame, owner)

    def _statement(self, s: ast.stmt, frame: Frame, owner: Owner | None) -> None:
        if isinstance(s, ast.FunctionDef | ast.AsyncFunctionDef):
            self._enter(s, frame, owner)
        elif isinstance(s, ast.ClassDef):
            self._class(s, frame)
        elif isinstance(s, ast.If | ast.While):
            self._expressions(s, [s.test], frame)
            self._block(s.body, self._looped(s, frame) if isinstance(s, ast.While) else frame, owner)
            self._block(s.orelse, frame, owner)
        elif isinstance(s, ast.For | ast.AsyncFor):
            self._expressions(s, [s.iter], frame)
            self._block(s.body, self._looped(s, frame), owner)
            self._block(s.orelse, frame, owner)
        elif isinstance(s, ast.With | ast.AsyncWith):
            self._expressions(s, [i.context_expr for i in s.items], frame)
            self._block(s.body, self._managed(s, frame), owner)
        elif isinstance(s, ast.Try | ast.TryStar):
            for block in (s.body, *(h.body for h in s.handlers), s.orelse, s.finalbody):
                self._block(block, frame, owner)
        elif isinstance(s, ast.Match):
            for case in s.cases:
                self._block(case.body, frame, owner)
        elif not isinstance(s, ast.Import | ast.ImportFrom | ast.Pass | ast.Break | ast.Continue | ast.Global):
            self._expressions(s, [n for n in ast.iter_child_nodes(s) if isinstance(n, ast.expr)], frame)

    def _enter(self, s: Function, frame: Frame, owner: Owner | None) -> None:
        scope = self.module.scope_of(s, owner or frame.scope.owner, frame.scope)
        quiet = any("no_grad" in ast.unparse(d) or "inference_mode" in ast.unparse(d) for d in s.decorator_list)
        inner = Frame(scope, (), quiet or frame.no_grad, frame.half)
        for statement in s.body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                note_import(statement, self.module.imports)
        self._function(s, inner)
        self._block(s.body, inner, None)

    def _class(self, s: ast.ClassDef, frame: Frame) -> None:
        owner = self.module.owners.get(s.name)
        if owner is None or owner.node is not s:
            owner = Owner(s, {m.name: m for m in s.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)})
            self.module.inner_owners.append(owner)
        for rule in STATEMENT_RULES.get(ast.ClassDef, ()):
            spot = self._spot(s, s, Frame(Scope(self.module, self.module.tree, None, owner)), {})
            rule(spot, s)
        self._block(s.body, frame, owner)

    def _looped(self, s: ast.stmt, frame: Frame) -> Frame:
        return Frame(frame.scope, (*frame.loops, s), frame.no_grad, frame.half)

    def _managed(self, s: ast.With | ast.AsyncWith, frame: Frame) -> Frame:
        written = " ".join(ast.unparse(i.context_expr) for i in s.items)
        quiet = frame.no_grad or "no_grad" in written or "inference_mode" in written
        half = frame.half
        if "autocast" in written:
            off = "enabled=False" in written
            half = "" if off else "bfloat16" if "bfloat16" in written else "float16" if ("float16" in written or "half" in written or "cuda" in written) else ""
        return Frame(frame.scope, frame.loops, quiet, half)

    def _function(self, node: Function | ast.Module, frame: Frame) -> None:
        spot = self._spot(node.body[0], node.body[0], frame, {}) if node.body else None
        last = len(self.module.text) if isinstance(node, ast.Module) else node.end_lineno or 0
        for pattern, rule in FUNCTION_RULES if spot is not None else ():
            if _any_between(self._function_lines(pattern), getattr(node, "lineno", 1), last):
                assert spot is not None
                rule(spot, node)

    def _function_lines(self, pattern: re.Pattern[str]) -> list[int]:
        known = self._by_pattern.get(pattern.pattern)
        if known is None:
            known = self._by_pattern[pattern.pattern] = _lines_of(pattern, self.module.text, self._starts)
        return known

    def _spot(self, node: ast.expr | ast.stmt, statement: ast.stmt, frame: Frame, parents: dict[int, ast.AST]) -> Spot:
        return Spot(node, statement, frame, self.values, parents, self.found)

    def _expressions(self, statement: ast.stmt, roots: list[ast.expr], frame: Frame) -> None:
        parents: dict[int, ast.AST] = {}
        rules = STATEMENT_RULES.get(type(statement))
        if rules:
            spot = self._spot(statement, statement, frame, parents)
            for rule in rules:
                rule(spot, statement)
        if not roots or not _any_between(self._marked, statement.lineno, roots[-1].end_lineno or statement.lineno):
            return
        hits: list[ast.Call | ast.BinOp] = []
        stack: list[ast.AST] = list(reversed(roots))
        while stack:
            node = stack.pop()
            kind = type(node)
            if kind is ast.Call or kind is ast.BinOp:
                hits.append(node)  # type: ignore[arg-type]
            elif kind is ast.Name or kind is ast.Constant:
                continue
            for name in node._fields:
                child = getattr(node, name, None)
                if isinstance(child, ast.AST):
                    parents[id(child)] = node
                    stack.append(child)
                elif type(child) is list:
                    for one in child:
                        if isinstance(one, ast.AST):
                            parents[id(one)] = node
                            stack.append(one)
        for node in hits:
            self._look(node, statement, frame, parents)

    def _look(self, node: ast.Call | ast.BinOp, statement: ast.stmt, frame: Frame, parents: dict[int, ast.AST]) -> None:
        if isinstance(node, ast.BinOp):
            rules = BINARY_RULES.get(type(node.op))
            if rules:
                spot = self._spot(node, statement, frame, parents)
                for binary in rules:
                    binary(spot, node)
            return
        op = operation(self.module, node)
        if op is None:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
            plain = CALL_RULES.get("()" + name) or CALL_RULES.get("()")
            if plain:
                spot = self._spot(node, statement, frame, parents)
                for other in plain:
                    other(spot, None, node)
            return
        for call in CALL_RULES.get(op.name, ()):
            call(self._spot(node, statement, frame, parents), op, node)


def _line_starts(text: str) -> list[int]:
    starts = [0]
    at = text.find("\n")
    while at >= 0:
        starts.append(at + 1)
        at = text.find("\n", at + 1)
    return starts


def _lines_of(pattern: re.Pattern[str], text: str, starts: list[int]) -> list[int]:
    lines: list[int] = []
    line = 0
    last = len(starts)
    for match in pattern.finditer(text):
        at = match.start()
        while line < last and starts[line] <= at:
            line += 1
        if not lines or lines[-1] != line:
            lines.append(line)
    return lines


def _lines_with(sign: str, text: str, starts: list[int]) -> list[int]:
    lines: list[int] = []
    at = text.find(sign)
    while at >= 0:
        line = bisect_right(starts, at)
        lines.append(line)
        at = text.find(sign, starts[line]) if line < len(starts) else -1
    return lines


def _any_between(lines: list[int], first: int, last: int) -> bool:
    at = bisect_left(lines, first)
    return at < len(lines) and lines[at] <= last

"""A place that a rule looks at, with all that is known around it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from whynan.lint import aftermath, callers, gradients, guards
from whynan.lint.calls import foreign_name, names_in
from whynan.lint.codes import CODES
from whynan.lint.facts import OTHER, TORCH, Fact
from whynan.lint.findings import Confidence, Finding, Fix, Place
from whynan.lint.model import Module, Scope
from whynan.lint.values import Values

HIGH, MEDIUM, LOW = Confidence.HIGH, Confidence.MEDIUM, Confidence.LOW
_BACKWARD = frozenset({"WN501", "WN502", "WN503", "WN504"})
_ASIDE = re.compile(r"^_*init|initiali[sz]e|reset_parameters|/testing/|/test_\w+\.py|_test\.py")  # not the code that trains
_NOT_LEARNING = re.compile(
    r"Optimizer|[Mm]etric|Transform[^e]|Dataset|optim|init|eval|[Tt]est|dataset|schedul"
    r"|convert|plot|process|augment|sampl|generat|\bdata\b|[Aa]ssign|integrat|simulat"
)
_NUMPY_ONLY = frozenset({"astype", "tobytes"})  # methods that tensors do not have


@dataclass(slots=True)
class Frame:
    """What encloses a statement."""

    scope: Scope
    loops: tuple[ast.stmt, ...] = ()
    no_grad: bool = False
    half: str = ""  # "float16" or "bfloat16" inside an autocast region


@dataclass(slots=True)
class Spot:
    """A node under a rule's eyes."""

    node: ast.expr | ast.stmt
    statement: ast.stmt
    frame: Frame
    values: Values
    parents: dict[int, ast.AST]
    found: list[Finding] = field(default_factory=list)

    @property
    def scope(self) -> Scope:
        return self.frame.scope

    @property
    def module(self) -> Module:
        return self.frame.scope.module

    def of(self, node: ast.expr | None) -> Fact:
        """What is known of an expression here."""
        return self.values.of(node, self.scope)

    def above(self, node: ast.AST | None = None) -> Iterator[ast.AST]:
        """The expressions around this node, innermost first."""
        at = self.parents.get(id(node or self.node))
        while at is not None:
            yield at
            at = self.parents.get(id(at))

    def _detached(self) -> bool:
        """Whether what stands around this place ends the gradient; torch.tensor of a tensor does too."""
        return any(
            (isinstance(o, ast.Attribute) and o.attr in ("detach", "item", "data"))
            or (isinstance(o, ast.Call) and self.module.dotted(o.func) == "torch.tensor")
            for o in self.above()
        )

    def mentions(self, *words: str) -> bool:
        """Whether the lines of the statement hold one of some words; cheaper than unparsing it."""
        lines = self.module.lines[self.statement.lineno - 1 : self.statement.end_lineno]
        return any(word in line for line in lines for word in words)

    def text(self, node: ast.expr) -> str:
        """An expression as one line of source, shortened."""
        line = ast.unparse(node)
        return line if len(line) <= 60 else line[:57] + "..."

    def guard(self, node: ast.expr) -> int:
        """2: a condition before this place asks about exactly this expression; 1: about something in it; 0: none does."""
        return guards.guard(node, self.scope, self.node.end_lineno or self.node.lineno)

    @property
    def _whole(self) -> str:
        """The names around this place: class, function, the end of the path."""
        owner = self.scope.owner
        return f"{owner.node.name if owner else ''} {self.scope.name} {'/'.join(self.module.path.parts[-4:])}"

    @property
    def aside(self) -> bool:
        """Whether the names around say that this prepares data, measures or simulates: large values and gradients are not met there."""
        return self.frame.no_grad or _NOT_LEARNING.search(self._whole) is not None

    @property
    def learning(self) -> bool:
        """Whether a gradient is likely to be taken here: in a module's forward pass or in a loss."""
        if self.aside or isinstance(self.scope.node, ast.Module):
            return False
        owner = self.scope.owner
        if owner is not None and any("Module" in ast.unparse(b) or "Loss" in ast.unparse(b) for b in owner.node.bases):
            return True
        return re.search(r"[Ll]oss|forward|diverg|penalty", self._whole) is not None

    @property
    def function_text(self) -> str:
        """The source of the function that is looked at, or of the file."""
        node = self.scope.node
        if isinstance(node, ast.Module):
            return self.module.text
        return "\n".join(self.module.text.split("\n")[node.lineno - 1 : node.end_lineno])

    def _without_graph(self) -> bool:
        """Whether autograd does not look into this code: a function with a backward pass of its own."""
        owner = self.scope.owner
        return owner is not None and any(ast.unparse(base).endswith("Function") for base in owner.node.bases)

    def direct(self, node: ast.expr) -> bool:
        """Whether a value is what the function was given, or a difference or part of it: nothing is between the caller and it."""
        if isinstance(self.scope.node, ast.Module):
            return False
        node = self.values.base(node, self.scope)
        parts = [node.left, node.right] if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub | ast.Mult | ast.Pow) else [node]
        return all(self._handed_in(p) for p in parts)

    def _handed_in(self, node: ast.expr) -> bool:
        for _ in range(4):
            node = self.values.base(node, self.scope)
            if isinstance(node, ast.Constant):
                return True
            if not isinstance(node, ast.Name):
                return isinstance(node, ast.BinOp) and all(self._handed_in(p) for p in (node.left, node.right))
            bound = self.scope.reaching(node.id, (node.lineno, node.col_offset))
            if bound is None:
                return self.scope.parameter(node.id)[0] and node.id != "self"
            if bound[0].value is None or bound[0].loop:
                return False
            if bound[0].index is not None:
                unpacked = bound[0].value
                if not isinstance(unpacked, ast.Call) or not isinstance(unpacked.func, ast.Attribute):
                    return False
                return unpacked.func.attr in ("chunk", "split", "unbind") and self._handed_in(unpacked.func.value)
            node = bound[0].value
        return False

    def given(self, node: ast.expr) -> bool:
        """Whether an expression depends on what the function is given, not on constants of the file alone."""
        if isinstance(self.scope.node, ast.Module):
            return False
        return any(n in self.scope.bindings or self.scope.parameter(n)[0] or n.startswith("self.") for n in names_in(self.values.base(node, self.scope)))

    def covered_later(self) -> bool:
        """Whether the result of this statement is searched for infinities or NaN further down, or patched under a mask."""
        return aftermath.covered(self)

    def flows(self, node: ast.expr) -> bool:
        """Whether a gradient can be wanted through an expression."""
        return gradients.flows(node, self.scope, self.values)

    def sure(self, confidence: Confidence, owner: int) -> Confidence | None:
        """A confidence in the light of whose library the value belongs to; None: not torch's."""
        if owner == TORCH:
            return confidence
        if owner == OTHER or any(isinstance(o, ast.Attribute) and o.attr in _NUMPY_ONLY for o in self.above()):
            return None
        return confidence.lowered() if self.mixed else confidence

    @property
    def mixed(self) -> bool:
        """Whether the file also works with numpy or another library of numbers."""
        return any(foreign_name(full) and not full.startswith("math") for full in self.module.imports.values())

    def report(
        self,
        code: str,
        title: str,
        label: str,
        help_: str,
        confidence: Confidence | None,
        *,
        node: ast.expr | ast.stmt | None = None,
        origin: ast.AST | None = None,
        origin_label: str = "",
        fix: Fix | None = None,
        note: str = "",
        of: ast.expr | None = None,
    ) -> None:
        """Write down a finding; `of` is the value that has to be at the edge, which the callers may keep from it."""
        if confidence is None or (code in _BACKWARD and (self.frame.no_grad or self._detached() or self._without_graph())):
            return
        if code.startswith("WN") and aftermath.overwritten(self):
            return
        if code.startswith("WN") and (self.frame.no_grad or _ASIDE.search(f"{self.scope.name} {self.module.path.as_posix()}")):
            confidence = confidence.lowered()
        if confidence is HIGH and of is not None:
            confidence = callers.settle(code, of, self.scope, self.values)
        if confidence is HIGH and code.startswith("WN") and callers.runs_once(self.scope, bool(self.frame.loops)):
            confidence = MEDIUM
        slug, severity = CODES[code]
        at = node or self.node
        there = place(origin) if isinstance(origin, ast.expr | ast.stmt) else None
        if there is not None and there.line == at.lineno:
            there = None
        self.found.append(
            Finding(str(self.module.path), place(at), code, slug, title, label, help_, severity, confidence, note, there, origin_label if there else "", fix)
        )


def place(node: ast.expr | ast.stmt) -> Place:
    """Where a node stands; columns in bytes, as the parser counts them."""
    return Place(node.lineno, node.col_offset, node.end_lineno or node.lineno, node.end_col_offset or node.col_offset)

"""Where rules register themselves."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from whynan.lint.calls import Operation
from whynan.lint.model import Function
from whynan.lint.spot import Spot

CallRule = Callable[[Spot, Operation | None, ast.Call], None]
BinaryRule = Callable[[Spot, ast.BinOp], None]
StatementRule = Callable[[Spot, ast.stmt], None]
FunctionRule = Callable[[Spot, Function | ast.Module], None]

CALL_RULES: dict[str, list[CallRule]] = {}
BINARY_RULES: dict[type[ast.operator], list[BinaryRule]] = {}
STATEMENT_RULES: dict[type[ast.stmt], list[StatementRule]] = {}
FUNCTION_RULES: list[tuple[re.Pattern[str], FunctionRule]] = []


def on_call(*names: str) -> Callable[[CallRule], CallRule]:
    """Look at calls of these operations; `()name` are calls that are no tensor operation, `()` all of those."""

    def register(rule: CallRule) -> CallRule:
        for name in names:
            CALL_RULES.setdefault(name, []).append(rule)
        return rule

    return register


def on_binary(*kinds: type[ast.operator]) -> Callable[[BinaryRule], BinaryRule]:
    """Look at binary operations."""

    def register(rule: BinaryRule) -> BinaryRule:
        for kind in kinds:
            BINARY_RULES.setdefault(kind, []).append(rule)
        return rule

    return register


def on_statement(*kinds: type[ast.stmt]) -> Callable[[StatementRule], StatementRule]:
    """Look at statements."""

    def register(rule: StatementRule) -> StatementRule:
        for kind in kinds:
            STATEMENT_RULES.setdefault(kind, []).append(rule)
        return rule

    return register


def on_function(pattern: str) -> Callable[[FunctionRule], FunctionRule]:
    """Look at whole functions, and at the top level of a file, in whose text a pattern occurs."""

    def register(rule: FunctionRule) -> FunctionRule:
        FUNCTION_RULES.append((re.compile(pattern), rule))
        return rule

    return register

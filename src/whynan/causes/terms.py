"""Name the terms of a loss as the source does, and say which of them are not finite."""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from whynan.causes.fixes import source_name
from whynan.causes.source import Expression, expression_at
from whynan.records import TensorStats, number

if TYPE_CHECKING:
    from whynan.trace.birth import Birth
    from whynan.trace.terms import Term

_SHOWN = 5e-4  # by how much a sum may be off the loss in the digits that are shown
LISTED = 6  # terms that are told one by one
_LISTS = ("stack", "cat", "concat", "concatenate", "sum")  # of which the terms are members of a list

_ADDS = ("add", "sub", "mul", "div")  # as operators or as functions


@dataclass(frozen=True, slots=True)
class Named:
    """A term under its name in the source."""

    name: str
    index: int
    value: TensorStats


def named_terms(birth: Birth | None) -> list[Named]:
    """Return the terms of the loss of a replayed step with their values, under their names in the source."""
    if birth is None or birth.terms is None:
        return []
    from whynan.tripwire.values import stats

    terms = by_name(birth.terms)
    times = Counter(term.index for _, term in terms)  # of an operation that made several (`unbind`) only one value is kept
    known = [(name, term) for name, term in terms if term.index in birth.outputs and times[term.index] == 1]
    found = [Named(name, term.index, stats(name, birth.outputs[term.index])) for name, term in known]
    return found if len(found) > 1 else []


def by_name(tree: Term) -> list[tuple[str, Term]]:
    """Return the terms of a loss under their names in the source."""
    found = _flat(tree, "")
    names = _told_apart([name or f"term {place + 1}" for place, (name, _) in enumerate(found)])
    return [(name, term) for name, (_, term) in zip(names, found, strict=True)]


def _flat(term: Term, name: str, among: bool = False) -> list[tuple[str, Term]]:
    """Take a sum apart as far as its terms have no name of their own."""
    if among and name.isidentifier():
        return [(name, term)]
    among = among or len(term.parts) > 1
    if len(term.parts) > 1 and any(_is_inside_a_call(part) for part in term.parts):  # a function that scales one has no sum in it
        return [(name, term)]
    if among and len(term.parts) == 1 and (product := _undecided(term.parts[0])) is not None:
        return [(product, term)]
    found: list[tuple[str, Term]] = []
    for part in term.parts:
        found += _flat(part, _name(part) or "", among)
    return found or [(name, term)]


def term_words(birth: Birth | None, named: list[Named], scale: float = 1.0) -> list[str]:
    """Say the terms in one line: each by its value, or how many are bad of many; and where they do not add up to the loss, that they are weighted."""
    if birth is None or not named:
        return []
    terms = [term.value for term in named]
    bad = [t for t in terms if t.nonfinite]
    from_here = _born_on_the_way(birth, named)
    if len(terms) <= LISTED:
        words = ", ".join(f"{t.name} {_value(t)}" for t in terms)
    else:
        words = f"{len(bad)} of {len(terms)} not finite: {_some([f'{t.name} {_value(t)}' for t in bad])}" if bad else f"all {len(terms)} finite"
        from_here = [] if from_here == [t.name for t in bad] else from_here  # just listed
    return [f"terms of the loss{_weighted(birth, terms, scale)}: {words}{f'; born on the way to {_some(from_here)}' if from_here else ''}"]


def _weighted(birth: Birth, terms: list[TensorStats], scale: float) -> str:
    loss, values = birth.losses[-1] / scale if birth.losses else math.nan, [t.min for t in terms if t.min is not None and not t.nonfinite]
    if not math.isfinite(loss) or not len(values) == len(terms) <= LISTED or math.isclose(sum(values), loss, rel_tol=_SHOWN, abs_tol=1e-12):
        return ""
    return f" ({number(loss)}), before what weights them"


def _some(names: list[str]) -> str:
    return ", ".join(names[:LISTED]) + (" …" if len(names) > LISTED else "")


def _born_on_the_way(birth: Birth, named: list[Named]) -> list[str]:
    """Name the terms that places of birth go into, where these are not all."""
    from whynan.trace.terms import reached_by

    places = [op if not op.backward or op.live else birth.graph.forward_of(op) for op in birth.slice.births]
    reached = reached_by(birth.graph, [op for op in places if op is not None and not op.backward])
    names = [term.name for term in named if term.index in reached]
    return [] if len(names) == len(named) else names


def _value(term: TensorStats) -> str:
    if term.nonfinite:
        return "nan" if term.nan else "inf" if term.posinf else "-inf"
    return number(term.min if term.min is not None else math.nan)


def _is_inside_a_call(term: Term) -> bool:
    """Whether a sum is written nowhere: a function of torch (a cross-entropy with smoothing) adds something up by itself."""
    expression = expression_at(term.site, "") if term.site is not None else None
    return expression is not None and isinstance(expression.node, ast.Call) and source_name(expression.name) not in (*_ADDS, *_LISTS, "reduce")


def _name(term: Term) -> str | None:
    """Return what the source calls a term where it is added or weighted; nothing where that is an accumulator or a longer expression."""
    expression = expression_at(term.site, "") if term.site is not None else None
    if expression is not None and expression.name in _LISTS and isinstance(expression.node, ast.Call):
        return _of_list(expression, term)
    if expression is None or len(expression.nodes) != 2 or source_name(expression.name) not in _ADDS:
        return None
    node = expression.nodes[term.operand % 2]
    if term.lone and expression.name in ("mul", "div") and not isinstance(expression.node, ast.AugAssign):
        node = _told_by_source(expression) or node
    if term.lone and expression.segment(node) in _targets(expression):  # the sum began with a number
        node = expression.nodes[1 - term.operand % 2]
    text = " ".join(expression.segment(node).split())
    goes_on = bool(term.parts) and text in _targets(expression)  # else it is what the sum began with
    return None if isinstance(node, ast.BinOp) or len(text) > 40 or goes_on else text


def _of_list(expression: Expression, term: Term) -> str | None:
    """Return the name of a list that is added up as a whole, or of its member where it is written out."""
    given = expression.nodes[0] if expression.nodes else None
    if isinstance(given, ast.List | ast.Tuple) and expression.name != "sum":
        plain = not any(isinstance(member, ast.Starred) for member in given.elts) and term.operand < len(given.elts)
        text = " ".join(expression.segment(given.elts[term.operand]).split()) if plain else ""
        return text if 0 < len(text) <= 40 else None
    summed = expression.name == "sum" and bool(term.parts)  # so far
    return expression.segment(given) if isinstance(given, ast.Name | ast.Attribute) and not summed else None


def _undecided(part: Term) -> str | None:
    """Return the text of a product where the source does not say which of its factors is the weight: `beta * kl` arrives as `kl * beta` does."""
    expression = expression_at(part.site, "") if part.site is not None else None
    if expression is None or not part.lone or expression.name != "mul" or len(expression.nodes) != 2 or not isinstance(expression.node, ast.BinOp):
        return None
    if _told_by_source(expression) is not None:
        return None
    text = " ".join(expression.text.split())
    return text if len(text) <= 40 else ""


def _told_by_source(expression: Expression) -> ast.expr | None:
    """Return the factor that is the term, where the other is its weight: a number, one that is not computed here, a subscript or an attribute."""
    for likely in (_is_no_number, _is_computed, _is_plain):
        chosen = [n for n in expression.nodes if likely(expression, n)]
        if len(chosen) == 1:
            return chosen[0]
    return None


def _is_no_number(expression: Expression, node: ast.expr) -> bool:
    return not _is_number(expression, node)


def _is_computed(expression: Expression, node: ast.expr) -> bool:
    here = ast.walk(expression.function or ast.Module([], []))
    return isinstance(node, ast.Call) or (isinstance(node, ast.Name) and bool(_assigned(here, node.id)))


def _is_plain(expression: Expression, node: ast.expr) -> bool:
    return isinstance(node, ast.Name | ast.Call)


def _is_number(expression: Expression, node: ast.expr) -> bool:
    """Whether a factor is a number of the source: written out, or a name that the function is given or gives one, or the module."""
    if not isinstance(node, ast.Name):
        return _is_written(node)
    function = expression.function
    values: list[ast.expr] = []
    if isinstance(function, ast.FunctionDef):
        given = function.args
        last = [*given.posonlyargs, *given.args][-len(given.defaults) :] if given.defaults else []
        defaults = [*zip(last, given.defaults, strict=True), *((a, d) for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True) if d is not None)]
        values = [value for argument, value in defaults if argument.arg == node.id] + _assigned(ast.walk(function), node.id)
        if not values and any(a.arg == node.id for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)):
            return False
    values = values or _assigned(expression.tree, node.id)
    return bool(values) and all(map(_is_written, values))


def _assigned(nodes: Iterable[ast.AST], name: str) -> list[ast.expr]:
    """Return what is assigned to a name."""
    return [n.value for n in nodes if isinstance(n, ast.Assign) and any(_stores(target, name) for target in n.targets)]


def _stores(target: ast.expr, name: str) -> bool:
    return any(isinstance(t, ast.Name) and t.id == name and isinstance(t.ctx, ast.Store) for t in ast.walk(target))


def _is_written(node: ast.expr) -> bool:
    node = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _targets(expression: Expression) -> set[str]:
    """Return the names that the statement around an expression assigns: a sum that goes on under its own name."""
    if isinstance(expression.node, ast.AugAssign):
        return {expression.segment(expression.node.target)}
    for node in ast.walk(expression.function or ast.Module([], [])):
        if isinstance(node, ast.Assign) and any(child is expression.node for child in ast.walk(node.value)):
            return {expression.segment(target) for target in node.targets}
    return set()


def _told_apart(names: list[str]) -> list[str]:
    """Number the names that stand for several terms: those of a loop.

    >>> _told_apart(["value", "text_loss", "value"])
    ['value[0]', 'text_loss', 'value[1]']
    """
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, -1) + 1
        found.append(f"{name}[{seen[name]}]" if names.count(name) > 1 else name)
    return found

"""Small faults planted in Python functions, so that a model can be asked to repair them."""

from __future__ import annotations

import ast
import random

COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "in": "not in", "is": "is not"}
SIGNS = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.In: "in",
    ast.Is: "is",
}
OPERATORS = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "//"),
}


def planted(code: str, draw: random.Random) -> str | None:
    """`code` with one fault: a wrong comparison, operator or connective, or a constant that is off by one.

    Args:
        code: the source of one or more complete top-level definitions.
        draw: where the choice among the possible faults comes from.

    Returns:
        The changed source, still valid Python; None where the code cannot be parsed or offers no place.
    """
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return None
    lines = code.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    edits = [edit for node in ast.walk(tree) for edit in _edits(node)]
    if not edits:
        return None
    (first, last), old, new = draw.choice(edits)
    begin, end = (starts[row - 1] + column for row, column in (first, last))
    between = code.encode()[begin:end].decode()
    if between.count(old) != 1:
        return None
    wrong = code.encode()[:begin].decode() + between.replace(old, new) + code.encode()[end:].decode()
    try:
        ast.parse(wrong)
    except SyntaxError:
        return None
    return wrong


Span = tuple[tuple[int, int], tuple[int, int]]  # (line, byte column) of its begin and of its end


def _edits(node: ast.AST) -> list[tuple[Span, str, str]]:
    """Faults that this node can have: where, which text, and what stands in its place."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SIGNS:
        sign = SIGNS[type(node.ops[0])]
        return [(_between(node.left, node.comparators[0]), sign, COMPARISONS[sign])]
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not isinstance(node.left, ast.Constant):
        old, new = OPERATORS[type(node.op)]
        return [(_between(node.left, node.right), old, new)]
    if isinstance(node, ast.BoolOp):
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        return [(_between(node.values[0], node.values[1]), old, new)]
    if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value < 10:
        here = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
        return [(here, str(node.value), str(node.value + 1))]
    return []


def _between(left: ast.expr, right: ast.expr) -> Span:
    return (left.end_lineno or 0, left.end_col_offset or 0), (right.lineno, right.col_offset)

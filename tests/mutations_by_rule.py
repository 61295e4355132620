"""Mutations of the syntax tree: operators, constants, conditions, dropped statements, swapped names.

    for mutation in chosen(folder): ...       the same ones for everyone who has these files

All that could be mutated is ranked by a hash of its function, its statement and the change. So a function
that moves takes its mutations along, and a change of one function leaves those of the others.
"""

import ast
import hashlib
import re
from typing import NamedTuple

import budgets

COUNTS = {"lowprec": 90, "harness": 25, "tasks": 25}  # mutations of its core, and of these rooms
ROOMS = tuple(COUNTS)
EACH_FUNCTION = 2  # mutations that it has at most
NOT_HERE = ("triton_step.py",)  # needs a GPU

OPERATORS = {  # class of the node -> (its text, what takes its place)
    ast.Lt: (r"<", "<="),
    ast.LtE: (r"<=", "<"),
    ast.Gt: (r">", ">="),
    ast.GtE: (r">=", ">"),
    ast.Eq: (r"==", "!="),
    ast.NotEq: (r"!=", "=="),
    ast.Is: (r"\bis\b", "is not"),
    ast.IsNot: (r"\bis\s+not\b", "is"),
    ast.In: (r"\bin\b", "not in"),
    ast.NotIn: (r"\bnot\s+in\b", "in"),
    ast.Add: (r"\+", "-"),
    ast.Sub: (r"-", "+"),
    ast.Mult: (r"\*", "/"),
    ast.Div: (r"/", "*"),
    ast.FloorDiv: (r"//", "*"),
    ast.Mod: (r"%", "//"),
    ast.Pow: (r"\*\*", "*"),
    ast.BitAnd: (r"&", "|"),
    ast.BitOr: (r"\|", "&"),
    ast.LShift: (r"<<", ">>"),
    ast.RShift: (r">>", "<<"),
    ast.And: (r"\band\b", "or"),
    ast.Or: (r"\bor\b", "and"),
}
# what no test is to notice: the words that people read, and where
SILENT_FUNCTIONS = re.compile(r"__repr__|__str__|__dir__|.*(text|message|notes|why|print|plot|picture).*")
SILENT_CALLS = re.compile(r"print|warn|Refused|.*Error|Stopped|add_argument|.*_text|lru_cache|partial")


class Mutation(NamedTuple):
    """Bytes start to end of a file become `new`. lines: (first, last) that must run for it to be seen."""

    name: str
    file: str
    function: str
    statement: str
    start: int
    end: int
    new: str
    lines: tuple

    def apply(self, text):
        whole = text.encode()
        return (whole[: self.start] + self.new.encode() + whole[self.end :]).decode()


class Mutator(ast.NodeVisitor):
    """Collects the mutations of one file in `found`."""

    def __init__(self, file, text):
        self.file, self.text = file, text.encode()
        self.starts = [0]  # of each line, in bytes
        for line in self.text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found, self.function, self.statement = [], [], None

    def place(self, node):
        """(first byte, last byte) of a node."""
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def source(self, node):
        start, end = self.place(node)
        return self.text[start:end].decode()

    def add(self, start, end, new):
        first, last = self.statement
        line = self.text[self.starts[first - 1] : self.starts[last]].decode()
        statement = " ".join(line.split())
        function = ".".join(self.function)
        words = (function, statement, start - self.starts[first - 1], new)
        name = hashlib.sha256(repr(words).encode()).hexdigest()[:10]
        self.found.append(Mutation(name, self.file, function, statement, start, end, new, self.statement))

    # -- where

    def visit_FunctionDef(self, node):
        self.function.append(node.name)
        if not SILENT_FUNCTIONS.fullmatch(node.name):
            for statement in node.body:
                self.visit_statement(statement)
        self.function.pop()

    def visit_ClassDef(self, node):
        self.function.append(node.name)
        for child in node.body:
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                self.visit(child)
        self.function.pop()

    def visit_Module(self, node):
        for child in node.body:
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                self.visit(child)

    def visit_statement(self, node):
        """Visit what a statement has besides the statements within it, then those."""
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            self.visit(node)
            return
        if isinstance(node, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)):
            return
        inner, own = [], []
        for child in ast.iter_child_nodes(node):
            is_inner = isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case))
            (inner if is_inner else own).append(child)
        last = max((child.end_lineno for child in own if hasattr(child, "lineno")), default=node.lineno)
        self.statement = node.lineno, last if inner else node.end_lineno
        self.drop(node)
        annotation = getattr(node, "annotation", None)
        for child in own:
            if child is not annotation and not is_text(child):
                self.visit(child)
        for child in inner:
            self.visit_statement(child)

    # -- what

    def drop(self, node):
        """Leave out a statement that is done for its effect."""
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not is_silent(node.value):
            self.add(*self.place(node), "pass")
        if isinstance(node, (ast.AugAssign, ast.Assign)):
            target = node.target if isinstance(node, ast.AugAssign) else node.targets[0]
            if isinstance(node, ast.AugAssign) or isinstance(target, (ast.Attribute, ast.Subscript)):
                self.add(*self.place(node), "pass")
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            self.swap(node.targets[0].elts)
        if isinstance(node, (ast.If, ast.While)):
            self.add(*self.place(node.test), f"not ({self.source(node.test)})")

    def swap(self, nodes):
        """Swap the first two of some names."""
        a, b = (nodes + [None, None])[:2]
        if isinstance(a, ast.Name) and isinstance(b, ast.Name) and a.id != b.id:
            (start, first_end), (second, end) = self.place(a), self.place(b)
            between = self.text[first_end:second].decode()
            self.add(start, end, f"{b.id}{between}{a.id}")

    def exchange(self, left, operator, right):
        """Put another operator between two nodes."""
        pattern, new = OPERATORS.get(type(operator), (None, None))
        start, end = self.place(left)[1], self.place(right)[0]
        sign = pattern and re.search(pattern, self.text[start:end].decode())
        if sign:
            self.add(start + sign.start(), start + sign.end(), new)

    def visit_Compare(self, node):
        self.exchange(node.left, node.ops[0], node.comparators[0])
        self.generic_visit(node)

    def visit_BinOp(self, node):
        if is_text(node.left) or is_text(node.right):
            return
        self.exchange(node.left, node.op, node.right)
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        self.exchange(node.values[0], node.op, node.values[1])
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        if isinstance(node.op, (ast.Not, ast.USub)):
            self.add(*self.place(node), f"({self.source(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node):
        value = node.value
        if isinstance(value, bool):
            self.add(*self.place(node), str(not value))
        elif isinstance(value, int):
            self.add(*self.place(node), str(value + 1))
        elif isinstance(value, float):
            self.add(*self.place(node), repr(value * 2 or 1.0))

    def visit_Call(self, node):
        if is_silent(node):
            return
        self.swap(node.args)
        self.generic_visit(node)

    def visit_JoinedStr(self, node):
        """Words that people read."""


def is_text(node):
    text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return text or isinstance(node, ast.JoinedStr)


def is_silent(call):
    called = call.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return bool(SILENT_CALLS.fullmatch(name))


# ---- The list ----------------------------------------------------------------------------------------------


def of_file(path, folder):
    text = path.read_text()
    mutator = Mutator(str(path.relative_to(folder)), text)
    mutator.visit(ast.parse(text))
    return mutator.found


def files(folder, room):
    """The Python files of a room in a copy of the repository; of lowprec its core."""
    own = budgets.core() if room == "lowprec" else budgets.files_of(room)
    for path in own:
        if path.suffix == ".py" and path.name not in NOT_HERE:
            yield folder / path.relative_to(budgets.ROOT)


def chosen(folder):
    """[Mutation] of the repository in a folder: COUNTS of each room, of each statement one."""
    found = []
    for room, count in COUNTS.items():
        ranked = [mutation for path in files(folder, room) for mutation in of_file(path, folder)]
        ranked.sort(key=lambda mutation: mutation.name)  # a hash
        statements, of_functions, own = set(), {}, []
        for mutation in ranked:
            function = mutation.file, mutation.function
            statement = mutation.file, mutation.lines
            if statement not in statements and of_functions.get(function, 0) < EACH_FUNCTION:
                statements.add(statement)
                of_functions[function] = of_functions.get(function, 0) + 1
                own.append(mutation)
        found += own[:count]
    return found

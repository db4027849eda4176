"""Mutants of a module: its source with one operator or number changed, by Cosmic Ray, or one call's arguments."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mutation.arguments import wrong_arguments

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_dppo"


def _replacements(kind: str, *groups: str) -> list[str]:
    """Return the operators that replace each word of a group by each other word of the group."""
    names = []
    for group in groups:
        for old, new in itertools.permutations(group.split(), 2):
            names.append(f"Replace{kind}Operator_{old}_{new}")
    return names


OPERATORS = (
    *_replacements("Binary", "Add Sub Mul Div", "BitOr BitAnd", "FloorDiv Mod Mul"),
    *_replacements("Comparison", "Eq NotEq", "Lt LtE Gt GtE", "Is IsNot"),
    "ReplaceUnaryOperator_USub_UAdd",
    "ReplaceUnaryOperator_Delete_Not",
    "ReplaceUnaryOperator_Delete_Invert",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "AddNot",
    "ZeroIterationForLoop",
    "NumberReplacer",
)
"""Cosmic Ray's operators for plausible mistakes: a change of + into >>, for example, is left out."""


@dataclass(frozen=True)
class Mutant:
    """One changed place of ``megatron_dppo/<path>``: the whole source, and its changed line."""

    path: str
    line: int
    operator: str
    source: str
    changed: str

    @property
    def file(self) -> Path:
        """Path of the unchanged module."""
        return PACKAGE / self.path

    def __str__(self) -> str:
        return f"{self.path}:{self.line}  {self.operator}:  {self.changed}"


def unchanged(path: str) -> Mutant:
    """The unchanged module, in the form of a mutant."""
    return Mutant(path, 0, "none", (PACKAGE / path).read_text(), "")


def mutants_of(path: str) -> Iterator[Mutant]:
    """Every mutant whose meaning differs from the module's meaning. Annotations and texts of errors are not mutated."""
    from cosmic_ray.ast import get_ast

    text = (PACKAGE / path).read_text()
    statements = [node.get_code() for node in get_ast(text).children]
    for at, statement in enumerate(statements):
        before = "".join(statements[:at])
        after = "".join(statements[at + 1 :])
        for operator, changed in _changes_of(statement):
            source = before + changed + after
            line, changed_line = _first_difference(text, source)
            yield Mutant(path, line, operator, source, changed_line.strip())


def _first_difference(old: str, new: str) -> tuple[int, str]:
    """Return the number of the first line in which two texts differ, and this line of ``new``."""
    pairs = zip(old.splitlines(), new.splitlines(), strict=False)
    for number, (old_line, new_line) in enumerate(pairs, 1):
        if old_line != new_line:
            return number, new_line
    raise ValueError("the texts do not differ")


def _changes_of(statement: str) -> Iterator[tuple[str, str]]:
    """Yield operators with the changed statement, once for each meaning."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    seen = {meaning(statement)}
    nodes = list(ast_nodes(get_ast(statement)))

    def all_changes() -> Iterator[tuple[str, str]]:
        for name in OPERATORS:
            operator = get_operator(f"core/{name}")()
            places = sum(len(list(operator.mutation_positions(node))) for node in nodes)
            for occurrence in range(places):
                yield name, mutate_code(statement, operator, occurrence)
        yield from wrong_arguments(statement)

    for name, changed in all_changes():
        try:
            found = meaning(changed)
        except SyntaxError:  # the operator changed a star that was no product
            continue
        if found not in seen:
            seen.add(found)
            yield name, changed


class _Meaning(ast.NodeTransformer):
    """Leaves out code without an effect on tests: annotations, class decorators, imports for types,
    the marks of keyword-only arguments, and the texts of errors and of the log.
    """

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(0)
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        node.args = [*node.posonlyargs, *node.args, *node.kwonlyargs]
        node.defaults += [default for default in node.kw_defaults if default is not None]
        node.posonlyargs, node.kwonlyargs, node.kw_defaults = [], [], []
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list = []  # frozen or not
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST | None:
        names = {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)}
        return None if "TYPE_CHECKING" in names else self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        if isinstance(node.exc, ast.Call):
            node.exc.args = []
        return self.generic_visit(node)

    def visit_Yield(self, node: ast.Yield) -> ast.AST:
        return ast.Yield() if isinstance(node.value, ast.JoinedStr) else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        if isinstance(owner, ast.Name) and owner.id == "log":
            node.args = []
        return self.generic_visit(node)


def meaning(text: str) -> str:
    """The syntax tree as text, without code that no test could notice."""
    return ast.dump(_Meaning().visit(ast.parse(text)))

"""The questions of the witnesses as a program that a user could have typed. In: a source of numbers.
Out: `python3 -c` words.

It is the text of workloads/witness.py with other names, drawn for each run, and with all families in one
process: an image cannot know it by its text.
"""

import ast
import json
import random
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness import processes

TEXT = processes.ACCEPTANCE / "workloads" / "witness.py"
NAME_LENGTH = 9  # no word of Python that the text uses has nine letters
DEVICE = "def device():\n    return 'cuda' if torch.cuda.is_available() else 'cpu'"
MAIN = "print(json.dumps({{f.__name__: f(**json.loads(told)) for f, told in zip(({}), sys.argv[1:])}}))"


@dataclass(frozen=True)
class Typed:
    """A program, its arguments, and the drawn name of each name in the text."""

    program: str
    arguments: tuple[str, ...]
    names: Mapping[str, str]

    def understood(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """The program's printed values, under the names of the text where they are mappings."""
        known = {drawn: name for name, drawn in self.names.items()}
        return {
            known.get(family, family): {known.get(name, name): value for name, value in values.items()}
            if isinstance(values, dict)
            else values
            for family, values in said.items()
        }


class _Renamed(ast.NodeTransformer):
    """The names that the text itself gives get others; comments and types go."""

    def __init__(self, names: Mapping[str, str], functions: frozenset[str]) -> None:
        self.names, self.functions = names, functions

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name, node.returns = self.names[node.name], None
        if ast.get_docstring(node):
            del node.body[0]
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(arg=self.names[node.arg])

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(id=self.names.get(node.id, node.id), ctx=node.ctx)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id in self.functions:
            for word in node.keywords:
                word.arg = self.names.get(word.arg or "", word.arg)
        return self.generic_visit(node)


def typed(source: random.Random, asked: Mapping[str, Mapping[str, Any]]) -> Typed:
    """The program that answers these questions of these families, in an order that is drawn too."""
    tree = ast.parse(TEXT.read_text(encoding="utf-8"))
    # Without the text's own words, its types, and the import that only the suites have.
    kept = [node for node in tree.body if not isinstance(node, ast.Expr | ast.Assign)]
    kept = [node for node in kept if getattr(node, "module", "") not in {"workloads", "typing"}]
    tree.body = kept + ast.parse(DEVICE).body
    functions = frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))
    names = {
        name: "".join(source.choices(string.ascii_lowercase, k=NAME_LENGTH))
        for name in sorted(_own(tree, functions))
    }
    text = ast.unparse(ast.fix_missing_locations(_Renamed(names, functions).visit(tree)))
    order = source.sample(sorted(asked), len(asked))
    main = MAIN.format(", ".join(names[family] for family in order))
    told = ({names[name]: value for name, value in asked[family].items()} for family in order)
    return Typed(f"import json, sys\n{text}\n{main}\n", tuple(map(json.dumps, told)), names)


def _own(tree: ast.Module, functions: frozenset[str]) -> set[str]:
    """Every name that the text gives: functions, arguments, variables, and the keys of answers."""
    found = set(functions)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions:
            found |= {word.arg for word in node.keywords if word.arg}
    return found

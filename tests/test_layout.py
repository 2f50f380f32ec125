"""The house: what may import what."""

import ast

from tests.conftest import ROOT

FILES = [path for pattern in ("*.py", "command/*.py", "study/*.py") for path in ROOT.glob(pattern)]
NAMES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}


def imported(name: str) -> set[str]:
    """The project's modules that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(NAMES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & set(NAMES)


def test_the_method_needs_neither_the_command_nor_the_measurements():
    for name in NAMES:
        folders = {other.split(".")[0] for other in imported(name) if "." in other}
        if "." not in name and name not in ("generate", "test_sfi"):
            assert not folders, name
        elif name.startswith("command."):
            assert folders <= {"command"} and "generate" not in imported(name), name


def test_no_circle_of_imports():
    done = set()

    def visit(name, path):
        assert name not in path, " -> ".join([*path, name])
        if name not in done:
            for other in imported(name):
                visit(other, [*path, name])
            done.add(name)

    for name in NAMES:
        visit(name, [])

"""Docstrings in the form that the API's page is rendered from: entries of Args name arguments, and longer ones are indented."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "octavo"
SECTIONS = re.compile(r"(Args|Attributes|Returns|Raises|Yields):")
ENTRY = re.compile(r"    ([\w*, `.\[\]/]+)(?: \(.*?\))?:(?: |$)")
NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def arguments_of(node):
    given = node.args
    names = {argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    return names | {f"{stars}{rest.arg}" for stars, rest in (("*", given.vararg), ("**", given.kwarg)) if rest}


def faults_of(node):
    """The lines of a docstring that would be rendered as something else."""
    found, section = [], None
    docstring = ast.get_docstring(node) or ""
    for line in docstring.splitlines():
        heading = SECTIONS.fullmatch(line)
        if heading or (line and not line.startswith(" ")):
            section = heading and heading[1]
        if section not in ("Args", "Attributes", "Raises") or not re.match(r"    \S", line):
            continue
        entry = ENTRY.match(line)
        names = re.split(r", | / ", entry[1]) if entry else []
        if not entry or (section == "Args" and not isinstance(node, ast.ClassDef) and not set(names) <= arguments_of(node)):
            found.append(line)
    for paragraph in re.split(r"\n\s*\n", docstring):
        parts = paragraph.split("`")
        if "``" not in paragraph:
            found += [
                f"`{code}`{behind[:9]}"
                for code, behind in zip(parts[1::2], parts[2::2], strict=False)
                if re.match(r"[A-Za-z0-9]", behind)
            ]
    return found


def test_docstrings_are_rendered_as_they_are_meant():
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, NAMED)]
        found += [f"{path.relative_to(SOURCE)}, {node.name}: {fault}" for node in nodes for fault in faults_of(node)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("docstring", "fault"),
    [
        ("Sum.\n\nArgs:\n    first: one, which is\n    long.", "    long."),
        ("Sum.\n\nArgs:\n    other: no argument.", "    other: no argument."),
        ("Sum of `Linear`s.", "`Linear`s"),
        ("Sum.\n\nRaises:\n    InputError: a fault\n    of two lines.", "    of two lines."),
    ],
)
def test_a_fault_is_found(docstring, fault):
    (node,) = ast.parse(f'def add(first, *rest, last=None):\n    """{docstring.replace(chr(10), chr(10) + "    ")}"""').body
    assert [line[: len(fault)] for line in faults_of(node)] == [fault]

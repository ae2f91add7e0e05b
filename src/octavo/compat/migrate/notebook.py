"""Reads the Python source of a notebook or a script.

Jupyter's magics and commands become statements that bind the same names.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from octavo.errors import InputError

_COMMAND = re.compile(r"^(\s*)(?:[%!?]|[\w, ]+=\s*[%!]|[\w.]+\?\??\s*$).*$")
"""A line of a notebook that is not Python."""
_PYTHON_CELLS = ("time", "timeit", "capture", "prun", "debug", "python", "python3")
"""Magics (`%%name`) of cells with Python."""
_APART = ("timeit", "python", "python3")
"""Magics whose cell runs any number of times or in another process, and binds no names of the notebook."""
_OTHER_CELLS = (
    "writefile", "html", "HTML", "javascript", "js", "markdown", "latex", "svg", "SVG", "bash", "sh", "script", "system", "sx",
    "!", "perl", "ruby",
)  # fmt: skip
"""Magics of cells without Python, which bind names only by `--out` and `--err`."""
_QUIET = (
    "pip", "conda", "mamba", "uv", "load_ext", "reload_ext", "unload_ext", "matplotlib", "env", "set_env", "cd", "ls",
    "pwd", "mkdir", "cat", "autoreload", "config", "who", "whos", "hist", "history", "alias", "lsmagic", "precision", "pdb",
    "bookmark", "dirs", "pushd", "popd", "colors", "gui", "logstart", "logoff", "xmode", "tb", "store", "system", "sx",
    "tensorboard", "pinfo", "psearch", "quickref", "rehashx", "save", "writefile", "notebook", "time", "prun", "timeit",
    "memit", "mprun", "lprun",
)  # fmt: skip
"""Magics of a line that bind no names."""
_ANYTHING = "get_ipython().run_cell('')"
"""A statement after which no name is known."""
_TIMED = ("%time", "%timeit", "%prun", "%memit", "%mprun", "%lprun")
"""Magics of a line that run the Python behind them."""
_RUNNERS = ("%run", "%load", "%autocall", "%macro", "%rerun", "%recall")
"""Magics that run code of other files or cells."""


def content(path: Path) -> bytes:
    """The content of a script.

    Raises:
        InputError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"script {str(path)!r} cannot be read: {error.strerror or error}. Give a .py file.") from None


def notebook(path: Path, notes: list[str], first: list[int]) -> str:
    """The Python of a notebook's code cells, line for line.

    Args:
        path: the notebook.
        notes: gets a sentence for each cell that is left out.
        first: gets the first line of each cell.

    Raises:
        InputError: it cannot be read, or is not a notebook.
    """
    whole = content(path)
    try:
        cells = json.loads(whole.decode("utf-8-sig"))["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(
            f"{str(path)!r} is no notebook. Give a .py file, or an .ipynb file that Jupyter has written."
        ) from None
    python: list[str] = []
    for number, source in enumerate(sources, start=1):
        lines = source.splitlines()
        first.append(len(python) + 1)
        if source.startswith("%%"):
            magic = lines[0][2:].split()
            if not magic or magic[0] not in _PYTHON_CELLS:
                notes.append(f"code cell {number} is not read: {lines[0].strip()}")
                python += [_of_other(magic, lines[0]), *([""] * (len(lines) - 1))]
                continue
            separate = magic[0] in _APART and any(line.strip() for line in lines[1:])
            lines = ["with __command__():", *(f" {line}" for line in lines[1:])] if separate else ["", *lines[1:]]
        if not _parses("\n".join(lines)):
            lines = _statements(lines, number, notes)
        try:
            ast.parse("\n".join(lines))
        except SyntaxError as error:
            notes.append(
                f"code cell {number} is not read, line {error.lineno}: {error.msg}: {(error.text or '').strip()[:80]!r}"
            )
            lines = [""] * len(lines)
        python += lines
    return "\n".join(python)


def _of_other(magic: list[str], line: str) -> str:
    """A statement for a cell without Python: it binds the same names, to values known only at run time."""
    if not magic or magic[0] not in _OTHER_CELLS:
        return _ANYTHING
    names = re.findall(r"--(?:out|err|proc)[ =]+([A-Za-z_]\w*)", line)
    return f"{' = '.join(names)} = __command__()" if names else ""


def _statements(lines: list[str], number: int, notes: list[str]) -> list[str]:
    """The lines of a cell with a statement for each command, also for commands of several lines."""
    python: list[str] = []
    goes_on = False
    for line in lines:
        command = _COMMAND.match(line)
        if goes_on:
            python.append("")
        else:
            python.append(line if command is None else _in_python(command, number, notes))
        goes_on = (goes_on or command is not None) and line.rstrip().endswith("\\")
    return python


def _in_python(command: re.Match[str], number: int, notes: list[str]) -> str:
    """A statement for a command: it binds the same names, to values known only at run time. Adds a note on unseen code."""
    text = command[0].strip()
    names, _, rest = text.partition("=")
    if rest.strip()[:1] in ("%", "!") and rest and not text.startswith(("%", "!")):
        return f"{command[1]}{names.strip()} = __command__()"
    words = text.split()
    if words[:2] == ["%store", "-r"]:
        named = len(words) > 2 and all(name.isidentifier() for name in words[2:])
        return f"{command[1]}{' = '.join(words[2:])} = __command__()" if named else f"{command[1]}{_ANYTHING}"
    if words[0] in _TIMED and _parses(timed := text.removeprefix(words[0]).strip()):
        once = words[0] in ("%time", "%prun")
        return f"{command[1]}{timed}" if once else f"{command[1]}with __command__(): {timed or 'pass'}"
    if words[0] in (*_TIMED, *_RUNNERS):
        notes.append(f"code cell {number}: what {text} runs is not seen")
        return f"{command[1]}{_ANYTHING}"
    if words[0] == "%pylab":
        return f"{command[1]}from pylab import *"
    quiet = not text.startswith("%") or text.endswith("?") or words[0].lstrip("%") in _QUIET
    return f"{command[1]}{'pass' if quiet else _ANYTHING}"


def no_python(place: str, error: SyntaxError) -> InputError:
    """The InputError for a syntax error."""
    line = (error.text or "").strip()[:80]
    return InputError(f"{place}, line {error.lineno}: {error.msg}: {line!r}. Correct it, and rerun migrate.")


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True

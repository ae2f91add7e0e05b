"""The site: `make docs` builds these pages into docs/_build/html, without a network; each warning is an error."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

import octavo

PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
"""Files beside this folder, and the pages of the site that stand for them."""

project, author, copyright = "Octavo", "The Octavo authors", "The Octavo authors"
release = version = octavo.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme, html_title = "furo", f"Octavo {release}"
html_static_path, html_css_files = ["_static"], ["wide.css"]
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a page that is a part of a file begins below the first level

default_role = "code"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"show-inheritance": False}
napoleon_google_docstring, napoleon_numpy_docstring = True, False
python_use_unqualified_type_names = True
highlight_language = "none"


def _links(app: Sphinx, name: str, source: list[str]) -> None:
    """Links to files that are pages of the site go to the pages, since their headings may be others to their tops."""
    for file, page in PAGES.items():
        source[0] = re.sub(rf"\]\(\.\./{re.escape(file)}(#[\w-]+)?\)", f"]({page})", source[0])


def _literal(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Indented blocks are code or tables; elsewhere stars are no emphasis and bars no substitution."""
    written: list[str] = []
    block, last = False, ""
    for line in lines:
        indented = line.startswith("    ")
        if line and not (block and indented):
            begins = indented and written[-1:] == [""] and last and not last.startswith((" ", ":", ".."))
            if begins:
                written += ["::", ""]
            block = bool(begins)
        written.append(line if block else re.sub(r"(?<!`)([*|])", r"\\\1", line))
        last = line or last
    lines[:] = written


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _links)
    app.connect("autodoc-process-docstring", _literal)

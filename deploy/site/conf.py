"""What Sphinx is told: `python -m deploy.site` runs it over the pages that it has put together."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

import weightbeam

project = "Weightbeam"
author = project_copyright = "The Weightbeam authors"
version = release = weightbeam.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["jupyter_execute"]

html_theme = "furo"
html_title = f"Weightbeam {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
templates_path = ["templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "versions.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}

myst_heading_anchors = 4  # links name headings as GitHub does
myst_links_external_new_tab = False
suppress_warnings = ["misc.highlighting_failure"]  # what a terminal prints isn't a language

nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_execution_timeout = 600
nb_merge_streams = True
nb_output_stderr = "remove"  # other libraries' bars and warnings

smartquotes = False  # two hyphens are an option
default_role = "literal"  # docstrings have one backtick
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Example", "example_section")]
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True


def setup(app: Sphinx) -> None:
    """Docstrings are plain English with code between backticks; a bar in them is a bar."""
    app.connect("autodoc-process-docstring", _escape)


def _escape(app: Sphinx, what: str, name: str, found: object, options: object, lines: list[str]) -> None:
    lines[:] = [line if line.startswith("    ") else _rst(line) for line in lines]


def _rst(line: str) -> str:
    words = line.split("`")
    words[::2] = [each.replace("|", r"\|") for each in words[::2]]
    words[2::2] = [re.sub(r"^(?=\w)", r"\\ ", each) for each in words[2::2]]  # a plural, such as `jax.Array`s
    return "`".join(words)

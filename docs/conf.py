"""Sphinx settings. `make docs` builds the site into build/docs, without the network, with warnings as errors."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE / "_ext")]

import sordino  # noqa: E402  (the path above comes first)

project = "sordino"
author = "the sordino authors"
version = release = sordino.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "generated_pages"]
exclude_patterns = ["_ext"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
pygments_dark_style = "github-dark"
html_show_copyright = False
html_title = f"sordino {release}"
smartquotes = False  # it would turn the -- of options into dashes
default_role = "code"  # docstrings write `name` for code

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

autodoc_typehints = "description"  # types are shown with the meaning of each argument
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_rtype = False

# A reference to a name of this package that the site does not document is a warning, and so an error. Not checked:
# names of other packages, and the classes of this package that autodoc names by their module in signatures.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!sordino\.).*"), (r"py:class", r"sordino\.\w+\..*")]

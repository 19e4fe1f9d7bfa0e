"""Configures the documentation site: ``make site`` builds it into build/site, without a network."""

from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata

project = "Riffle"
author = "The Riffle authors"
project_copyright = author
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
autodoc_typehints = "description"
autodoc_member_order = "bysource"
html_theme = "furo"
html_title = "Riffle"
exclude_patterns = ["images"]


def _leave_out_of_sidebar(app: Sphinx, _doctree: object) -> None:
    """Marks each figure's page as an orphan: docs/figures.md links to it, the sidebar does not."""
    page = app.env.docname
    if page.startswith("figures/"):
        app.env.metadata[page]["orphan"] = True


def setup(app: Sphinx) -> ExtensionMetadata:
    """Connects the hook above."""
    app.connect("doctree-read", _leave_out_of_sidebar)
    return {"parallel_read_safe": True}

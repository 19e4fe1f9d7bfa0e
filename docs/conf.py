"""The documentation site: ``make site`` builds it into build/site, without a network."""

project = "Riffle"
author = "The Riffle authors"
extensions = ["myst_nb", "sphinx.ext.autodoc"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
autodoc_typehints = "description"
autodoc_member_order = "bysource"
html_theme = "furo"
html_title = "Riffle"
exclude_patterns = ["images"]

"""Settings of the site: `make docs` builds it into build/docs."""

import os
import sys
import tomllib
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

import fisherjax  # noqa: E402

# Napoleon reads docstrings after our extensions have marked them up.
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "myst_nb",
    "sphinx_copybutton",
    "sphinx_design",
    "_ext.docstrings",
    "_ext.equations",
    "_ext.links",
    "_ext.pictures",
]

project = "fisherjax"
author = "The fisherjax authors"
copyright = author
version = release = fisherjax.__version__
with (DOCS.parent / "pyproject.toml").open("rb") as _file:
    repository = tomllib.load(_file)["project"]["urls"]["Repository"]

html_theme = "furo"
html_title = f"{project} {version}"
html_theme_options = {
    "footer_icons": [{"name": "GitHub", "url": repository, "html": "GitHub", "class": ""}],
}
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
# Equations are shown without the network and without JavaScript.
html_math_renderer = "mathml"

# The notebooks have their outputs; `make notebook` executes them.
nb_execution_mode = "off"
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
# A line of prose that begins with a percent sign is no comment.
myst_disable_syntax = ["myst_line_comment"]

default_role = "fisherjax"
# Quotation marks stay as they are, because much text is code; Sphinx itself writes dashes as --.
smartquotes_action = "D"
autosummary_generate = False
autodoc_docstring_signature = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
napoleon_use_rtype = False
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# References of our own are checked; those of other packages only where their indices can be read.
nitpicky = True
OTHERS = "chex|collections|enum|flax|fractions|functools|jax|numpy|optax|os|pathlib|types|typing"
nitpick_ignore_regex = [(r"py:.*", rf"({OTHERS})\..*")]
if os.environ.get("DOCS_ONLINE"):
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "jax": ("https://docs.jax.dev/en/latest", None),
        "flax": ("https://flax.readthedocs.io/en/latest", None),
        "optax": ("https://optax.readthedocs.io/en/latest", None),
    }

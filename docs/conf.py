"""Settings of Sphinx. The site is built by ``make docs``, which puts its sources together first."""

import re

from fedquilt.version import __version__

RANGE = re.compile(r"Annotated\[([^],]+), FieldInfo\(.*?\]\)\]")

project = "Fedquilt"
copyright = "the authors of Fedquilt"
release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
html_theme = "furo"
html_title = f"Fedquilt {__version__}"
html_show_sphinx = False
html_copy_source = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # as GitHub makes them
suppress_warnings = ["myst.header"]  # the changelog skips a level

nb_execution_mode = "cache"  # a notebook is run again when it has changed
nb_execution_timeout = 600
nb_execution_raise_on_error = True

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"exclude-members": "__init__"}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def setup(app):
    """Lets types be shown without the ranges that their annotations carry."""
    app.connect("object-description-transform", _shorten_types, priority=400)


def _shorten_types(app, domain, object_type, content):
    for types in app.env.current_document.autodoc_annotations.values():
        for name, text in types.items():
            types[name] = RANGE.sub(r"\1", text)

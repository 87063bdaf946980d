"""How Sphinx builds these pages: ``bash tools/docs.sh`` does it, with warnings as errors."""

import shutil
from importlib.metadata import version as installed_version
from pathlib import Path

HERE = Path(__file__).parent

project = "jax_w4a8"
version = release = installed_version("jax_w4a8")
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = "jax_w4a8"
exclude_patterns = ["_build", "conf.py"]

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

# Notebooks show what their last run printed and drew; nbmake runs them (tools/docs.sh).
nb_execution_mode = "off"
shutil.rmtree(HERE / "notebooks", ignore_errors=True)
shutil.copytree(HERE.parent / "notebooks", HERE / "notebooks", ignore=shutil.ignore_patterns("*.py", ".*"))

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_use_ivar = True
napoleon_use_rtype = False

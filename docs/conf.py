"""How Sphinx builds the documentation."""

from __future__ import annotations

import configparser
from pathlib import Path

_setup = configparser.ConfigParser()
_setup.read(Path(__file__).parent.parent / "setup.cfg")

project = "django-dlock"
author = copyright = "django-dlock contributors"
release = version = _setup["metadata"]["version"]

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["deflist", "colon_fence", "attrs_inline"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"django-dlock {release}"
html_static_path = ["_static"]
html_css_files = ["docs.css"]

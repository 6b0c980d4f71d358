"""How Sphinx builds the site from the pages that build.py has laid out."""

import re
from typing import Any

project = "Penstock"
copyright = "the Penstock authors, Apache-2.0"
html_title = "Penstock"
extensions = ["myst_parser"]
myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 4
myst_fence_as_directive = ["toctree"]
toc_object_entries = False
highlight_language = "text"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "monokai"

CAPTION = r'<p class="caption" role="heading"><span class="caption-text">([^<]*)</span></p>'
DOOR = re.compile(CAPTION + r'\s*(<ul.*?)(?=<p class="caption"|\Z)', re.DOTALL)  # a caption, and the list below it


def fold_menu(menu: str) -> str:
    """Fold each part of the menu but the one with the page itself."""

    def folded(part: re.Match[str]) -> str:
        is_open = " open" * ("current" in part[2])
        return f'<details class="door"{is_open}><summary class="caption-text">{part[1]}</summary>{part[2]}</details>'

    return DOOR.sub(folded, menu)


def _fold_menu_of_page(app: Any, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    context["furo_navigation_tree"] = fold_menu(context["furo_navigation_tree"])


def setup(app: Any) -> None:
    """Let Sphinx fold each page's menu once the theme has made it."""
    app.connect("html-page-context", _fold_menu_of_page, priority=900)

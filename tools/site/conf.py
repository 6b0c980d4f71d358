"""How Sphinx builds the site from the pages that build.py has laid out."""

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

"""Reports as self-contained HTML pages, from `templates/` and `assets/`."""

"""Reports as values, sections of typed cells, and their views: terminal, Markdown, pages."""

"""Reports as text in a terminal and as HTML pages."""

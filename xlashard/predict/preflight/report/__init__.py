"""The preflight report: its data model, how it is built, compared and limited."""

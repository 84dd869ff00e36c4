"""`explain`, and the report of a compiled program that it returns."""

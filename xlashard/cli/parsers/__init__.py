"""Parsers of command lines: `program_parsers` of programs to look into, `tool_parsers` of the rest.

`cli.main` has the commands.
"""

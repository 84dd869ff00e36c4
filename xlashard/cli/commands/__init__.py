"""Subcommands of the command line that depend on several rooms."""

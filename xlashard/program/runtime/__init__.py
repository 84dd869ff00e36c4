"""Compilation and execution of annotated modules."""

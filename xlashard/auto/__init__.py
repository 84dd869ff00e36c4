"""Automatic shardings: choose the layout of a program for a mesh, and prove it by compilation."""

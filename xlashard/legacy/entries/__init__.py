"""Entries of the removed names, by the modules of `modules` that implement them; without JAX.

`entry` has the class of an entry, and reads the tables of the other files; `keywords` has the
removed keyword arguments of functions that remain.
"""

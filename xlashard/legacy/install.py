"""`import xlashard.legacy.install` brings the names of 2022 and 2023 back to JAX.

As the first line of a program it lets the rest stay as it is. `xlashard.legacy.install.uninstall()`
takes them away again, and `xlashard.legacy.install.install()` brings them back once more.
"""

from xlashard.legacy.installer import install, uninstall

__all__ = ["install", "uninstall"]

install()

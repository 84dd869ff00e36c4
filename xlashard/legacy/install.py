"""Install the names of 2022 and 2023 on import: `import xlashard.legacy.install`.

As the first line of a program it lets the rest stay unchanged.
`xlashard.legacy.install.uninstall()` uninstalls the names, and `xlashard.legacy.install.install()`
installs them again.
"""

from xlashard.legacy.installer import install, uninstall

__all__ = ["install", "uninstall"]

install()

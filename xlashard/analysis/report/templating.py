"""Environment of the templates of pages and pictures."""

from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined


def make_environment(*packages: str, autoescape: bool = True, **settings: Any) -> Environment:
    """Return an environment of the templates of packages, in which an undefined name is an error.

    Args:
        *packages: Packages whose folders `templates` have them, in the order of the search.
        autoescape: Whether text is escaped for HTML where it is inserted.
        **settings: Further settings of the environment.
    """
    return Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in packages]),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **settings,
    )

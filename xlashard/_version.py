"""The version, in a place that the build reads without importing the package."""

__version__ = "0.2.0"

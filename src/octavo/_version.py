"""The version: read by the package, its build, and the files that record what wrote them."""

__version__ = "0.1.0"

"""The version: read by the package, its build, and files that record their writer."""

__version__ = "0.1.0"

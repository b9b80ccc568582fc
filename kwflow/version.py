"""The version of this package, which both sides say."""

__version__ = "0.1.0"

"""Tests of kwflow; README.md says what is where."""

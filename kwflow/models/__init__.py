"""Particular models: their families, their files, and transformers' layers as SpanSpecs.

Beside ``huggingface`` and ``research.reference`` the only place that imports transformers, and only inside functions or
modules that need it: importing this package imports nothing heavy.
"""

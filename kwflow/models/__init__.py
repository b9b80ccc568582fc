"""Everything about particular models: their families, their files, their Hugging Face classes.

The only folder that imports transformers, and only inside functions or modules that need it: importing this package
imports nothing heavy.
"""

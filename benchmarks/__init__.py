"""How fast kwflow is beside the local model, in one run: ``python -m benchmarks`` (``make bench``)."""

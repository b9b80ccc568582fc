"""The functional core: a layer as a pure function, and spans of them; no transformers."""

"""What a kwarg is and what becomes of it: axes, trees, schemas, binding; one file per kind of kwarg."""

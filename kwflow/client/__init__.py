"""A flow: calls, gradients and sessions over workers, and others in the place of those that fail."""

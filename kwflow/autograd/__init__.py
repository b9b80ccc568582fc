"""A function's operations on a worker, and what torch.func does to tensors."""

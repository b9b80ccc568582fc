"""Where a model's tensors come from: folders, the hub, GGUF files, shards."""

"""What a worker does with a request; no models, no hivemind."""

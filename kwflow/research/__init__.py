"""What researchers do with a flow: proofs, references, steering, vectors, adapters, sweeps."""

"""Bytes, frames, channels and the network thread; no hivemind."""

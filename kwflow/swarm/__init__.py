"""Processes and libp2p: the only package that imports hivemind."""

"""Runs the verbs on the nodes of a Ray cluster."""

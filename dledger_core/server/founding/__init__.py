"""Founding of groups on a node."""

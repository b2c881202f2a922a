"""Monitoring of a node: its second port with metrics, health and the status page."""

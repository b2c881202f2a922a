"""Requests of clients: one table of them, and what serves each."""

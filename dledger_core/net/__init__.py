"""Frames, messages and connections between nodes and clients; independent of files and of Raft's rules."""

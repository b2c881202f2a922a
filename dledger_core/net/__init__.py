"""Frames, messages and connections: how nodes and clients talk, knowing nothing of files or of Raft's rules."""

"""How far queries are behind, and where that is told."""

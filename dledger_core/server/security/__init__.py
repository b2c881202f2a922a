"""Security of a node: certificates, tokens, principals, permissions."""

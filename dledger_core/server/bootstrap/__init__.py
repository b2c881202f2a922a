"""Bootstrap of groups on a node."""

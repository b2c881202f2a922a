"""Services that a node offers its clients: appends, reads, role changes, pins."""

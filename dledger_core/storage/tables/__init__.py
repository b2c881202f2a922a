"""Tables that a replica derives from its control entries: producers and transactions."""

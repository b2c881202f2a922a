"""One group on one node: the Ready loop, group commit, snapshot install and the connections to peers."""

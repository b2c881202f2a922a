"""Routing of requests: connections, the view of the cluster, the next replica, retries."""

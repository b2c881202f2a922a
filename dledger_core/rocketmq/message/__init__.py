"""RocketMQ message records as Arrow columns, and back."""

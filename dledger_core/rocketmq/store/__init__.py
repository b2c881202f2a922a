"""A RocketMQ broker's directory: classic CommitLog, consume queues, configuration."""

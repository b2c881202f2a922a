"""RocketMQ's remoting protocol as DLedger speaks it: frames, bodies, codes, and a node's side of a connection."""

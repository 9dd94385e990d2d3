"""One delivery of a task: its lock, its idempotency record, its body and how it ends."""

"""Messages on their way to the broker: de-duplication, follow-ups and requeued messages."""

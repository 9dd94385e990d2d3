"""One process's side of a lock: no client library, no request, no ORM."""

"""What a worker's parent process does: task requests, and the locks of children that died."""

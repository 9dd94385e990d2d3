"""What several tests use: servers, proxies, workers, and the tasks that the workers run."""

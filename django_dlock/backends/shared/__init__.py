"""What several stores have in common."""

"""Tags for the templates of projects."""

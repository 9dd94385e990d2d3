"""The admin pages in a real browser."""

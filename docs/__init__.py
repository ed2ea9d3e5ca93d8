"""Scripts that generate parts of the pages, and hooks of the site."""

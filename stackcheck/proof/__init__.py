"""Show that each check can fail (planted faults), and propose bounds from healthy runs."""

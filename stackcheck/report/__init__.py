"""What people look at: the page, its markdown, and figures for Prometheus."""

"""What people read of a load test: tables at the terminal, a page with plots, and what changed between two of them."""

"""`weightbeam watch` in its parts: what is configured, what the hub has, what was done, and doing it."""

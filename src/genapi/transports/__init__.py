"""Ways to move bytes to a server: HTTP clients, and engines in this process."""

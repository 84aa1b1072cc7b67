"""Shapes of what goes over a wire, and decisions about it. No I/O."""

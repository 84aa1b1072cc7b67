"""Values that users hold. No I/O, no clock, no randomness."""

"""Memory, time and price of a program on chips elsewhere."""

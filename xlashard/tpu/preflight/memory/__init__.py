"""Memory of a device: buffers, live ranges, and their breakdown by value."""

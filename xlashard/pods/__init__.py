"""Programs of several processes, and pods of them on one machine."""

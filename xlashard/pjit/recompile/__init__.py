"""What pjit-ed functions compile, and why again: noted at each miss, explained when asked."""

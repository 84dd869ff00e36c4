"""Resharding: plans, and their execution by program, by copies or within host memory."""

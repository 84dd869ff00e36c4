"""Changes between two reports, and limits on the figures of one."""

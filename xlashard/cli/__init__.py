"""The command line, and jobs on Cloud TPUs."""

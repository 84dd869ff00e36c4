"""Programs that run on the workers, without xlashard."""

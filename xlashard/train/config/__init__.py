"""Settings files of training runs: schema and values."""

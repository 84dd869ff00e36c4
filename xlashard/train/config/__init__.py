"""Settings files of training runs: schema, values, and TOML notation."""

"""`Array`: its base, members, shards and text."""

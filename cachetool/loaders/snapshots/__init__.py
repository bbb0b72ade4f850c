"""Which shards an epoch reads, and how long they stay."""

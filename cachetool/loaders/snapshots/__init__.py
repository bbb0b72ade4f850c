"""The choice of the shards that an epoch reads, and their leases."""

"""Several ranks as one: launch, topology, all-to-all, ring, token shards, sharded weights."""

"""Several processes as one: topology, all-to-all, ring, token shards, sharded weights."""

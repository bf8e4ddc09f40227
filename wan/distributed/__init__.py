"""Multi-rank runs: launch, device mesh, all-to-all, ring attention, token shards, FSDP."""

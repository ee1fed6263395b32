"""Several processes that train together: DDP by one sum, FSDP2 by shards."""

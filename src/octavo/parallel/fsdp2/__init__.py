"""What Octavo changes in FSDP2: how shards are gathered, and how gradients are reduced."""

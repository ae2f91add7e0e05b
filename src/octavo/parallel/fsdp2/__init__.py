"""Gathering of shards and reduction of gradients in place of FSDP2's own."""

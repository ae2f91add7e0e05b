"""All-gathers of shards and reductions of gradients that replace FSDP2's."""

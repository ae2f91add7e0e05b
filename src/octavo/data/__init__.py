"""Text to batches: sources, tokenizer, token files, packing, and the order of samples.

data = octavo.data.prepared.prepare(config.data)
loader = octavo.data.loader.BatchLoader(data, "train", sequence_length=1024, packing="join", seed=0, global_batch=16)
for batch in loader.step(first_sample=0): ...
"""

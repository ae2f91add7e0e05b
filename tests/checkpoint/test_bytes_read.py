"""A load reads what a rank holds, of rows and of columns, and no more: bytes are counted where the system is asked for them."""

import collections
import math
from pathlib import Path
from unittest import mock

import layouts
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import octavo
import ranks
from octavo.checkpoint import manifest, opened, stored
from octavo.checkpoint.manifest import OpenCheckpoint
from octavo.collectives.blocks import indices, local_of, share_out, with_block
from octavo.parallel.shards import local_shard

WIDE = {"hidden_size": 32, "intermediate_size": 8192, "num_hidden_layers": 1}
"""Of a row of fc2 a fourth is 16 KiB in float64."""


class Counted:
    """Bytes of each file that the system has given, while it is a context; read for a checksum are apart."""

    def __enter__(self):
        self.tensors, self.sums = collections.Counter(), collections.Counter()
        self._now, read, summed = self.tensors, opened.os.preadv, opened.OpenFolder._hash

        def preadv(descriptor, buffers, offset):
            count = read(descriptor, buffers, offset)
            self._now[Path(f"/proc/self/fd/{descriptor}").readlink().name] += count
            return count

        def of_sum(folder, name, size):
            self._now = self.sums
            try:
                return summed(folder, name, size)
            finally:
                self._now = self.tensors

        self._patches = mock.patch.object(opened.os, "preadv", preadv), mock.patch.object(opened.OpenFolder, "_hash", of_sum)
        # Files that were written just now would be summed by each rank that opens them; one thread: the counters are one's.
        self._patches += (mock.patch.object(opened, "_SETTLED", -1), mock.patch.object(manifest, "_READERS", 1))
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_):
        for patch in self._patches:
            patch.stop()

    def of(self, counter):
        """Bytes of tensor files."""
        return sum(count for name, count in counter.items() if name.endswith(".safetensors"))


def loaded(degrees, path, case):
    """Bytes that this rank read for tensors and for checksums, and those of the tensors that it holds."""
    octavo.init(degrees)
    model, optimizer = case.built(3)
    with Counted() as read:
        octavo.load(path, model, optimizer)
    wanted, held = load_file(path.with_suffix(".state")), layouts.tensors_of(model, optimizer)
    assert all(layouts.error(tensor, wanted[name]) == 0.0 for name, tensor in held.items())
    boxes = [(box.sizes, tensor.element_size()) for tensor in held.values() for box in local_shard(tensor).part.boxes]
    size = sum(math.prod(sizes) * element for sizes, element in boxes)
    octavo.shutdown()
    return read.of(read.tensors), read.of(read.sums), size


LOADED = {
    "4 tensor": (4, {"tensor_parallel_degree": 4}),
    "4 shard": (4, {}),
    "4 tensor, shard": (4, {"tensor_parallel_degree": 2}),
    "2 replicate": (2, {"hybrid_shard_degree": 1}),
}


@pytest.mark.long(lambda of: not of[1])
@pytest.mark.parametrize("of", [(2, {}), (2, {"tensor_parallel_degree": 2})], ids=["2 shard", "2 tensor"])
def test_a_rank_reads_what_it_holds(tmp_path, data, of):
    case, path = layouts.Case(WIDE, data, False), tmp_path / "c"
    ranks.run(of[0], layouts.saved, of[1], path, case)
    files = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in path.glob("*.safetensors"))
    for layout, (world_size, degrees) in LOADED.items():
        found = ranks.run(world_size, loaded, degrees, path, case)
        for rank, (tensors, sums, size) in enumerate(found):
            assert sums == (files if rank == 0 else 0), layout
            # Beside them: random states, and rows and gaps of less than a page.
            assert size <= tensors - (headers if rank == 0 else 0) <= 1.02 * size + 16384, (layout, rank)
        if layout != "2 replicate":
            assert max(size for *_, size in found) < 0.3 * files * (4 / world_size)


@st.composite
def slices(draw):
    """A shape of up to three dimensions, its parts on two ranks, and a seed."""
    shape = [draw(st.integers(1, 5)) for _ in range(draw(st.integers(0, 2)))] + [draw(st.integers(1, 9)) * 700]
    cuts = [draw(st.integers(0, size)) for size in shape]
    dim = draw(st.integers(0, len(shape) - 1))
    return shape, cuts, dim


@settings(max_examples=60, deadline=None)
@given(slices())
def test_any_part_is_read_by_its_runs(tmp_path_factory, drawn):
    """One range of each dimension: what is read is what is held, but for gaps of less than a page."""
    shape, cuts, dim = drawn
    path = tmp_path_factory.mktemp("part") / "c"
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.randn(shape))
    octavo.save(path, layer)
    own = [indices((cut if d == dim else 0, size)) for d, (cut, size) in enumerate(zip(cuts, shape, strict=True))]
    rest = [indices((0, cut if d == dim else size)) for d, (cut, size) in enumerate(zip(cuts, shape, strict=True))]
    block = share_out(shape, [own, rest], rank=0)
    tensor = with_block(torch.full(block.local.local_shape, torch.nan), block)
    with OpenCheckpoint(path) as checkpoint, Counted() as read:
        tensors = stored.open_tensors(checkpoint)
        read.tensors.clear()
        tensors.read({"model.weight": tensor})
        wanted = layer.weight.detach()[tuple(slice(each.ranges[0].start, None) if each.ranges else slice(0) for each in own)]
        assert torch.equal(local_of(tensor), wanted)
        runs = math.prod(shape[:dim])
        assert wanted.nbytes <= read.of(read.tensors) <= wanted.nbytes + runs * stored._LEAST_GAP

"""A checkpoint of any degrees continues at any other: parameters, optimizer states and FP8 records, and the step behind."""

import itertools
import random
import re
import shutil

import layouts
import pytest

import ranks
from octavo.checkpoint.manifest import write_manifest
from octavo.errors import OctavoError
from octavo.fp8.recipe import RECIPES


def degrees(**given):
    """Degrees of `octavo.init` by their short names."""
    names = {"shard": "hybrid_shard_degree"} | {name: f"{name}_parallel_degree" for name in ("tensor", "context", "expert")}
    return {names[name]: value for name, value in given.items()}


LAYOUTS = {
    "one": (1, {}),
    "2 shard": (2, {}),
    "2 replicate": (2, degrees(shard=1)),
    "2 tensor": (2, degrees(tensor=2)),
    "2 context": (2, degrees(context=2)),
    "2 expert": (2, degrees(expert=2)),
    "2 tensor, expert": (2, degrees(tensor=2, expert=2)),
    "3 shard": (3, {}),  # of the 4 rows of a router, the third rank has none
    "4 shard": (4, {}),
    "4 replicate": (4, degrees(shard=1)),
    "4 replicate, shard": (4, degrees(shard=2)),
    "4 tensor": (4, degrees(tensor=4)),  # with two key-value heads
    "4 tensor, shard": (4, degrees(tensor=2)),
    "4 tensor, replicate": (4, degrees(tensor=2, shard=1)),
    "4 tensor, context": (4, degrees(tensor=2, context=2)),
    "4 context": (4, degrees(context=4)),
    "4 context, shard": (4, degrees(context=2)),
    "4 context, replicate": (4, degrees(context=2, shard=2)),
    "4 expert": (4, degrees(expert=4)),
    "4 expert, shard": (4, degrees(expert=2)),
    "4 expert, replicate": (4, degrees(expert=2, shard=2)),
    "4 expert, context": (4, degrees(expert=4, context=2)),
    "4 expert of tensor": (4, degrees(tensor=4, expert=2)),
    "4 expert over tensor": (4, degrees(tensor=2, expert=4)),
    "4 expert, tensor, shard": (4, degrees(tensor=2, expert=2)),
    "4 expert, tensor, replicate": (4, degrees(tensor=2, expert=2, shard=1)),
    "4 expert, tensor, context": (4, degrees(tensor=2, expert=4, context=2)),
    "8 of all": (8, degrees(tensor=2, context=2, shard=2, expert=4)),
    "8 context, shard": (8, degrees(context=2)),
}
"""(ranks, degrees); expert degrees spread whole experts, which tensor degrees alone slice."""
PAIRS = [(of, to) for of, to in itertools.product(LAYOUTS, LAYOUTS) if to != "one"]
"""That one rank continues, every other is compared with."""
FEW = [name for name in LAYOUTS if not name.startswith("8")]
_draw = random.Random(50)
DRAWN = [(of, to) for of in _draw.sample(FEW, 9) for to in _draw.sample([name for name in FEW if name != "one"], 9)]
"""A tenth: of nine checkpoints, each written once, nine continuations."""
SHAPE = {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1],
    "norm_topk_prob": True,
}  # fmt: skip
"""A layer with experts and one without; 97 words and 44 rows of an MLP, which few ranks divide."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory, data):
    """`saved(names)` → the case and the checkpoints of these layouts, from which one rank has continued."""
    folder, case = tmp_path_factory.mktemp("saved"), layouts.Case(SHAPE, data, True)

    def save(names):
        paths = [folder / name for name in names]
        new = [path for path in paths if not path.is_dir()]
        for size in {LAYOUTS[path.name][0] for path in new}:
            cells = [(LAYOUTS[path.name][1], path, case) for path in new if LAYOUTS[path.name][0] == size]
            ranks.run(size, layouts.every, layouts.saved, cells, timeout=600)
        assert layouts.continued({}, new, case) == {}
        return case, paths

    return save


def check(saved, pairs, steps_of=1):
    case, _ = saved(sorted({of for of, _ in pairs}))
    wrong = {}
    for size in sorted({LAYOUTS[to][0] for _, to in pairs}):
        names = [name for name in LAYOUTS if LAYOUTS[name][0] == size]
        sources = {name: saved([of for of, to in pairs if to == name])[1] for name in names}
        cells = [(LAYOUTS[name][1], paths, case, steps_of) for name, paths in sources.items() if paths]
        for rank, found in enumerate(ranks.run(size, layouts.every, layouts.continued, cells, timeout=580)):
            for name, faults in zip([name for name, paths in sources.items() if paths], found, strict=True):
                wrong |= {f"{of} → {name}, rank {rank}": fault for of, fault in faults.items()}
    assert wrong == {}


def test_a_tenth_of_all_pairs_of_layouts(saved):
    assert len(DRAWN) == len(PAIRS) // 10
    assert {to for _, to in DRAWN} == {*FEW} - {"one"}
    check(saved, DRAWN, steps_of=3)


@pytest.mark.long
@pytest.mark.parametrize("to", [name for name in LAYOUTS if name != "one"])
def test_every_pair_of_layouts(saved, to):
    check(saved, [pair for pair in PAIRS if pair[1] == to])


def torn(one, other, folder):
    """Folders made of two checkpoints of one layout, each with a fault → what its error says."""
    of_rank_0, shard = (next(one.glob(f"shard-{rank:05d}-model-00001-*")).name for rank in (1, 2))
    content, of_other = (one / shard).read_bytes(), (other / shard).read_bytes()
    flipped = bytearray(content)
    flipped[-5] ^= 1
    faults = {
        "truncated": ({shard: content[:-8]}, "bytes instead of"),
        "torn": (
            {shard: content[: len(content) // 2] + bytes(len(content) - len(content) // 2)},
            "other content than was written",
        ),
        "flipped": ({shard: bytes(flipped)}, "other content than was written"),
        "of another step": ({shard: of_other}, "other content than was written"),
        "missing": ({shard: None}, "missing"),
        "without a manifest": ({"manifest.json": None}, "missing"),
        "manifest of another": ({"manifest.json": (other / "manifest.json").read_bytes()}, "instead of|other content"),
        "one too many": ({"shard-00009-model-00001-of-00001.safetensors": content}, "does not belong to the checkpoint"),
    }
    said = {}
    for name, (files, text) in faults.items():
        shutil.copytree(one, folder / name)
        for file, changed in files.items():
            (folder / name / file).unlink(missing_ok=True)
            if changed is not None:
                (folder / name / file).write_bytes(changed)
        said[name] = text
    # Whole by its checksums: a rank's pieces under the names of another's.
    shutil.copytree(one, folder / "pieces of two")
    (folder / "pieces of two" / shard).write_bytes((one / of_rank_0).read_bytes())
    (folder / "pieces of two" / "manifest.json").unlink()
    write_manifest(folder / "pieces of two", None)
    return said | {"pieces of two": "overlap or leave a gap"}


@pytest.mark.long
@pytest.mark.parametrize("of", ["4 tensor, shard", "4 expert, tensor, shard"])
def test_torn_and_mixed_folders_are_refused_on_all_ranks_of_another_layout(tmp_path, data, of):
    case, (size, given) = layouts.Case(SHAPE, data, True), LAYOUTS[of]
    paths = tmp_path / "one", tmp_path / "other"
    cells = [(given, paths[0], case), (given, paths[1], case._replace(micro_batch=3))]
    ranks.run(size, layouts.every, layouts.saved, cells)
    said = torn(*paths, tmp_path)
    for to in ("2 tensor", "3 shard", "4 expert of tensor"):
        size, given = LAYOUTS[to]
        for rank, found in enumerate(ranks.run(size, layouts.refused, given, [tmp_path / name for name in said], case)):
            for name, (kind, text, unchanged) in found.items():
                assert issubclass(kind, OctavoError), (to, rank, name)
                assert re.search(said[name], text), (to, rank, name, text)
                assert unchanged, (to, rank, name)


SAME = {
    "delayed": {"2 tensor": True, "2 context": True, "4 replicate, shard": False},
    "current": {"2 tensor": True, "2 context": True, "4 replicate, shard": True},
    "rowwise": {"2 tensor": False, "2 context": False, "4 replicate, shard": True},
}
"""Whether a layout has the casts of one rank with equal micro-batches, of 3 of 12 sequences; with others none has.

Under delayed scaling scales are updated after each micro-batch of all ranks: one rank has four a step, four ranks one.
"""


@pytest.mark.long
@pytest.mark.parametrize("recipe", SAME)
def test_which_recipes_cast_as_before_in_another_layout(tmp_path, data, recipe):
    """What a run says that continues in it (`octavo.train.setup.run_layout`)."""
    shape = {"num_key_value_heads": 4}
    case = layouts.Case(shape, data, True, recipe=RECIPES[recipe](), micro_batch=3)
    path = tmp_path / "c"
    layouts.saved({}, path, case)
    assert layouts.continued({}, [path], case) == {}
    for micro_batch in (3, 1):
        for layout, same in SAME[recipe].items():
            size, given = LAYOUTS[layout]
            found = ranks.run(size, layouts.continued, given, [path], case._replace(micro_batch=micro_batch))
            assert not any("loaded" in faults for each in found for faults in each.values())
            assert (not any(found)) == (same and micro_batch == 3), (layout, micro_batch, found)


@pytest.mark.long(lambda of: of != "4 tensor, shard")
@pytest.mark.parametrize("of", ["2 tensor", "4 tensor, shard", "4 shard", "4 tensor"])
def test_ranks_with_the_same_tokens_draw_alike_and_others_do_not(tmp_path, of):
    """At any tensor degree a rank continues with the generators of the ranks that had its share of the tokens."""
    size, given = LAYOUTS[of]
    wrote = ranks.run(size, layouts.drawing, given, tmp_path / "c", True)
    before = {number: numbers for number, _, numbers, _ in wrote}
    for to in ("2 tensor", "4 shard", "4 tensor", "4 tensor, shard"):
        size, given = LAYOUTS[to]
        found = ranks.run(size, layouts.drawing, given, tmp_path / "c", False)
        drawn = {number: numbers for number, _, numbers, _ in found}
        assert all(drawn[number] == numbers for number, _, numbers, _ in found)
        assert len(set(drawn.values())) == len(drawn)
        assert all(drawn[number] == before[number] for number in before if number in drawn)
        by_tensor_rank = {tensor: tracked for _, tensor, _, tracked in found}
        assert len({str(tracked) for tracked in by_tensor_rank.values()}) == len(by_tensor_rank)
        assert all(by_tensor_rank[tensor] == tracked for _, tensor, _, tracked in wrote if tensor in by_tensor_rank)

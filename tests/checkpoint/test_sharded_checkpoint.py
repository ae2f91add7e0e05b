"""Checkpoints over ranks: any layout reads any other's, and an error on one rank is raised on all."""

import json

import pytest
import rank_saving
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import ranks
from octavo.checkpoint import manifest
from octavo.checkpoint.failpoints import FAILPOINTS
from octavo.checkpoint.writer import weights as weights_in
from octavo.errors import InputError, OctavoError
from octavo.models import weight_files
from octavo.models.convert import write_pretrained

LAYOUTS = {
    "1": (1, {}),
    "2": (2, {}),
    "3": (3, {}),
    "4": (4, {}),
    "replicate 2 x shard 2": (4, {"hybrid_shard_degree": 2}),
    "replicate 2": (2, {"hybrid_shard_degree": 1}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(layout)` → (path of this layout's checkpoint, results of its ranks); each is made once."""
    made = {}

    def save(layout):
        if layout not in made:
            path = tmp_path_factory.mktemp("saved") / "c"
            count, degrees = LAYOUTS[layout]
            made[layout] = path, ranks.run(count, rank_saving.save, path, degrees)
        return made[layout]

    return save


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after"),
    [*((before, after) for before in ("4", "replicate 2 x shard 2") for after in LAYOUTS), ("1", "1"), ("1", "3")],
)
def test_what_one_layout_saves_another_loads_to_the_bit(saved, before, after):
    path, wrote = saved(before)
    count, degrees = LAYOUTS[after]
    found = ranks.run(count, rank_saving.load, path, degrees)
    for hashes, *_ in (*wrote, *found):
        assert hashes == wrote[0][0]
    assert {name.partition(".")[0] for name in wrote[0][0]} == {"model", "optimizer", "fp8"}
    if after == before:
        assert [continued for _, *continued in found] == [continued for _, *continued in wrote]


@pytest.mark.long
def test_ranks_without_a_record_draw_their_own_numbers_the_same_ones_each_time(saved):
    path, wrote = saved("2")
    once, again = (ranks.run(4, rank_saving.load, path, {}) for _ in range(2))
    draws = [draw for _, draw, _ in once]
    assert draws[:2] == [draw for _, draw, _ in wrote]
    assert draws == [draw for _, draw, _ in again]
    assert len({str(draw) for draw in draws}) == 4


@pytest.mark.parametrize("layout", ["4", "replicate 2 x shard 2"])
def test_each_piece_is_written_once_and_nothing_is_pickled(saved, layout):
    path, _ = saved(layout)
    manifest.verify(path)
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}
    assert {file.name for file in path.glob("*.json")} == {
        "state.json",
        "manifest.json",
        *(f"random-{n}.json" for n in (1, 2, 3)),
    }
    seen, elements = set(), {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            offsets = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
            for name in opened.keys():  # noqa: SIM118
                key = (name, *offsets[name]["saved_offsets"])
                assert key not in seen
                seen.add(key)
                elements[name] = elements.get(name, 0) + opened.get_tensor(name).numel()
    assert elements["model.embedding.weight"] == 17 * 9
    assert elements["optimizer.exp_avg.norm.weight"] == 9
    assert elements["optimizer.step.norm.weight"] == 1
    assert {f"random.{n}.cpu" for n in range(4)} <= elements.keys()


def test_one_rank_keeps_its_random_states_in_state_json(saved):
    path, wrote = saved("1")
    assert [file.name for file in sorted(path.glob("*.json"))] == ["manifest.json", "state.json"]
    (found,) = ranks.run(1, rank_saving.load, path, {})
    assert found[1] == wrote[0][1]


@pytest.mark.long(lambda rank, background: background != (rank == 2))
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_full_disk_on_one_rank_is_raised_on_all_and_leaves_nothing(tmp_path, rank, background):
    found = ranks.run(3, rank_saving.fail_on_one_rank, tmp_path, rank, background)
    for number, ((kind, text), left, latest) in enumerate(found):
        assert kind is OctavoError
        assert text.startswith(
            "no space for a checkpoint" if number == rank else f"rank {rank} of 3: no space for a checkpoint"
        )
        assert left == ["step-1"]
        assert latest == "step-2"


def test_what_one_rank_cannot_save_is_refused_on_all(tmp_path):
    (first, nothing), *others = ranks.run(3, rank_saving.refused_on_one_rank, tmp_path)
    assert first[0] is InputError
    assert "the optimizer's state 'odd'" in first[1]
    assert others == [((InputError, f"rank 0 of 3: {first[1]}"), nothing)] * 2
    assert nothing == []


def damage(checkpoint):
    file = sorted(checkpoint.glob("*.safetensors"))[-1]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_all_ranks_fall_back_together_and_fail_together(tmp_path):
    ranks.run(4, rank_saving.save_three, tmp_path)
    (tmp_path / ".tmp-step-4-1").mkdir()
    damage(tmp_path / "step-3")
    found = ranks.run(3, rank_saving.look, tmp_path)
    assert [where for where, *_ in found] == [("step-2", 2)] * 3
    assert [len(messages) for _, messages, _ in found] == [1, 0, 0]
    assert "step-3 is damaged" in found[0][1][0]
    assert [left for *_, left in found] == [["step-1", "step-2", "step-3"]] * 3
    for step in (1, 2):
        damage(tmp_path / f"step-{step}")
    found = ranks.run(3, rank_saving.look, tmp_path)
    (kind, text), *others = [where for where, *_ in found]
    assert kind is OctavoError
    assert "is complete (step-3, step-2, step-1)" in text
    assert others == [(OctavoError, f"rank 0 of 3: {text}")] * 2


@pytest.mark.long(lambda layout: layout == "4")
@pytest.mark.parametrize("layout", ["4", "replicate 2 x shard 2"])
def test_training_goes_on_while_ranks_write_and_changes_nothing_of_it(tmp_path, layout):
    count, degrees = LAYOUTS[layout]
    for before, after, restored in ranks.run(count, rank_saving.delayed_save, tmp_path, degrees):
        assert restored == before
        assert after != before


def test_parameters_that_were_gathered_for_a_forward_are_saved_as_shards(tmp_path):
    found = ranks.run(2, rank_saving.after_a_validation, tmp_path)
    assert found[0] == found[1]


def test_octavos_own_generators_come_back(tmp_path):
    for wanted, found in ranks.run(2, rank_saving.tracked, tmp_path):
        assert found == wanted


@pytest.mark.parametrize("failpoint", FAILPOINTS)
def test_killed_ranks_leave_the_last_whole_checkpoint(tmp_path, failpoint):
    with pytest.raises(AssertionError, match="died"):
        ranks.run(2, rank_saving.killed_together, tmp_path, failpoint)
    path, damaged = manifest.newest_whole(tmp_path, print)
    assert path.name == ("step-2" if failpoint in ("after-rename", "while-pruning") else "step-1")
    assert not damaged


@pytest.mark.long(lambda layout, tied: tied == (layout == "3"))
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", ["1", "3", "replicate 2 x shard 2"])
def test_a_sharded_model_is_exported_as_one_rank_exports_it(tmp_path, layout, tied):
    count, degrees = LAYOUTS[layout]
    found = ranks.run(count, rank_saving.export, tmp_path, degrees, tied)
    assert all("not empty" in text for text in found)
    model, _ = rank_saving.sharded(tie_word_embeddings=tied)
    write_pretrained(dict(model.state_dict()), model.config, tmp_path / "alone")
    for file in (tmp_path / "alone").iterdir():
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes(), file.name
    ids = torch.arange(17)[None]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    torch.testing.assert_close(theirs(ids).logits, model.eval()(input_ids=ids).logits)


def test_an_export_that_fails_on_the_first_rank_fails_on_all(tmp_path):
    first, *others = ranks.run(3, rank_saving.export_on_a_full_disk, tmp_path)
    assert "No space left on device" in first
    assert all("No space left on device" in text for text in others)


def test_the_memory_of_an_export_is_that_of_a_file(tmp_path, monkeypatch):
    """Tensors read and not yet written never exceed one file and the parameter at its border."""
    monkeypatch.setattr(weight_files, "_SHARD_BYTES", 2000)
    model, _ = rank_saving.sharded()
    held, most, files = [0], [0], []
    largest = max(tensor.nbytes for tensor in weights_in(model).values())
    write = weight_files.save_file

    def read(name):
        held[0] += weights_in(model)[name].nbytes
        most[0] = max(most[0], held[0])
        return weights_in(model)[name]

    def save(content, path, **settings):
        write(content, path, **settings)
        files.append(path)
        held[0] = 0

    monkeypatch.setattr(weight_files, "save_file", save)
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in weights_in(model).items()}
    write_pretrained(shapes, model.config, tmp_path / "one", read=read)
    assert len(files) > 3
    assert most[0] <= 2000 + 2 * largest
    monkeypatch.setattr(weight_files, "save_file", write)
    write_pretrained(dict(model.state_dict()), model.config, tmp_path / "two")
    for file in (tmp_path / "two").iterdir():
        assert file.read_bytes() == (tmp_path / "one" / file.name).read_bytes(), file.name

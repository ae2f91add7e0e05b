"""Weights go to Hugging Face and come back bit for bit; folders that are not what they should be are refused by name."""

import json

import pytest
import torch
from expectations import refused, same_bits
from llamas import SHAPES, hugging_face, llama, llama_config, tokens
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from building import built_model
from octavo.build import transform
from octavo.models import weight_files
from octavo.models.convert import check_names_and_shapes, conversion, write_pretrained
from octavo.models.weight_files import INDEX, WeightFiles


def parameters(model):
    return {name: p.detach() for name, p in model.named_parameters()}


def build(config, folder=None, **changes):
    make = {"dtype": torch.float32, "params_dtype": torch.float32, "device": "cpu", "seed": 0}
    return built_model(config, load_from=folder, **make | changes)


@pytest.fixture
def source(tmp_path):
    """(a Hugging Face model, the folder that it was saved to)."""

    def make(**changes):
        model = llama(**changes)
        model.save_pretrained(tmp_path / "source")
        return model, tmp_path / "source"

    return make


@pytest.mark.long(lambda shape, dtype: list(SHAPES).index(shape) % 2 == (dtype == torch.bfloat16))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_to_and_from_hugging_face_are_inverse(shape, dtype):
    theirs = llama(3, dtype, **SHAPES[shape])
    model = transform(theirs, dtype=dtype)
    ours, way = parameters(model), conversion(model.spec)
    there = hugging_face(ours, model.spec)
    same_bits(there, parameters(theirs))
    back = {name: way.join(name, tuple(there[n] for n in way.names(name))) for name in ours}
    same_bits(back, ours)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard_bytes", [None, 20_000])
def test_hugging_face_loads_what_is_written(tmp_path, monkeypatch, tied, dtype, shard_bytes):
    if shard_bytes:
        monkeypatch.setattr(weight_files, "_SHARD_BYTES", shard_bytes)
    theirs = llama(1, dtype, tie_word_embeddings=tied, attention_bias=True)
    model = transform(theirs, dtype=dtype)
    folder = tmp_path / "out"
    write_pretrained(dict(model.state_dict()), theirs.config, folder)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert (len(files) > 2) == bool(shard_bytes)
    loaded, report = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(loaded).__name__ == "LlamaForCausalLM"
    same_bits(parameters(loaded), parameters(theirs))
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    ids = tokens(2, 9)
    torch.testing.assert_close(loaded(ids).logits, theirs(ids).logits, rtol=0, atol=0)
    if shard_bytes:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        stored = {name: tensor for file in files for name, tensor in load_file(folder / file).items()}
        assert set(index["weight_map"].values()) == set(files)
        assert index["weight_map"].keys() == stored.keys()
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())
        assert all(sum(t.nbytes for t in load_file(folder / f).values()) <= shard_bytes for f in files)


def test_writing_keeps_the_config_and_copies_the_tokenizer(tmp_path):
    theirs = llama(**SHAPES["llama3-rope"])
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "config.json").write_text("not a config")
    before = theirs.config.to_dict()
    write_pretrained(parameters(transform(theirs)), theirs.config, tmp_path / "out", tokenizer)
    assert theirs.config.to_dict() == before
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert written["dtype"] == "float32"
    assert written["architectures"] == ["LlamaForCausalLM"]
    for key in ("vocab_size", "hidden_size", "num_key_value_heads", "rms_norm_eps", "rope_parameters"):
        assert written[key] == before[key]


def test_a_folder_with_files_is_not_written_over(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    model = transform(llama())
    refused(("not empty", str(tmp_path)), write_pretrained, parameters(model), model.config, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("shape", ["plain", "tied", "all-biases", "qwen3", "phi3-partial", "neox", "neox-tanh-tied"])
@pytest.mark.parametrize("sharded", [False, True])
def test_models_loaded_from_a_folder_have_the_logits_of_the_source(tmp_path, shape, sharded):
    theirs = llama(6, **SHAPES[shape])
    theirs.save_pretrained(tmp_path, max_shard_size=20_000 if sharded else "5GB")
    assert (tmp_path / "model.safetensors.index.json").is_file() == sharded
    ids = tokens(2, 9)
    wanted = theirs(ids).logits
    with torch.device("meta"):
        empty = type(theirs)(theirs.config)
    models = [
        build(theirs.config, tmp_path),
        build(theirs.config, str(tmp_path), seed=5),
        transform(empty, dtype=torch.float32, load_from=tmp_path),
        transform(llama(9, **SHAPES[shape]), dtype=torch.float32, load_from=tmp_path),
    ]
    for model in models:
        torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-5, atol=1e-5)
        assert (model.head.weight is model.embedding.weight) == theirs.config.tie_word_embeddings


def test_master_weights_of_a_bf16_folder_are_its_values(source):
    theirs, folder = source(dtype=torch.bfloat16)
    model = build(theirs.config, folder, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    same_bits(
        hugging_face(parameters(model), model.spec),
        {name: p.float() for name, p in parameters(theirs).items()},
    )


def test_pickles_are_never_opened(tmp_path):
    opened = tmp_path / "opened"
    (tmp_path / "pytorch_model.bin").write_bytes(f"cos\nsystem\n(S'touch {opened}'\ntR.".encode())
    for call in (lambda: WeightFiles(tmp_path), lambda: build(llama_config(), tmp_path)):
        refused(("pytorch_model.bin", str(tmp_path), "safetensors"), call)
    assert not opened.exists()


def test_folders_without_weights_are_refused(tmp_path):
    refused((str(tmp_path), "safetensors"), WeightFiles, tmp_path)
    refused(str(tmp_path / "gone"), WeightFiles, tmp_path / "gone")


def test_a_missing_shard_is_named(tmp_path):
    theirs = llama()
    theirs.save_pretrained(tmp_path, max_shard_size=20_000)
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    refused((lost.name, "model.safetensors.index.json"), build, theirs.config, tmp_path)


def test_a_torn_shard_is_named(source):
    theirs, folder = source()
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    refused("model.safetensors", build, theirs.config, folder)


def test_a_torn_index_is_named(tmp_path):
    theirs = llama()
    theirs.save_pretrained(tmp_path, max_shard_size=20_000)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text()[:50])
    refused(index.name, build, theirs.config, tmp_path)


def test_a_missing_weight_is_named(source):
    theirs, folder = source()
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    refused("model.layers.1.self_attn.k_proj.weight", build, theirs.config, folder)


@pytest.mark.parametrize("blocks", ["auto", "own"])
def test_of_many_weights_that_are_missing_or_too_many_ten_and_the_number_are_named(source, blocks):
    theirs, folder = source(num_hidden_layers=4)
    file = folder / "model.safetensors"
    whole = load_file(file)
    names = sorted(name for name in whole if "_proj" in name)[:15]
    save_file({name: tensor for name, tensor in whole.items() if name not in names}, file, metadata={"format": "pt"})
    message = refused(("lacks 15 weights, ", " and 5 more: "), build, theirs.config, folder, blocks=blocks)
    assert sum(name in message for name in names) == 10
    surplus = {f"{name.removesuffix('weight')}bias": torch.zeros(3) for name in names}
    save_file(whole | surplus, file, metadata={"format": "pt"})
    message = refused(
        (" and 5 more (15 weights) are not part of the model", "drop them with transformers"), build, theirs.config, folder
    )
    assert sum(name in message for name in surplus) == 10
    renamed = {name.replace("_proj.", "_linear."): tensor for name, tensor in whole.items()}
    save_file(renamed, file, metadata={"format": "pt"})
    message = refused((" and 18 more (28 weights) are not part", "It lacks model.layers.0."), build, theirs.config, folder)
    assert message.count("_linear.") == message.count("_proj.") == 10


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 98},
        {"intermediate_size": 48},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"hidden_size": 64},
        {"head_dim": 8},
    ],
)
def test_weights_of_another_shape_are_refused_with_both(source, changes):
    _, folder = source()
    refused(("shape", "config"), build, llama_config(**changes), folder)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.self_attn.k_proj.weight", (24, 40)),
        ("model.layers.0.self_attn.v_proj.weight", (23, 48)),
        ("model.layers.1.mlp.up_proj.weight", (40, 48)),
        ("model.layers.1.mlp.down_proj.weight", (1, 44)),
        ("model.norm.weight", (1,)),
    ],
)
def test_one_tensor_of_another_shape_is_refused(source, name, shape):
    theirs, folder = source()
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name: torch.zeros(shape)}, file, metadata={"format": "pt"})
    refused("shape", build, theirs.config, folder)


def test_layers_are_not_confused_when_there_are_more_than_ten(source):
    theirs, folder = source(num_hidden_layers=12)
    ids = tokens(1, 7)
    torch.testing.assert_close(build(theirs.config, folder)(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"hidden_act": "gelu"}])
def test_headers_are_held_against_a_model_without_memory(source, changes):
    model, folder = source(**changes)
    on_meta = build(model.config, device="meta")
    check_names_and_shapes(on_meta, WeightFiles(folder))
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name][:-1].clone()}, folder / "model.safetensors", {"format": "pt"})
    refused((name, "have shape", "config"), check_names_and_shapes, on_meta, WeightFiles(folder))
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    refused(f"no weight {name!r}", check_names_and_shapes, on_meta, WeightFiles(folder))


def test_a_folder_for_weights_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    to = tmp_path / "file" / "inner"
    refused((str(to), "cannot be created", "another folder"), write_pretrained, {}, llama_config(), to)


def shards(folder, *, seed=0, **changes):
    """A model saved in shards; returns it and its index."""
    model = llama(seed, **changes)
    model.save_pretrained(folder, max_shard_size=20_000)
    return model, json.loads((folder / INDEX).read_text())


def check_bits(folder, model):
    """What is loaded is that model, which is also what transformers loads."""
    same_bits(parameters(AutoModelForCausalLM.from_pretrained(folder)), parameters(model))
    built = build(model.config, folder)
    same_bits(hugging_face(parameters(built), built.spec), parameters(model))


def test_one_file_comes_before_an_index(tmp_path):
    _, index = shards(tmp_path, seed=1)
    model = llama(2)
    save_file(model.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    check_bits(tmp_path, model)
    (tmp_path / next(iter(index["weight_map"].values()))).unlink()
    check_bits(tmp_path, model)


@pytest.mark.parametrize(
    "other", ["adapter_model", "consolidated", "ema", "zz", "model-00001-of-00009", "model.fp16", "0/model", "pytorch_model"]
)
@pytest.mark.parametrize("sharded", [True, False])
def test_other_files_in_the_folder_are_not_read(tmp_path, other, sharded):
    model = llama(3)
    model.save_pretrained(tmp_path, max_shard_size=20_000 if sharded else "5GB")
    (tmp_path / "0").mkdir()
    save_file(llama(4).state_dict(), tmp_path / f"{other}.safetensors", {"format": "pt"})
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    check_bits(tmp_path, model)


@pytest.mark.parametrize("sharded", [True, False])
def test_the_file_that_a_config_names_comes_first(tmp_path, sharded):
    other = llama(5)
    other.save_pretrained(tmp_path, max_shard_size=20_000 if sharded else "5GB")
    name = "other.safetensors.index.json" if sharded else "other.safetensors"
    (tmp_path / (INDEX if sharded else "model.safetensors")).rename(tmp_path / name)
    save_file(llama(6).state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"transformers_weights": name}))
    check_bits(tmp_path, other)
    for wrong, word in (
        ("../x.safetensors", "no safetensors file"),
        ("x.bin", "no safetensors file"),
        ("x.safetensors", "missing"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {"transformers_weights": wrong}))
        refused((repr(wrong) if word != "missing" else wrong, "transformers_weights", word), WeightFiles, tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.fp16.safetensors", ("rename",)),
        ("consolidated.safetensors", ("rename",)),
        ("adapter_model.safetensors", ("adapter_model.safetensors",)),
        ("unet/model.safetensors", ("Give the folder",)),
        ("model.gguf", ("model.gguf",)),
        ("pytorch_model.bin.index.json", ()),
        ("sub/pytorch_model.bin", ("pickle", "save_pretrained")),
        ("consolidated.00.pth", ("pickle",)),
    ],
)
def test_a_folder_without_the_files_of_transformers_is_refused(tmp_path, name, words):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    save_file(llama().state_dict(), tmp_path / name, {"format": "pt"})
    refused(("no model.safetensors and no", *words), build, llama_config(), tmp_path)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/model.safetensors", "a/../../x.safetensors", "x.bin"])
def test_an_index_with_a_path_out_of_the_folder_is_refused(tmp_path, file):
    model, index = shards(tmp_path)
    index["weight_map"]["model.norm.weight"] = file
    (tmp_path / INDEX).write_text(json.dumps(index))
    refused((repr(file), INDEX, "model.norm.weight"), build, model.config, tmp_path)


@pytest.mark.parametrize("weight_map", [None, {}, [], {"model.norm.weight": 3}])
def test_an_index_without_a_map_is_refused(tmp_path, weight_map):
    model, index = shards(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps(index | {"weight_map": weight_map}))
    refused((INDEX, "damaged"), build, model.config, tmp_path)


def test_an_index_and_shards_of_two_saves_are_refused(tmp_path):
    model, index = shards(tmp_path)
    where = index["weight_map"]
    one, other = sorted(set(where.values()))[:2]
    name = next(name for name, file in where.items() if file == one)
    for changes in ({name: other}, {"model.layers.9.mlp.up_proj.weight": one}):
        (tmp_path / INDEX).write_text(json.dumps(index | {"weight_map": where | changes}))
        refused((next(iter(changes)), "two saves"), build, model.config, tmp_path)
    (tmp_path / INDEX).write_text(json.dumps(index))
    save_file(load_file(tmp_path / other) | {name: torch.zeros(3)}, tmp_path / other, {"format": "pt"})
    refused((name, one, other, "two saves"), build, model.config, tmp_path)


def test_an_adapter_is_refused(source):
    theirs, folder = source()
    (folder / "adapter_config.json").write_text("{}")
    refused(("adapter_config.json", "merge"), build, theirs.config, folder)


def test_a_checkpoint_of_a_run_is_no_model_folder(tmp_path):
    save_file(llama().state_dict(), tmp_path / "shard-00001-model-00001-of-00001.safetensors")
    refused(("distributed checkpoint", "octavo export"), build, llama_config(), tmp_path)


def test_a_pointer_of_git_lfs_is_named(source):
    theirs, folder = source()
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    refused(("model.safetensors", "git lfs pull"), build, theirs.config, folder)


def test_a_snapshot_of_links_is_read(tmp_path):
    model, _ = shards(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for number, path in enumerate(sorted((tmp_path / "blobs").iterdir())):
        blob = path.rename(path.with_name(str(number)))
        (tmp_path / "snapshot" / path.name).symlink_to(f"../blobs/{blob.name}")
    check_bits(tmp_path / "snapshot", model)


def test_an_id_of_the_hub_is_no_folder():
    refused(("'owner/name'", "hf download"), build, llama_config(), "owner/name")

"""Parameters that a run does not train: fine-tuning from a folder of Mixtral to one that transformers loads."""

import json
import re
import shutil

import pytest
import torch
from llamas import SHAPES, llama
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

import octavo
from octavo.cli import main
from octavo.errors import InputError
from octavo.models.replace import freeze
from octavo.run.metrics import read_metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small Mixtral, as transformers saves it."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        num_local_experts=4, sliding_window=None, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("mixtral")
    MixtralForCausalLM(config).save_pretrained(path)
    return path


def from_folder(run, folder, *lines):
    """The run file of a tiny run, from the weights of a folder, with more lines of [train]."""
    text = re.sub(r"\[model\.config\]\n.*?(?=\n\[)", "load = true\n", run.file.read_text(), flags=re.DOTALL)
    text = text.replace('"llama-tiny"', f'"{folder}"').replace("[train]\n", "\n".join(("[train]", *lines, "")))
    run.file.write_text(f'{text}\n[moe]\nmoe_load_balancing = "aux_loss"\nmoe_z_loss_coeff = 0.001\n')
    return run


def weights(path):
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.long(lambda pattern, recipe: (pattern is None) == (recipe == "delayed"))
@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("pattern", ["*.experts.*", None])
def test_a_folder_is_fine_tuned_and_frozen_experts_keep_every_bit(pattern, recipe, folder, tiny_run, tmp_path):
    lines = [] if pattern is None else [f'freeze = ["{pattern}"]']
    run = from_folder(tiny_run(steps=4, every=2), folder, *lines)
    history = [] if recipe == "delayed" else ["fp8.amax_history_len=1024"]
    command = ["train", str(run.file), f"fp8.recipe={recipe}", *history]
    assert main(command) == 0
    first = read_metrics(run.output / "metrics.jsonl")
    shutil.rmtree(run.output / "checkpoints" / "step-4")
    assert main(command) == 0
    again = read_metrics(run.output / "metrics.jsonl")
    assert [record["loss"] for record in first] == [record["loss"] for record in again]
    assert all((record["tflops"] is None) == (pattern is not None) for record in first)  # whose products are not all done
    assert main(["export", str(run.output), "--to", str(tmp_path / "export")]) == 0
    before, after = weights(folder), weights(tmp_path / "export")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        kept = torch.equal(tensor, after[name].to(tensor.dtype))
        assert kept == (pattern is not None and ".experts." in name), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    ids = torch.arange(32).view(2, 16)
    ours = octavo.transform(loaded, dtype=torch.float32)(input_ids=ids).logits
    torch.testing.assert_close(ours, loaded(input_ids=ids).logits, rtol=1e-4, atol=1e-5)


def test_frozen_parameters_are_told_and_need_no_states(folder, tiny_run, capsys):
    run = from_folder(tiny_run(), folder, 'freeze = ["*.experts.*"]')
    found = []
    for more in ([], ["train.freeze=[]"]):
        assert main(["train", str(run.file), "--dry-run", "--json", *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    frozen, trained = found
    experts = 2 * 4 * 3 * 32 * 48
    assert (frozen["frozen"], trained["frozen"]) == (experts, 0)
    parts = [each["memory"]["parts_gib"] for each in found]
    assert parts[0]["parameters"] == parts[1]["parameters"]
    states = 2 * 4 * experts / 2**30
    assert parts[1]["optimizer states"] - parts[0]["optimizer states"] == pytest.approx(states)
    assert trained["memory"]["exact_gib"] - frozen["memory"]["exact_gib"] == pytest.approx(1.5 * states)
    assert main(["describe", str(run.file)]) == 0
    said = capsys.readouterr().out
    assert f"{experts:,} of them frozen" in said
    assert len(re.findall(r"moe\.experts\.fc[12] .* not trained", said)) == 4


@pytest.mark.parametrize(
    ("patterns", "frozen"),
    [
        (["*.fc1_weight"], ["moe.experts.fc1_weight"]),
        (["*.mlp.experts"], ["moe.experts.fc1_weight", "moe.experts.fc2_weight"]),
        (["*.mlp.gate"], ["moe.router.weight"]),
        (["*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight"], ["self_attention.qkv.weight"]),
        (["*layernorm*"], ["self_attention.layernorm.weight", "moe.layernorm.weight"]),
        (["*.layernorm_moe.router_weight"], ["moe.router.weight"]),  # by the names of older versions
        (["*.layernorm_qkv.layer_norm_weight"], ["self_attention.layernorm.weight"]),
        (["model.layers.*.self_attn", "*.o_proj"], ["self_attention.qkv.weight", "self_attention.proj.weight"]),
    ],
    ids=str,
)
def test_names_are_octavos_or_hugging_faces_of_parameters_or_modules(patterns, frozen):
    model = octavo.transform(llama(**SHAPES["mixtral"]))
    freeze(model, patterns)
    found = {name.split(".", 2)[2] for name, p in model.named_parameters() if not p.requires_grad}
    assert found == set(frozen)


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (["*.expert.*"], r"train\.freeze pattern '\*\.expert\.\*' matches no parameter"),
        (["lm_haed"], "The nearest is"),
        (["*.q_proj.weight"], r"does not match .*k_proj\.weight, .*v_proj\.weight, but .* are one parameter here"),
        (
            ["*attention*"],
            r"two meanings.* it is 'model\.layers\.\*\.post_attention_layernorm\.weight'; by Octavo's also .*q_proj",
        ),
        (["lm_head", "*_attention*"], r"'\*_attention\*' has two meanings"),
        (["*"], r"train\.freeze = \['\*'\] leaves no parameter to train"),
    ],
    ids=str,
)
def test_patterns_that_freeze_nothing_a_part_or_all_are_refused(patterns, words):
    with pytest.raises(InputError, match=words):
        freeze(octavo.transform(llama(**SHAPES["mixtral"])), patterns)


def test_a_model_with_its_own_code_freezes_by_its_own_names():
    model = octavo.transform(llama(**SHAPES["mixtral"]), blocks="own")
    freeze(model, ["model.layers.0.*"])
    assert all(p.requires_grad != name.startswith("model.layers.0.") for name, p in model.named_parameters())

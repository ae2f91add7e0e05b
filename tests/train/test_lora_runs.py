"""Runs with adapters: continued exactly, on any ranks, exported for PEFT and merged; and refused quickly."""

import json
import re
import shutil

import pytest
import torch
from llamas import llama
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ranks
from octavo.cli import main
from octavo.config.run import RunConfig
from octavo.run.metrics import read_metrics

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
EXACT = ["model.dtype=float32", "fp8.enabled=false", "model.config.attention_dropout=0.0", "optimizer.schedule=constant"]
LORA = "\n[lora]\nrank = 4\n"
RECIPES = ["delayed", "current", "rowwise", "block"]


def adapted(run, lines=LORA):
    run.file.write_text(run.file.read_text() + lines)
    return run


def train(file, overrides):
    """`octavo train` in this process, which is one rank of those that the pool has joined."""
    from rich.console import Console

    from octavo.train.trainer import Trainer

    return Trainer(RunConfig.from_file(file, overrides), console=Console(quiet=True)).train().summary.loss


def losses(run):
    return [record["loss"] for record in read_metrics(run.output / "metrics.jsonl")]


def recipe_lines(recipe):
    return [f"fp8.recipe={recipe}", *([] if recipe == "delayed" else ["fp8.amax_history_len=1024"]), "fp8.enabled=true"]


@pytest.mark.long(lambda recipe: recipe not in ("delayed", "rowwise"))
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_continues_to_the_bit_and_goes_to_peft_and_merged(recipe, tiny_run, tmp_path, capsys):
    peft = pytest.importorskip("peft", reason="needs peft, of the dev extra: pip install -e '.[dev]'")
    run = adapted(tiny_run(steps=4, every=2), LORA + "dropout = 0.1\n")
    command = ["train", str(run.file), *recipe_lines(recipe), "train.micro_batch=1"]
    assert main(command) == 0
    assert "adapters of random weights, since model.load = false" in capsys.readouterr().err
    first = losses(run)
    shutil.rmtree(run.output / "checkpoints" / "step-4")
    assert main(command) == 0
    assert losses(run) == first
    assert main(["export", str(run.output), "--to", str(tmp_path / "peft")]) == 0
    said = capsys.readouterr()
    assert "PeftModel.from_pretrained" in said.out
    assert "trained on random weights" in said.err
    assert main(["export", str(run.output), "--to", str(tmp_path / "merged"), "--merge"]) == 0
    stored = load_file(next((run.output / "checkpoints" / "step-4").glob("*.safetensors")))
    assert not [name for name in stored if name.startswith("model.") and "lora_" not in name]
    ids = torch.arange(32).view(2, 16)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert main(["export", str(run.output), "--to", str(tmp_path / "base"), "--merge"]) == 0
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    factors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    with torch.no_grad():
        for name, weight in base.named_parameters():
            key = f"base_model.model.{name.removesuffix('.weight')}.lora"
            if f"{key}_A.weight" in factors:
                weight -= 2 * factors[f"{key}_B.weight"] @ factors[f"{key}_A.weight"]
    with torch.no_grad():
        around = peft.PeftModel.from_pretrained(base, tmp_path / "peft").eval()
        found = around(input_ids=ids).logits
        torch.testing.assert_close(found, merged(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    assert main(["sample", str(run.output), "--tokens", "3"]) == 0


FEW = [
    (2, ["train.recompute=selective", "parallel.context_parallel_degree=2"]),
    (4, ["parallel.hybrid_shard_degree=2"]),
    (2, ["parallel.tensor_parallel_degree=2"]),
]
FURTHER = [(2, []), (2, ["train.recompute=true"])]
"""Layouts of make test-long."""


@pytest.mark.long(lambda layouts: layouts is FURTHER)
@pytest.mark.parametrize("layouts", [FEW, FURTHER], ids=["few", "further"])
def test_ranks_train_the_adapters_of_one_rank(tiny_run, tmp_path, layouts):
    given = [*EXACT, "train.micro_batch=1"]
    lines = LORA + 'save_whole = ["norm"]\n'
    one = adapted(tiny_run("one", steps=4), lines)
    ranks.run(1, train, one.file, given)
    wanted = read_metrics(one.output / "metrics.jsonl")
    for number, (count, more) in enumerate(layouts):
        several = adapted(tiny_run(f"several-{number}", steps=4), lines)
        assert len(set(ranks.run(count, train, several.file, [*given, *more]))) == 1
        for a, b in zip(read_metrics(several.output / "metrics.jsonl"), wanted, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
    merged = []
    for number, run in enumerate((one, several)):  # of one rank, and of the last layout
        assert main(["export", str(run.output), "--to", str(tmp_path / f"{number}"), "--merge"]) == 0
        merged.append(load_file(tmp_path / f"{number}" / "model.safetensors"))
    assert all(torch.allclose(merged[0][name], merged[1][name], rtol=1e-3, atol=1e-4) for name in merged[0])


@pytest.mark.long
@pytest.mark.parametrize("params", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_sharded_fp8_bases_train_as_one_rank_s_and_continue_on_others(recipe, params, tiny_run):
    given = [*recipe_lines(recipe), f"model.params_dtype={params}", "model.config.attention_dropout=0.0"]
    one = adapted(tiny_run("one", steps=4))
    ranks.run(1, train, one.file, given)
    two = adapted(tiny_run("two", steps=4, every=2))
    ranks.run(2, train, two.file, given)
    assert losses(two) == pytest.approx(losses(one), rel=2e-3)
    whole = losses(two)
    shutil.rmtree(two.output / "checkpoints" / "step-4")
    ranks.run(2, train, two.file, given)
    assert losses(two) == whole
    shutil.rmtree(two.output / "checkpoints" / "step-4")
    ranks.run(1, train, two.file, given)
    assert losses(two) == pytest.approx(whole, rel=2e-3)


def from_folder(run, folder):
    import re

    text = re.sub(r"\[model\.config\]\n.*?(?=\n\[)", "load = true\n", run.file.read_text(), flags=re.DOTALL)
    run.file.write_text(text.replace('"llama-tiny"', f'"{folder}"'))
    return run


def test_a_folder_s_weights_stay_and_another_folder_is_refused(tiny_run, tmp_path, capsys):
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    llama(**sizes).save_pretrained(tmp_path / "base")
    run = from_folder(
        adapted(tiny_run(steps=2, every=2), LORA + 'targets = ["q_proj"]\nsave_whole = ["lm_head"]\n'), tmp_path / "base"
    )
    assert main(["train", str(run.file), "model.params_dtype=bfloat16"]) == 0
    assert main(["export", str(run.output), "--to", str(tmp_path / "merged"), "--merge"]) == 0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name].bfloat16(), after[name])}
    assert {name for name in before if name not in same} == {
        "lm_head.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight",
    }  # fmt: skip
    llama(seed=1, **sizes).save_pretrained(tmp_path / "base")
    capsys.readouterr()
    assert main(["export", str(run.output), "--to", str(tmp_path / "other"), "--merge"]) == 2
    assert "another base" in capsys.readouterr().err


def test_an_export_says_how_the_base_was_changed(tiny_run, tmp_path, capsys):
    """Adapters trained with other positions are right only on a base with them, which PEFT's format cannot say."""
    peft = pytest.importorskip("peft", reason="needs peft, of the dev extra: pip install -e '.[dev]'")
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    llama(**sizes).save_pretrained(tmp_path / "base")
    run = from_folder(adapted(tiny_run(steps=2, every=2)), tmp_path / "base")
    longer = ['model.config.rope_parameters={rope_type = "linear", factor = 4.0}', "model.config.max_position_embeddings=512"]
    assert main(["train", str(run.file), "fp8.enabled=false", "optimizer.lr=0.1", *longer]) == 0
    assert main(["export", str(run.output), "--to", str(tmp_path / "merged"), "--merge"]) == 0
    assert "other positions" not in capsys.readouterr().err
    assert main(["export", str(run.output), "--to", str(tmp_path / "adapter")]) == 0
    call = re.search(r"AutoModelForCausalLM.from_pretrained\(.*\)", capsys.readouterr().err)
    assert call is not None
    base = eval(call[0], {"AutoModelForCausalLM": AutoModelForCausalLM})  # noqa: S307
    ids = torch.randint(320, (2, 24))
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(input_ids=ids).logits
        found = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")(input_ids=ids).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("rank = 40", ("lora.rank = 40", "k_proj is [16, 32]", "lora.rank = 16 or less")),
        ('rank = 4\ntargets = ["q_porj"]', ("'q_porj' matches no matrix", "'q_proj'")),
        ('rank = 4\ntargets = "q_proj"', ("lora.targets = 'q_proj'", '["q_proj"]')),
        ("alpha = 8.0", ("lora.alpha = 8.0", "lora.rank")),
        ("rank = 0", ("lora.rank = 0",)),
        ("r = 8", ("unknown key lora.r.", "Did you mean lora.rank?")),
        ('rank = 4\nload = "nowhere"', ("nowhere", "not a PEFT folder")),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(lines, words, tiny_run, capsys):
    run = adapted(tiny_run(), f"\n[lora]\n{lines}\n")
    assert main(["train", str(run.file), "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said
    assert not run.output.exists()


def test_layouts_that_adapters_do_not_have_are_refused_by_name(tiny_run, capsys):
    run = adapted(tiny_run())
    assert main(["train", str(run.file), "train.recompute=mlp", "--dry-run"]) == 2
    assert 'recompute = "mlp"' in capsys.readouterr().err
    assert main(["train", str(run.file), 'train.freeze=["*norm*"]', "--dry-run"]) == 2
    assert "train.freeze" in capsys.readouterr().err
    assert main(["train", str(run.file), "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["parameters"] - found["frozen"] < found["frozen"]


@pytest.mark.long(lambda recipe: recipe != "block")
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_a_base_in_fp8_trains_as_one_that_is_cast_and_continues_and_merges(recipe, tiny_run, tmp_path):
    command = [*recipe_lines(recipe), "model.params_dtype=bfloat16", "train.micro_batch=1"]
    cast, stored = (
        adapted(tiny_run(name, steps=4, every=2), LORA + lines) for name, lines in (("a", ""), ("b", 'base = "fp8"\n'))
    )
    for run in (cast, stored):
        assert main(["train", str(run.file), *command]) == 0
    assert losses(stored) == losses(cast)
    shutil.rmtree(stored.output / "checkpoints" / "step-4")
    assert main(["train", str(stored.file), *command]) == 0
    assert losses(stored) == losses(cast)
    for name, run in (("cast", cast), ("stored", stored)):
        assert main(["export", str(run.output), "--to", str(tmp_path / name), "--merge"]) == 0
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("cast", "stored"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_base_in_fp8_is_refused_where_it_is_not_exact(tiny_run, capsys):
    run = adapted(tiny_run(), LORA + 'base = "fp8"\n')
    for overrides, words in (
        (["fp8.recipe=rowwise", "fp8.amax_history_len=1024"], "two FP8 copies"),
        (["fp8.margin=1"], "fp8.margin = 1"),
        (["fp8.enabled=false"], "no product runs in FP8"),
        (["train.compare_bf16=true"], "train.compare_bf16"),
        (["lora.base=fp4"], "lora.base = 'fp4'"),
    ):
        assert main(["train", str(run.file), "--dry-run", *overrides]) == 2
        assert words in capsys.readouterr().err
    assert not run.output.exists()


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_sharded_bases_in_fp8_train_as_ones_that_are_cast_and_merge(recipe, tiny_run, tmp_path):
    given = [*recipe_lines(recipe), "model.params_dtype=bfloat16", "model.config.attention_dropout=0.0"]
    runs = [adapted(tiny_run(name, steps=4, every=2), LORA + lines) for name, lines in (("a", ""), ("b", 'base = "fp8"\n'))]
    for run in runs:
        ranks.run(2, train, run.file, given)
    assert losses(runs[0]) == losses(runs[1])
    shutil.rmtree(runs[1].output / "checkpoints" / "step-4")
    ranks.run(1, train, runs[1].file, given)
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=2e-3)
    assert main(["export", str(runs[0].output), "--to", str(tmp_path / "cast"), "--merge"]) == 0
    assert main(["export", str(runs[1].output), "--to", str(tmp_path / "stored"), "--merge"]) == 0


def mixtral(folder):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        num_local_experts=4, sliding_window=None, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.long
def test_adapters_beside_spread_experts_train_as_on_one_rank(tiny_run, tmp_path):
    source = mixtral(tmp_path / "mixtral")
    given = ["model.dtype=float32", "fp8.enabled=false", "optimizer.schedule=constant", "train.micro_batch=1"]
    for targets in ('["q_proj", "o_proj"]', '"all-linear"'):
        found = []
        for number, (count, more) in enumerate(((1, []), (2, []), (2, ["parallel.expert_parallel_degree=2"]))):
            run = from_folder(adapted(tiny_run(f"{number}-{len(targets)}", steps=3), f"{LORA}targets = {targets}\n"), source)
            ranks.run(count, train, run.file, [*given, *more])
            found.append(losses(run))
        assert found[1] == pytest.approx(found[0], rel=1e-5)
        assert found[2] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
def test_adapters_of_experts_continue_to_the_bit_and_merge_as_float32_rounded_once(tiny_run, tmp_path):
    peft = pytest.importorskip("peft", reason="needs peft, of the dev extra: pip install -e '.[dev]'")
    source = mixtral(tmp_path / "mixtral")
    run = from_folder(adapted(tiny_run(steps=4, every=2), LORA + 'base = "fp8"\n'), source)
    command = ["train", str(run.file), *recipe_lines("current"), "model.params_dtype=bfloat16", "optimizer.lr=1e-2"]
    assert main(command) == 0
    first = losses(run)
    shutil.rmtree(run.output / "checkpoints" / "step-4")
    assert main(command) == 0
    assert losses(run) == first
    stored = load_file(next((run.output / "checkpoints" / "step-4").glob("*.safetensors")))
    assert not [name for name in stored if name.startswith("model.") and "lora_" not in name]
    assert main(["export", str(run.output), "--to", str(tmp_path / "peft")]) == 0
    assert main(["export", str(run.output), "--to", str(tmp_path / "merged"), "--merge"]) == 0
    base = AutoModelForCausalLM.from_pretrained(source)  # the folder is in float32
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "peft").merge_and_unload().bfloat16()
    ours = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").named_parameters())
    before = dict(AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).named_parameters())
    for name, wanted in theirs.named_parameters():
        assert ours[name].dtype == torch.bfloat16
        # Two orders of a sum in float32 round to neighbours in 16 bits here and there.
        assert (ours[name] != wanted).float().mean() < 1e-3, name
        torch.testing.assert_close(ours[name], wanted, rtol=2**-7, atol=1e-6, msg=name)
        assert ("norm" in name or "embed" in name or "lm_head" in name) == torch.equal(ours[name], before[name]), name

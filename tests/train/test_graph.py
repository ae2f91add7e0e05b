"""`train.graph`: the run of the eager loop to the bit, and runs that it refuses; `tests/gpu/test_graphed_runs.py` records."""

import graph_runs
import pytest

from octavo.cli import main
from octavo.config.run import RunConfig
from octavo.data.prepared import prepare
from octavo.errors import InputError
from octavo.plan.run import Target, check
from octavo.train.setup import build
from octavo.train.step import train_step

GRAPH = "train.graph=true"


@pytest.mark.long(lambda name: name != "adapters of documents")
@pytest.mark.parametrize("name", graph_runs.RUNS)
def test_a_run_is_the_eager_one_to_the_bit_and_continues_so(name, tiny_run, capsys):
    eager = graph_runs.trained(tiny_run("eager", steps=6, every=4), name, graph=False)
    assert graph_runs.trained(tiny_run("graph", steps=6, every=4), name, graph=True) == eager
    out = capsys.readouterr().out
    assert out.count("train.graph records nothing on a CPU: steps run eagerly, to the same numbers.") == 2  # and continued


@pytest.mark.parametrize(
    ("overrides", "world", "message"),
    [
        ([], 2, "collectives are not recorded, and the run has 2 ranks. Start it on 1 rank, or train.graph = false."),
        (["data.packing=documents"], 1, "attention_dropout = 0.1. Set model.config.attention_dropout = 0 or data.packing ="),
        (["train.offload=true"], 1, "train.offload = true copies .* Set train.offload = false, or"),
        (["parallel.sm_activation_offloading=true"], 1, "parallel.sm_activation_offloading = true copies"),
        (["model.dtype=float16", "model.params_dtype=float32"], 1, 'the loss scale .* Set model.dtype = "bfloat16", or'),
        (["fp8.enabled=true", 'fp8.schedule={"first 2"=["*"]}'], 1, "fp8.schedule moves layers .* Remove fp8.schedule, or"),
        (["train.recompute=true"], 1, "redraws the masks of attention_dropout = 0.1 from .* Set train.recompute = false, or"),
        (["model.blocks=own"], 1, "LlamaForCausalLM runs its original code"),
        (["train.compile=true"], 1, "train.compile = true"),
    ],
)
def test_runs_that_a_recording_does_not_repeat_are_refused(overrides, world, message, tiny_run):
    config = RunConfig.from_file(tiny_run().file, [GRAPH, *overrides])
    with pytest.raises(InputError, match=message):
        check(config, target=Target(world_size=world))
    if "train.compile=true" not in overrides:
        check(config.model_copy(update={"train": config.train.model_copy(update={"graph": False})}), target=Target(world))


def test_experts_are_refused(tiny_run):
    run = tiny_run()
    run.file.write_text(run.file.read_text().replace("llama-tiny", "mixtral-8x7b"))
    config = RunConfig.from_file(run.file, [GRAPH, "model.config.num_local_experts=4"])
    with pytest.raises(InputError, match="routers of experts decide on the host"):
        check(config)


def test_a_dry_run_says_what_a_graph_reserves(tiny_run, capsys):
    run = tiny_run()
    assert main(["train", str(run.file), GRAPH, "--dry-run", "--gpu", "h200"]) == 0
    assert "graph       train.graph: 3 eager steps, then forward and backward are CUDA graphs" in capsys.readouterr().out


ADAPTED = ["lora.rank=4", "fp8.enabled=true", "model.config.attention_dropout=0"]
DOCUMENTS = ["data.packing=documents", "model.config.head_dim=64"]


@pytest.mark.parametrize(
    ("overrides", "gpu", "said"),
    [
        (ADAPTED, "h200", 'graph       train.graph = "auto": 3 eager steps, then forward and backward are CUDA graphs'),
        ([*ADAPTED, "train.graph=false"], "h200", None),
        (["fp8.enabled=true"], "h200", None),
        (
            [*ADAPTED, "train.offload=true"],
            "h200",
            'graph       train.graph = "auto": steps are eager: train.offload = true cop',
        ),
        (
            [*ADAPTED, *DOCUMENTS],
            "h200",
            "steps are eager: attention of packed documents may take longer in a graph. Set train.gra",
        ),
        (
            [*ADAPTED, "data.packing=documents", GRAPH],
            "h200",
            "; attention of the documents runs in plain PyTorch, slowly: kernels",
        ),
        ([*ADAPTED, *DOCUMENTS, GRAPH], "h200", "graph       train.graph: 3 eager steps"),
        (ADAPTED, None, None),
    ],
)
def test_adapters_on_a_gpu_are_recorded_by_default_and_a_dry_run_says_so(overrides, gpu, said, tiny_run, capsys):
    target = ["--gpu", gpu] if gpu else []
    assert main(["train", str(tiny_run().file), *overrides, "--dry-run", *target]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert ("graph train.graph" in out) is (said is not None)
    assert said is None or " ".join(said.split()) in out


def test_a_dry_run_of_data_that_nobody_has_read_says_what_conversations_would_change(tiny_run, tmp_path, capsys):
    said = "in addition to the optimizer's; of conversations, which are packed documents, steps would be eager"
    (tmp_path / "chats.jsonl").write_text('{"messages": []}\n')
    run = tiny_run()
    for given, expected in (([], True), (["data.packing=join"], False), (["data.format=text"], False), ([GRAPH], False)):
        source = f"data.source={tmp_path / 'chats.jsonl'}"
        assert main(["train", str(run.file), *ADAPTED, source, *given, "--dry-run", "--gpu", "h200"]) == 0
        assert (said in " ".join(capsys.readouterr().out.split())) is expected


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([*DOCUMENTS, GRAPH], "PyTorch's FlashAttention-2, all documents of a recorded step in one call"),
        ([*DOCUMENTS, GRAPH, "train.deterministic=true"], "plain PyTorch, all documents of a recorded step in one call"),
        (["data.packing=documents", GRAPH], "plain PyTorch, all documents of a recorded step in one call"),
        (DOCUMENTS, "cuDNN's kernel through scaled_dot_product_attention, document by document"),  # "auto" leaves them eager
        (["model.config.head_dim=64", GRAPH], "cuDNN's kernel through scaled_dot_product_attention, document by document"),
    ],
)
def test_a_description_names_the_kernel_of_documents_in_recorded_steps(overrides, said, tiny_run, capsys):
    given = [*ADAPTED, *overrides]
    assert main(["describe", str(tiny_run().file), *given, "--gpu", "h200"]) == 0
    assert f"attention: {said}\n" in capsys.readouterr().out


def test_a_step_that_auto_does_not_repeat_is_eager(tiny_run, capsys):
    config = RunConfig.from_file(tiny_run().file, [*ADAPTED, GRAPH])
    context, _ = build(check(config), prepare(config.data))
    context.graph._required = False
    train_step(context, 1)
    handle = context.model.layers[0].register_forward_hook(lambda *_: None)
    train_step(context, 2)
    train_step(context, 3)
    handle.remove()
    said = 'train.graph = "auto": layers.0 has a hook, which a replayed graph ignores: steps are eager, and slower'
    assert capsys.readouterr().err.count(said) == 1
    assert context.graph.can_replay()


def test_changes_that_no_replay_would_heed_are_refused(tiny_run):
    config = RunConfig.from_file(tiny_run().file, [GRAPH])
    context, _ = build(check(config), prepare(config.data))
    train_step(context, 1)
    handle = context.model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(InputError, match=r"layers\.0 has a hook, which a replayed graph ignores\. Remove it, or"):
        train_step(context, 2)
    handle.remove()
    context.model.layers[1].eval()
    with pytest.raises(InputError, match=r"layers\.1 was in training mode and is in evaluation mode, .*\. Put it back, or"):
        train_step(context, 2)
    context.model.train()
    train_step(context, 2)
    name, parameter = next(iter(context.model.named_parameters()))
    parameter.requires_grad_(False)
    with pytest.raises(InputError, match=rf"{name} was trained and no longer is, .*\. Put it back, or"):
        train_step(context, 3)
    handle = parameter.requires_grad_(True).register_hook(lambda grad: grad)
    with pytest.raises(InputError, match=rf"{name} has a hook, .*\. Remove it, or"):
        train_step(context, 3)
    handle.remove()
    context.model.layers[0].forward = context.model.layers[0].forward
    with pytest.raises(InputError, match=r"the forward of layers\.0 was replaced, .*\. Put it back, or"):
        train_step(context, 3)

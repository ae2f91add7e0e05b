"""The vision workload at a small size: its counts, and that a model with other blocks is timm's, gradients included."""

import math

import pytest
import torch
import torch.distributed as dist

import ranks
from benchmarks.cases import CASES, VISION_CASES
from benchmarks.measure import Measurement, Target
from benchmarks.peers import ENTRIES, Training
from benchmarks.records import best_peer, row
from benchmarks.run import run_suite
from benchmarks.suites import SUITES
from benchmarks.vision.models import Classifier
from benchmarks.vision.replicas import REPLICAS
from benchmarks.worker import labelled_batches
from octavo.errors import InputError
from octavo.hardware import Device, lookup

CPU = torch.device("cpu")
TINY, HUGE = VISION_CASES["tiny-vit"], VISION_CASES["vit-huge"]
ONE_H200 = Target(Device("NVIDIA H200", lookup("NVIDIA H200"), (9, 0), 139.8, "cuda"), "cuda:0")


@pytest.fixture(scope="module")
def timm():
    """timm, where it is installed."""
    return pytest.importorskip("timm", exc_type=ImportError)


def test_vit_huge_is_counted():
    assert HUGE.sequence_length == 257
    assert HUGE.parameters == 632_045_800  # timm's vit_huge_patch14_224
    flops = HUGE.flops()
    assert flops.layers == 6 * 32 * 12 * 1280**2 * 257
    assert flops.attention == 12 * 32 * 1280 * 257 * 257
    assert flops.head == 0
    measured = Measurement(ENTRIES["octavo-delayed"])
    measured.take([{"seconds": [0.2, 0.2], "loss": 6.9, "peak_gib": 30.0}])
    figures = row(HUGE, measured, ONE_H200)
    assert figures["images_per_second"] == pytest.approx(640)
    assert "tokens_per_second" not in figures
    assert figures["tflops"] == pytest.approx(640 * flops.total / 1e12)
    assert (figures["batch"], figures["image_size"], figures["sequence_length"]) == (128, 224, 257)
    slower = row(HUGE, Measurement(ENTRIES["te-delayed"], seconds=[0.3], loss=6.9), ONE_H200)
    slowest = row(HUGE, Measurement(ENTRIES["torch-bf16"], seconds=[0.4], loss=6.9), ONE_H200)
    assert best_peer([figures, slowest, slower])["entry"] == "te-delayed"


def test_every_entry_sees_the_same_images():
    first, second = labelled_batches(TINY, CPU), labelled_batches(TINY, CPU)
    assert all(torch.equal(a, b) for one, other in zip(first, second, strict=True) for a, b in zip(one, other, strict=True))
    images, labels = first[0]
    assert (images.shape, labels.shape) == ((2, 3, 32, 32), (2,))
    assert 0 <= min(int(labels.min()) for _, labels in first) <= max(int(labels.max()) for _, labels in first) < TINY.classes
    assert all(torch.equal(tokens, labels) for tokens, labels in labelled_batches(CASES["tiny"], CPU))


def gradients(name):
    trainer = ENTRIES[name].build(TINY, CPU, False)
    images, labels = labelled_batches(TINY, CPU)[0]
    with trainer.around():
        loss = trainer.loss(images, labels)
    loss.backward()
    return loss.item(), trainer.model


def test_octavos_model_is_timms(timm):
    expected, theirs = gradients("torch-bf16")
    loss, ours = gradients("octavo-bf16")
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in ours.parameters()) == TINY.parameters
    assert all(p.dtype == torch.float32 for p in ours.parameters())
    assert loss == pytest.approx(expected, rel=5e-3)
    for mine, reference in (
        (ours.patch_embed.proj.weight, theirs.patch_embed.proj.weight),
        (ours.blocks[0].self_attention.proj.weight, theirs.blocks[0].attn.proj.weight),
        (ours.blocks[1].layernorm_mlp.fc1_weight, theirs.blocks[1].mlp.fc1.weight),
        (ours.norm.weight, theirs.norm.weight),
    ):
        assert torch.equal(mine, reference)
        assert (mine.grad - reference.grad).norm() <= 0.03 * reference.grad.norm()


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if entry.vision and name.startswith("octavo-")])
def test_octavos_entries_train(timm, name):
    trainer = ENTRIES[name].build(TINY, CPU, False)
    images, labels = labelled_batches(TINY, CPU)[0]
    losses = [float(trainer.step(images, labels)) for _ in range(8)]
    assert abs(losses[0] - math.log(TINY.classes)) < 1.0
    assert losses[-1] < losses[0]
    assert isinstance(trainer.optimizer, torch.optim.SGD)


def test_a_run_of_images_is_measured(timm, tmp_path, with_torchvision):
    results = run_suite(
        "one-gpu", cases=["tiny-vit"], entries=["octavo-delayed", "octavo-delayed-fp8-head", "torch-bf16"], steps=2, warmup=1,
        output=tmp_path, device="cpu", command="python -m benchmarks",
    )  # fmt: skip
    assert [figures["entry"] for figures in results["rows"]] == ["octavo-delayed", "torch-bf16"]
    for figures in results["rows"]:
        assert "error" not in figures, figures
        assert figures["images_per_second"] == pytest.approx(2 / (figures["step_ms"] / 1e3))
    assert results["machine"]["peers"]["timm"]
    assert (tmp_path / "one-gpu-tiny-vit.json").is_file()


def test_the_suite_of_replicas():
    suite = SUITES["vision"]
    theirs = ["torch-bf16", "te-bf16", "te-delayed", "te-delayed-flash-attention", "te-delayed-block"]
    assert list(suite.entries) == ["octavo-delayed", "octavo-bf16", *theirs]
    assert suite.cases == ("vit-huge-patch16", "vit-huge-patch16-b64", "vit-huge")
    assert all(case in VISION_CASES for case in (*suite.cases, suite.tiny))
    for name, entry in suite.entries.items():
        same = ("name", "layers", "head", "package", "vision", "group")
        assert all(getattr(entry, key) == getattr(ENTRIES[name], key) for key in same)
        assert entry.build.keywords["build"] is ENTRIES[name].build
    block = ENTRIES["te-delayed-block"]
    assert (block.trains(TINY), block.trains(CASES["tiny"])) == (True, False)


def replicated(graph):
    """Gradients, weights and images of a rank after a step of a small classifier, whose first weights differ by rank."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, TINY.classes))
    training = Training(model, Classifier(model), optimizer=torch.optim.SGD(model.parameters(), lr=0.1), graph=graph)
    training.replicate(dist.group.WORLD)
    images, labels = labelled_batches(TINY, CPU, rank)[0]
    training.gradients(images, labels)
    gradient = model[1].weight.grad.clone()
    training.optimizer.zero_grad()
    training.step(images, labels)
    return gradient, model[1].weight.detach(), images, labels


@pytest.mark.parametrize("graph", [True, False])
def test_a_training_with_replicas_averages_gradients(graph):
    """They are those of one rank with the images of all; both ways, DistributedDataParallel's too."""
    found = ranks.run(2, replicated, graph)
    (gradient, weight, *_), (other, other_weight, *_) = found
    assert torch.equal(gradient, other)
    assert torch.equal(weight, other_weight)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, TINY.classes))
    images, labels = (torch.cat([rank[part] for rank in found]) for part in (2, 3))
    assert not torch.equal(*images.chunk(2))
    Classifier(model)(images, labels).backward()
    torch.testing.assert_close(gradient, model[1].weight.grad)
    torch.testing.assert_close(weight, model[1].weight.detach() - 0.1 * model[1].weight.grad)


@pytest.mark.parametrize("count", [1, 2])
def test_the_suite_runs_on_a_cpu(timm, tmp_path, with_torchvision, count):
    names = ["octavo-delayed", "torch-bf16"]
    results = run_suite(
        "vision",
        entries=names,
        steps=2,
        warmup=1,
        output=tmp_path,
        device="cpu",
        gpus=count,
        command="python -m benchmarks vision",
    )
    assert [figures["entry"] for figures in results["rows"]] == names
    for figures in results["rows"]:
        assert "error" not in figures, figures
        assert (figures["workload"], figures["gpus"]) == ("tiny-vit", count)
        assert figures["images_per_second"] == pytest.approx(2 / (figures["step_ms"] / 1e3))
        assert figures["images_per_second_total"] == pytest.approx(count * figures["images_per_second"])
    assert [price["gpu"] for price in results["prices"]] == ["A100 40GB", "H100 SXM"]
    assert {path.name for path in tmp_path.glob("vision*")} == {"vision-tiny-vit.json", "vision-tiny-vit.png"}
    if count == 1:  # one to warm up, two timed, one untimed between the turns
        trainer, batches = REPLICAS["octavo-delayed"].build(TINY, CPU, False), labelled_batches(TINY, CPU)
        losses = [trainer.step(*batches[i % 4]).item() for i in range(4)]
        assert results["rows"][0]["loss"] == losses[-1]
    else:  # one replica alone would give the loss of other weights
        ours, theirs = (figures["loss"] for figures in results["rows"])
        assert ours == pytest.approx(theirs, rel=5e-3)


def test_without_timm_the_suite_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.run._is_missing", lambda package: package == "timm")
    for cases in (None, ["vit-huge"]):
        with pytest.raises(InputError, match=r"timm is not installed\. Install it by pip install 'octavo\[bench\]'"):
            run_suite("vision", cases=cases, device="cpu", output=tmp_path / "out", command="python -m benchmarks vision")
    assert not (tmp_path / "out").exists()

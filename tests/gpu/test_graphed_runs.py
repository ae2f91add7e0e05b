"""`train.graph` on a GPU: recorded runs are the eager ones to the bit, continued or not; of documents up to rounding.

Attention of documents is one call in a recording and, without FlashAttention-4, several in an eager step;
`test_graphed_documents.py` compares recorded steps with eager ones of the same call.
"""

import graph_runs
import pytest
import torch

from octavo.cli import main
from octavo.parallel.graphed import Graphed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture
def recordings(monkeypatch):
    """The graphs that were recorded, in order."""
    found, record = [], Graphed._record

    def noted(self, inputs):
        found.append(self)
        return record(self, inputs)

    monkeypatch.setattr(Graphed, "_record", noted)
    return found


DOCUMENTS = "adapters of documents"


@pytest.mark.parametrize("name", [name for name in graph_runs.RUNS if name != DOCUMENTS])
def test_a_recorded_run_is_the_eager_one_to_the_bit_and_continues_so(name, tiny_run, recordings):
    eager = graph_runs.trained(tiny_run("eager", steps=12, every=7), name, graph=False, deterministic=True)
    assert not recordings
    graph = graph_runs.trained(tiny_run("graph", steps=12, every=7), name, graph=True, deterministic=True)
    each = 1 if name == "one micro-batch" else 2
    assert len(recordings) == len(set(recordings)) == 2 * each  # from the beginning, and from step 8 on
    assert graph == eager


def test_a_recorded_run_of_documents_is_the_eager_one_up_to_rounding_and_continues_to_the_bit(tiny_run, recordings):
    eager, _ = graph_runs.trained(tiny_run("eager", steps=12, every=7), DOCUMENTS, graph=False, deterministic=True)
    assert not recordings
    graph, _ = graph_runs.trained(tiny_run("graph", steps=12, every=7), DOCUMENTS, graph=True, deterministic=True)
    assert len(recordings) == 4
    for found, wanted in zip(graph, eager, strict=True):
        assert list(map(float.fromhex, found)) == pytest.approx(list(map(float.fromhex, wanted)), rel=0.03)


def test_packed_documents_are_recorded_where_asked(tiny_run, recordings, capsys):
    losses = []
    for name, switch in (("auto", []), ("graph", ["train.graph=true"])):
        run = tiny_run(name, steps=12)
        # Heads that a kernel of documents takes.
        overrides = [*graph_runs.RUNS[DOCUMENTS], "model.config.head_dim=64", *switch]
        assert main(["train", str(run.file), *overrides]) == 0
        losses.append([float.fromhex(record[1]) for record in graph_runs.curve(run)])
        assert ("train.graph: 3 eager steps" in capsys.readouterr().out) is bool(switch)
        assert bool(recordings) is bool(switch)
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_a_recorded_run_ends_at_a_loss_that_is_not_finite(tiny_run, recordings, capsys):
    run = tiny_run(steps=12)
    command = ["train", str(run.file), "fp8.enabled=true", "train.graph=true", "optimizer.lr=1e30", "optimizer.clip=0"]
    assert main([*command, "optimizer.warmup_steps=6"]) == 1
    assert "not finite" in capsys.readouterr().err


def test_parameters_with_other_memory_are_recorded_anew(recordings):
    def trained(moves):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)).cuda()
        step = Graphed(lambda x: model(x).square().mean(), list(model.parameters()), 3 if moves else 100, None)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for number in range(9):
            if moves and number == 6:
                model[0].weight.data = model[0].weight.data.clone()
            losses.append(step(torch.full((4, 8), 0.1 * number, device="cuda")).item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    assert trained(True) == trained(False)
    assert len(recordings) == 2

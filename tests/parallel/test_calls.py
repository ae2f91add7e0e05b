"""A rank that is alone in a call of every rank is told, and one that is only slow is waited for."""

import re
import time

import pytest
import torch
import torch.distributed as dist

import octavo
import ranks
from octavo.errors import OctavoError
from octavo.parallel import calls
from octavo.process import process


def quick(**seconds):
    """Shorter waits than a user's; those of the thread are read at its next turn."""
    for name, value in {"_LOOK_SECONDS": 0.05, "_ASK_SECONDS": 0.1, "_ANSWER_SECONDS": 0.1, **seconds}.items():
        setattr(calls, name, value)
    calls.begin()


def raised(function, *arguments):
    """The exception of a call, as (its class, its text)."""
    try:
        function(*arguments)
    except OctavoError as error:
        return type(error).__name__, str(error)
    return None


def model_and_path(folder):
    octavo.init()
    torch.manual_seed(0)
    return octavo.transform(torch.nn.Linear(16, 16)), f"{folder}/x"


def alone_while_others_leave(folder):
    quick()
    model, path = model_and_path(folder)
    if dist.get_rank() == 0:
        return raised(octavo.save, path, model)
    octavo.shutdown()
    return None


def test_a_rank_alone_is_told_that_the_others_have_left(tmp_path):
    (kind, said), *others = ranks.run(3, alone_while_others_leave, str(tmp_path))
    assert kind == "InputError"
    assert re.fullmatch(
        r"octavo\.save: rank 0 has called it, and ranks 1, 2 have not within \d+ s \(.*rank [12]: octavo\.shutdown was called "
        r"there.*\)\. octavo\.save is called by every rank: take it out of an `if rank == 0`\.",
        said,
    )
    assert others == [None, None]
    assert list(tmp_path.iterdir()) == []


def different_calls_then_the_same(folder):
    quick()
    model, path = model_and_path(folder)
    octavo.save(path, model)
    first = raised(octavo.load if dist.get_rank() == 1 else octavo.save, path, model)
    octavo.load(path, model)
    return first, raised(octavo.save, path, model)


def test_different_calls_are_refused_alike_on_every_rank_and_the_next_works(tmp_path):
    found = ranks.run(3, different_calls_then_the_same, str(tmp_path))
    assert len({said.partition(": ")[2] for (_, said), _ in found}) == 1
    for (kind, said), after in found:
        assert kind == "InputError"
        assert re.search(
            r"octavo\.(save|load): rank \d calls octavo\.(save|load), and rank \d calls octavo\.(save|load)\.", said
        )
        assert after is None


def alone_while_others_are_blocked(folder, call):
    quick(_BLOCKED_SECONDS=0.5)
    model, path = model_and_path(folder)
    if dist.get_rank() == 0:
        given = {"save": (path, model), "load": (path, model), "export": (model, path), "transform": (torch.nn.Linear(16, 16),)}
        return raised(getattr(octavo, call), *given[call])
    try:
        dist.barrier(octavo.state.control)
    except RuntimeError:  # rank 0 has ended
        return "blocked"
    return "met"


@pytest.mark.parametrize("call", ["save", "load", "export", "transform"])
def test_a_rank_alone_is_told_that_the_others_wait_for_it_elsewhere(tmp_path, call):
    (kind, said), *_ = ranks.run(3, alone_while_others_are_blocked, str(tmp_path), call)
    assert kind == "InputError"
    assert f"octavo.{call}: rank 0 has called it, and ranks 1, 2 have not within" in said
    assert "rank 1 is at test_calls.py:" in said
    assert "in alone_while_others_are_blocked, blocked for" in said
    assert f"octavo.{call} is called by every rank: take it out of an `if rank == 0`." in said


def alone_while_one_gathers_a_weight(folder):
    quick(_BLOCKED_SECONDS=0.5)
    model, path = model_and_path(folder)
    said = raised(octavo.save, path, model) if dist.get_rank() == 0 else None
    with torch.no_grad():
        model.weight.full_tensor()
    return said


def test_a_gathered_weight_is_a_collective_too(tmp_path):
    """PyTorch waits for it in a custom operator, some frames further in."""
    kind, said = ranks.run(2, alone_while_one_gathers_a_weight, str(tmp_path))[0]
    assert kind == "InputError"
    assert "rank 1 is at test_calls.py:" in said
    assert "in alone_while_one_gathers_a_weight, blocked for" in said


def another_path_on_each_rank(folder):
    quick()
    model, path = model_and_path(folder)
    refused = raised(octavo.save, f"{path}{dist.get_rank()}", model)
    octavo.save(path, model)
    return refused, raised(octavo.load, f"{path}{dist.get_rank() or ''}", model)


def test_another_path_on_each_rank_is_refused(tmp_path):
    for refusals in ranks.run(2, another_path_on_each_rank, str(tmp_path)):
        for call, (kind, said) in zip(("save", "load"), refusals, strict=True):
            assert kind == "InputError"
            assert re.search(rf"octavo\.{call}: path is '.*/x1' on rank 1 and '.*/x0?' on rank 0, .* the same path", said)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def slow(folder):
    quick(_BLOCKED_SECONDS=0.3, _WARN_SECONDS=0.5)
    model, path = model_and_path(folder)
    said = warnings()
    if dist.get_rank() == 1:
        wait_until_said(2)
    octavo.save(path, model)
    octavo.load(path, model)
    return said


def warnings():
    """The warnings of this rank's calls, as they come; the other ranks learn that there is one."""
    said, store = [], process.calls.store

    def warn(message):
        said.append(message)
        store.add("said", 1)

    calls.warn = warn
    return said


def wait_until_said(ranks=1):
    """Compute until so many other ranks have warned."""
    while process.calls.store.add("said", 0) < ranks:
        time.sleep(0.05)


def test_a_slow_rank_is_waited_for_and_named(tmp_path):
    said = ranks.run(3, slow, str(tmp_path))
    assert said[1] == []
    for rank in (0, 2):
        (text,) = said[rank]
        assert f"octavo.save: rank {rank} has called it, and rank 1 has not within" in text
        assert f"Rank {rank} waits on." in text


def too_slow(folder):
    quick()
    model, path = model_and_path(folder)
    process.patience = 0.5
    if dist.get_rank() == 1:
        while not process.calls.store.check(["1/verdict"]):  # 0 is of octavo.transform
            time.sleep(0.05)
    return raised(octavo.save, path, model)


def test_the_longest_wait_ends_on_every_rank(tmp_path):
    for kind, said in ranks.run(2, too_slow, str(tmp_path)):
        assert kind == "InputError"
        assert "octavo.save: rank 0 has called it, and rank 1 has not within" in said


def clipping(folder):
    """A step's call asks nothing of the store."""
    quick()
    model, _ = model_and_path(folder)
    meetings = process.calls
    meetings._ended.set()
    meetings._thread.join()
    meetings.store = None
    model(torch.rand(16, 16, requires_grad=True, dtype=torch.bfloat16)).float().sum().backward()
    octavo.clip_grad_norm_(model, 1.0)
    return model.weight.grad is not None


def test_a_steps_call_has_no_meeting():
    assert ranks.run(2, clipping, "") == [True, True]


def noting():
    quick()
    with calls.noted("octavo.clip_grad_norm_"):
        pass
    lost = r"octavo\.clip_grad_norm_: rank \d of 2 lost the others: Gloo: closed\. octavo"
    with pytest.raises(OctavoError, match=lost), calls.noted("octavo.clip_grad_norm_"):
        raise RuntimeError("Gloo: closed\nmore")
    with pytest.raises(RuntimeError, match=r"^a shape$"), calls.noted("octavo.clip_grad_norm_"):
        raise RuntimeError("a shape")


def test_errors_of_a_process_group_in_a_step_name_the_call():
    ranks.run(2, noting)


def long_call():
    quick(_WARN_SECONDS=0.3)
    said = warnings()
    if dist.get_rank() == 0:
        with calls.noted("octavo.clip_grad_norm_"):
            dist.barrier()
    else:
        wait_until_said()
        dist.barrier()
    return said


def test_a_call_of_a_step_that_lasts_is_said():
    said, nothing = ranks.run(2, long_call)
    assert nothing == []
    assert re.search(r"octavo\.clip_grad_norm_: rank 0 is in it for \d+ s, and rank 1 has not", said[0])


def test_one_rank_has_no_meetings():
    with calls.together("octavo.save"), calls.noted("octavo.clip_grad_norm_"):
        assert process.calls is None

"""Run by two ranks: checkpoints that PyTorch 2.5.1 wrote on two ranks, read by a script of SMP's."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

import octavo
import octavo.compat.smp

FILES = Path(__file__).parents[1] / "fixtures" / "torch_2_5"


def read(folder):
    """For each kind: the weights are those written, from a file a rank and from a folder; the rest of the file too."""
    octavo.compat.smp.install()
    import torch.sagemaker as tsm
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType
    from torch.sagemaker.distributed.checkpoint.state_dict_loader import load

    tsm.init()
    rank, written = tsm.state.rank, torch.load(FILES / "whole.pt")
    found = {}
    for name, kind in (("local", StateDictType.LOCAL_STATE_DICT), ("sharded", StateDictType.SHARDED_STATE_DICT)):
        for way in ("file", "folder"):
            torch.manual_seed(1 + rank)
            model = FSDP(nn.Linear(5, 3), device_id=torch.device("cpu"))
            before = _whole(model)
            with FSDP.state_dict_type(model, kind):
                if way == "file":
                    state = torch.load(FILES / f"{name}_{rank}.pt")
                else:
                    state = {"model": model.state_dict(), "total_steps": 0}
                    load(state, checkpoint_id=str(FILES / name))
                model.load_state_dict(state["model"])
            after = _whole(model)
            found[name, way] = (
                not any(torch.equal(before[key], written["whole"][key]) for key in before),
                all(torch.equal(after[key], written["whole"][key]) for key in after),
                state["total_steps"] == 3,
            )
        state = torch.load(FILES / f"{name}_{rank}.pt")
        python, numpy, own = state["rng_states"]
        np.random.set_state(numpy)
        torch.set_rng_state(own)
        found[name, "rest"] = (
            state["num_params"] == 15,
            len(python[1]) == 625,
            rank > 0 or np.random.get_state()[1][:4].tolist() == written["next"],
        )
    octavo.shutdown()
    octavo.compat.smp.uninstall()
    return found


def _whole(model):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType

    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return {name: value.clone() for name, value in model.state_dict().items()}

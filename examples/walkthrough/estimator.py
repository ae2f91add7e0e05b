"""Steps 2 to 4 of the walk-through with the estimator: python examples/walkthrough/estimator.py [--context 1] [--fp8].

Without an option it is the call of the walk-through: degrees 8 and 8 on 8 GPUs, or on 8 ranks of this machine's CPU. Two GPUs
take `--context 2 --shard 2`.
"""

import argparse
import sys
from pathlib import Path

from octavo.errors import OctavoError
from octavo.launch import PyTorch

HERE = Path(__file__).resolve().parent
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--context", type=int, default=8, help="context_parallel_degree; 1 for step 2")
parser.add_argument("--shard", type=int, default=8, help="hybrid_shard_degree")
parser.add_argument("--fp8", action="store_true", help="step 4")
parser.add_argument("--instance", default="ml.p5.48xlarge")
parser.add_argument("--model", default=str(HERE / "tiny"), help="a folder with config.json")
parser.add_argument("--length", type=int, default=16384, help="tokens of a chunk, as octavo prepare wrote them")
parser.add_argument("--vocabulary", type=int, default=4096)
parser.add_argument("--batch", type=int, default=1)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--lr", type=float, default=3e-3, help="learning rate; 1e-4 for 8B")
parser.add_argument("--checkpointing", type=int, default=1, help="activation_checkpointing")
parser.add_argument("--channels", default="channels", help="the folder of octavo prepare --channels")
parser.add_argument("--name", help="name of the job")
options = parser.parse_args()

hyperparameters = {
    "activation_checkpointing": options.checkpointing,
    "auto_wrap_policy": "transformer_auto_wrap_policy",
    "train_batch_size": options.batch,
    "val_batch_size": 1,
    "max_context_width": options.length,
    "bf16": 1,
    "fp8": int(options.fp8),
    "use_smp_implementation": 1,
    "distributed_backend": "nccl",
    "vocab_size": options.vocabulary,
    "hf_pretrained_model_name_or_dir": str(Path(options.model).resolve()),
    "max_steps": options.steps,
    "lr": options.lr,
}
channels = {name: str(Path(options.channels, name)) for name in ("train", "test")}

try:
    estimator = PyTorch(
        entry_point="train.py",
        source_dir=str(HERE),
        hyperparameters=hyperparameters,
        instance_type=options.instance,
        instance_count=1,
        distribution={
            "torch_distributed": {"enabled": True},
            "smdistributed": {
                "modelparallel": {
                    "enabled": True,
                    "parameters": {
                        "context_parallel_degree": options.context,
                        "hybrid_shard_degree": options.shard,
                        "delayed_parameter_initialization": True,
                    },
                }
            },
        },
    )
    estimator.fit(inputs=channels, job_name=options.name)
except OctavoError as error:
    print(f"octavo: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
print(f"The model folder is {estimator.model_data}.")

"""One rank of a job. Prints the numbers that it read in each epoch, and the error when it begins another epoch than the
other ranks, as one line of JSON. Arguments: rank, ranks, port, cache.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from cachetool.core.errors import UsageError
from cachetool.loaders.torch import Loader


def main(rank: int, world_size: int, port: str, root: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    epochs = []
    with Loader(root, batch_size=4, fields=["number"], workers=1) as loader:
        for _ in range(3):
            epoch = []
            batches = iter(loader)
            for batch in batches:
                assert len(loader) - len(batches) == len(epoch) + 1, (len(loader), len(batches))  # type: ignore[arg-type]
                epoch.append(batch["number"].tolist())
                torch.distributed.barrier()  # as the gradients of a training step do
            epochs.append(epoch)
        for _ in loader:
            break  # all ranks; the next epoch is common to all again
        epochs.append([batch["number"].tolist() for batch in loader])
        apart = ""
        if rank == 0:
            loader.epoch += 3
        try:
            iter(loader)
        except UsageError as error:
            apart = str(error)
    print(json.dumps([*epochs, apart]))
    torch.distributed.destroy_process_group()


main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])

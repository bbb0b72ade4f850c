"""Growth and resume in Composer's Trainer (mosaicml).

::

    with Loader("data/cache", batch_size=64, fields=["volume", "label"]) as loader:      # cachetool.loaders.torch
        trainer = Trainer(model=model, train_dataloader=loader, callbacks=[GrowthCallback(loader)],
                          max_duration="90ep", save_folder="run", autoresume=True, run_name="first")
        trainer.fit()

Composer asks a loader for its length once and takes so many batches of every epoch, so a cache that grows would be
trained in part. It resumes by reading and dropping what was trained before, which are other samples once the cache
changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cachetool.loaders.fixed_epochs import FixedEpochs, require_one_epoch
from cachetool.loaders.loader import BaseLoader
from cachetool.loaders.snapshots.resume import taken
from cachetool.loaders.torch import Loader

try:
    from composer import Callback
except ModuleNotFoundError as error:
    if error.name != "composer":
        raise
    raise ModuleNotFoundError("this needs composer: pip install mosaicml", name="composer") from None

__all__ = ["GrowthCallback"]


class GrowthCallback(Callback):  # type: ignore[misc]
    """Lets Composer train every epoch whole while the cache grows, and keeps the loader's state in its checkpoints.

    ::

        Trainer(model=model, train_dataloader=loader, callbacks=[GrowthCallback(loader)], max_duration="90ep", ...)

    ``loader`` is the loader for training, as it is or in a ``DataSpec``; or its view ``loader.epochs_of(steps=N)``,
    with which learning-rate schedules in epochs are right as well. A checkpoint is then resumed without
    reading what was trained before, whatever ``spin_dataloaders=`` says. ``train_subset_num_batches=`` has no effect:
    give the loader ``steps=``. An evaluation asks for its length anew by itself. Raises :class:`UsageError` for what is
    no loader.
    """

    def __init__(self, loader: Loader | FixedEpochs[dict[str, Any]]) -> None:
        super().__init__()
        require_one_epoch(loader)
        self._loader = loader
        self._begun: Iterator[dict[str, Any]] | None = None
        self._follows = False
        """True if the loader stands where the trainer does: not with a checkpoint that was made without a callback."""

    def fit_start(self, state: Any, logger: Any) -> None:
        """Let an epoch that a checkpoint, or an earlier ``fit``, was left in go on behind its last batch."""
        if self._follows:
            state.dataset_resumption["train"] = True  # else Composer reads up to its place in the epoch
            if int(state.timestamp.batch_in_epoch):  # it then calls no epoch_start
                where = self._loader.state_dict()
                self._loader.load_state_dict(where)  # of an epoch that was left here the rest, not the next one
                if not taken(where):
                    state.dataloader_len = 0  # behind its last batch: nothing is left of the epoch
                    return
        self._begin(state)

    def epoch_start(self, state: Any, logger: Any) -> None:
        """Begin the epoch, and let Composer ask for its length."""
        self._begin(state)

    def batch_end(self, state: Any, logger: Any) -> None:
        """Give back the iterator that was begun; the trainer has its own one by now."""
        self._begun, self._follows = None, True

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state, for the checkpoint."""
        return {"loader": self._loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let training go on where the checkpoint was made."""
        self._loader.load_state_dict(state["loader"])
        self._follows = True

    def _begin(self, state: Any) -> None:
        if isinstance(self._loader, BaseLoader):
            self._begun = self._loader.begin()  # kept, because the length is that of an epoch somebody iterates
        state.dataloader_len = -1  # reads it

"""Growth and resume in Composer's Trainer (mosaicml).

::

    with Loader("data/cache", batch_size=64, fields=["volume", "label"]) as loader:      # cachetool.loaders.torch
        trainer = Trainer(model=model, train_dataloader=loader, callbacks=[GrowthCallback(loader)],
                          max_duration="90ep", save_folder="run", autoresume=True, run_name="first")
        trainer.fit()

Composer asks a loader for its length once and takes that many batches of every epoch, so it would train only a part of
a growing cache. To resume, it reads the batches that were trained before and drops them; once the cache has changed,
these are other samples.
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
    # The package that provides the module composer is called mosaicml, so the message must name both.
    raise ModuleNotFoundError("this needs composer: pip install mosaicml", name="composer") from None

__all__ = ["GrowthCallback"]


class GrowthCallback(Callback):  # type: ignore[misc]
    """A callback of Composer's Trainer that trains every epoch whole while the cache grows.

    The callback begins each epoch, lets Composer ask for its length, and keeps the state of the loader in the
    checkpoints. A checkpoint is resumed without reading what was trained before, whatever ``spin_dataloaders`` says.
    ``train_subset_num_batches`` has no effect: give the loader ``steps``.

    Args:
        loader: The training loader, as it is or in a ``DataSpec``: :class:`cachetool.loaders.torch.Loader` or its
            ``epochs_of(steps=N)``. With the latter, learning-rate schedules in epochs are right as well.

    Raises:
        UsageError: ``loader`` is not a loader, or has ``concurrent=True``.

    Example:
        >>> from composer import Trainer
        >>> from cachetool.loaders.composer import GrowthCallback
        >>> from cachetool.loaders.torch import Loader
        >>> with Loader("data/cache", batch_size=8, fields=["volume", "label"]) as loader:
        ...     callbacks = [GrowthCallback(loader)]
        ...     Trainer(model=model, train_dataloader=loader, callbacks=callbacks, max_duration="2ep").fit()
    """

    def __init__(self, loader: Loader | FixedEpochs[dict[str, Any]]) -> None:
        super().__init__()
        require_one_epoch(loader)
        self._loader = loader
        self._begun: Iterator[dict[str, Any]] | None = None
        self._follows = False
        """True if the loader is at the trainer's position; False after a checkpoint that was saved without this
        callback was loaded."""

    def fit_start(self, state: Any, logger: Any) -> None:
        """Let an epoch that a checkpoint or an earlier ``fit`` left continue after its last batch; Composer calls this
        method.

        Args:
            state: The state of the Trainer.
            logger: The logger of the Trainer; not used.
        """
        if self._follows:
            # Otherwise Composer would read and drop the batches up to its position in the epoch.
            state.dataset_resumption["train"] = True
            # In the middle of an epoch Composer does not call epoch_start(), so the epoch is begun here.
            if int(state.timestamp.batch_in_epoch):
                # The epoch may have been left in this process. With its state loaded, the loader yields the rest of
                # that epoch instead of the next one.
                where = self._loader.state_dict()
                self._loader.load_state_dict(where)
                # The position is after the last batch, so nothing is left of the epoch. Composer ends it at once.
                if not taken(where):
                    state.dataloader_len = 0
                    return
        self._begin(state)

    def epoch_start(self, state: Any, logger: Any) -> None:
        """Begin the epoch, and let Composer ask for its length; Composer calls this method.

        Args:
            state: The state of the Trainer.
            logger: The logger of the Trainer; not used.
        """
        self._begin(state)

    def batch_end(self, state: Any, logger: Any) -> None:
        """Release the iterator that this callback began, because the Trainer has its own now; Composer calls this
        method.

        Args:
            state: The state of the Trainer; not used.
            logger: The logger of the Trainer; not used.
        """
        self._begun, self._follows = None, True

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader, for the checkpoint.

        Returns:
            A dict of plain values.

        Raises:
            UsageError: The loader has no state; see ``Loader.state_dict()``.
        """
        return {"loader": self._loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let training continue where the checkpoint was made.

        Args:
            state: A dict from :meth:`state_dict`.

        Raises:
            UsageError: ``Loader.load_state_dict()`` refuses the state.
        """
        self._loader.load_state_dict(state["loader"])
        self._follows = True

    def _begin(self, state: Any) -> None:
        if isinstance(self._loader, BaseLoader):
            # The iterator is kept, because len() is the length of this epoch only while its iterator exists.
            self._begun = self._loader.begin()
        # The setter of Composer asks the loader for its length if it is given a negative one.
        state.dataloader_len = -1

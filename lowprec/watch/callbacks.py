"""Watch in two frameworks, a few lines each; see watch.py. Each framework is imported when it is asked for.

    Trainer(model, args, callbacks=[transformers_watch()])            # transformers
    lightning.Trainer(callbacks=[lightning_watch()])                  # Lightning

The verdict is printed when training ends. The callback's `watch` tells more: `callback.watch.findings()`.
"""

from ..machine import quiet_import
from .watch import Watch


def transformers_watch(ema=None, every=None, show=True):
    """A TrainerCallback."""
    transformers = quiet_import("transformers", "transformers_watch")

    class WatchCallback(transformers.TrainerCallback):
        watch = None

        def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
            self.watch = Watch(model, optimizer, ema, every)

        def on_train_end(self, args, state, control, **kwargs):
            self.watch.remove()
            if show and state.is_world_process_zero:
                print(self.watch)

    return WatchCallback()


def lightning_watch(ema=None, every=None, show=True):
    """A Lightning Callback that watches what the first optimiser of the module trains."""
    lightning = quiet_import("lightning", "lightning_watch")

    class WatchCallback(lightning.Callback):
        watch = None

        def on_train_start(self, trainer, module):
            self.watch = Watch(module, trainer.optimizers[0], ema, every, others=trainer.optimizers[1:])

        def on_train_end(self, trainer, module):
            self.watch.remove()
            if show and trainer.is_global_zero:
                print(self.watch)

    return WatchCallback()
